"""The factorised patterns of the Sparse Transformer: strided, and fixed. Their band is a ``Window``."""

import torch
from torch import Tensor

from phylon.patterns.base import Pattern, Records
from phylon.patterns.bounds import Bounds, Tiles
from phylon.spec.base import Mechanism
from phylon.spec.errors import UserError
from phylon.spec.registry import register


class Strided(Mechanism, Pattern, frozen=True, kw_only=True):
    """A query sees itself and each ``stride``-th token before it: ``(query - key) mod stride = 0``.

    Sparse Transformer, Child et al. (arXiv:1904.10509), section 4.3, the set A(2); its A(1) is the band, a ``Window``.
    Merged heads see ``Window(size=l) | Strided(stride=l)``; in turn, a tuple of blocks has one each. Positions count
    within the document. n / stride of n keys count, but where the stride is shorter than a tile, every earlier tile
    holds one of them.
    """

    stride: int

    def __post_init__(self) -> None:
        if self.stride < 1:
            raise UserError(f"stride must be at least 1, got {self.stride}")

    def allowed(self, query: Records, key: Records) -> Tensor:
        distance = query.positions - key.positions
        return (distance >= 0) & (distance % self.stride == 0)

    def tiles(self, query: Bounds, key: Bounds) -> Tiles:
        q, k = query.positions, key.positions
        least, most = q.low - k.high, q.high - k.low
        some = (most >= 0) & (most - most % self.stride >= least)
        return Tiles(some, (least >= 0) & ((least == most) | (self.stride == 1)) & (least % self.stride == 0))

    @property
    def streams(self) -> bool:
        return True

    @property
    def relative(self) -> bool:
        return True


class SameBlock(Mechanism, Pattern, frozen=True, kw_only=True):
    """Tokens of the same block of ``size``: ``floor(query / size) = floor(key / size)``.

    Sparse Transformer (arXiv:1904.10509), section 4.3, the set A(1) of fixed attention as ``SameBlock(size=l) &
    Causal()``; its heads merged see ``(SameBlock(size=l) | Summary(size=l, count=c)) & Causal()``. n x size scores.
    """

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError(f"block size must be at least 1, got {self.size}")

    def allowed(self, query: Records, key: Records) -> Tensor:
        return _block(query.positions, self.size) == _block(key.positions, self.size)

    def tiles(self, query: Bounds, key: Bounds) -> Tiles:
        low, high = (_block(p, self.size) for p in (query.positions.low, query.positions.high))
        first, last = (_block(p, self.size) for p in (key.positions.low, key.positions.high))
        return Tiles((first <= high) & (low <= last), (low == high) & (first == last) & (low == first))

    @property
    def streams(self) -> bool:
        return self.size == 1

    @property
    def reach(self) -> int | None:
        return self.size

    @property
    def grain(self) -> int:
        return self.size


class Summary(Mechanism, Pattern, frozen=True, kw_only=True):
    """The last ``count`` positions of every block of ``size``, up to the query: ``key mod size >= size - count``.

    Sparse Transformer (arXiv:1904.10509), section 4.3, the set A(2) of fixed attention: these positions sum up their
    block for everything that follows. Before the first of them a query sees nothing.
    """

    size: int
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.count <= self.size:
            raise UserError(f"count must be at least 1 and at most the block size {self.size}, got {self.count}")

    def allowed(self, query: Records, key: Records) -> Tensor:
        return (key.positions % self.size >= self.size - self.count) & (key.positions <= query.positions)

    def tiles(self, query: Bounds, key: Bounds) -> Tiles:
        q, k, start = query.positions, key.positions, self.size - self.count
        place = k.low % self.size
        # The first summary position of the tile, if its keys stood without gaps.
        first = k.low + (start - place).clamp(min=0)
        every = (place >= start) & (k.high - k.low < self.size - place) & (k.high <= q.low)
        return Tiles((first <= k.high) & (first <= q.high), every)

    @property
    def streams(self) -> bool:
        return True


def _block(positions: Tensor, size: int) -> Tensor:
    return torch.div(positions, size, rounding_mode="floor")


register(Strided, paper="arXiv:1904.10509 §4.3", cases=lambda: [Strided(stride=1), Strided(stride=3)])
register(SameBlock, paper="arXiv:1904.10509 §4.3", cases=lambda: [SameBlock(size=1), SameBlock(size=4)])
register(Summary, paper="arXiv:1904.10509 §4.3", cases=lambda: [Summary(size=4, count=1), Summary(size=3, count=2)])
