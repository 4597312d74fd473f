"""BigBird: blocks of tokens that see their neighbours, the ends of the text, and a few blocks drawn at random."""

from collections.abc import Iterator

import torch
from torch import Tensor

from phylon.patterns.base import Pattern, Records
from phylon.patterns.bounds import Bounds, Span, Tiles
from phylon.patterns.mixing import mix
from phylon.spec.base import Mechanism
from phylon.spec.errors import UserError
from phylon.spec.registry import register

_WIDEST = 3
"""Blocks of a tile that are looked at one by one."""


class BigBird(Mechanism, Pattern, frozen=True, kw_only=True):
    """Blocks of ``block`` tokens see ``window`` blocks around them, ``ends`` at either end, and ``n_random`` more.

    Big Bird, Zaheer et al. (arXiv:2007.14062), section 2 and appendix D (internal construction: block 64, window 3, one
    global block at either end, 3 random ones). Global blocks see all and are seen by all. The random blocks are drawn
    without repeats among the rest, for each head, from the seed, the block and the document's length alone: no call
    changes what another one sees. Cost: n x block x (window + 2 ends + n_random) scores.
    """

    block: int
    n_heads: int
    window: int = 3
    ends: int = 1
    n_random: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("block", 1), ("n_heads", 1), ("window", 1), ("ends", 0), ("n_random", 0)):
            if getattr(self, name) < least:
                raise UserError(f"BigBird's {name} must be at least {least}, got {getattr(self, name)}")
        if self.window % 2 == 0:
            raise UserError(f"BigBird's window must be an odd number of blocks, got {self.window}")

    def allowed(self, query: Records, key: Records) -> Tensor:
        assert query.lengths is not None, "BigBird reads the documents' lengths: give measured records"
        return self._edges(self._block(query.positions), self._block(key.positions), self._count(query.lengths))

    def tiles(self, query: Bounds, key: Bounds) -> Tiles:
        """Exact for tiles of few blocks, all of one length of document."""
        assert query.lengths is not None, "BigBird reads the documents' lengths: give measured records"
        q, k = (Span(self._block(s.positions.low), self._block(s.positions.high)) for s in (query, key))
        n_blocks = self._count(query.lengths.low)
        some = torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=q.low.device)
        every = ~some
        for row in _blocks(q):
            for column in _blocks(k):
                edges = self._edges(row, column, n_blocks)
                some, every = some | edges, every & edges
        known = (q.high - q.low < _WIDEST) & (k.high - k.low < _WIDEST) & (query.lengths.low == query.lengths.high)
        return Tiles(some | ~known, every & known)

    @property
    def streams(self) -> bool:
        return False

    @property
    def needs_lengths(self) -> bool:
        return True

    @property
    def heads(self) -> int:
        return self.n_heads

    @property
    def grain(self) -> int:
        return self.block

    def _block(self, positions: Tensor) -> Tensor:
        return torch.div(positions, self.block, rounding_mode="floor")

    def _count(self, lengths: Tensor) -> Tensor:
        return self._block(lengths + (self.block - 1))

    def _edges(self, q: Tensor, k: Tensor, n_blocks: Tensor) -> Tensor:
        """(B, H, T, S): does block ``q`` see block ``k`` in a document of ``n_blocks``?"""
        seen = (q - k).abs() <= self.window // 2
        for side in (q, k):
            seen = seen | (side < self.ends) | (side >= n_blocks - self.ends)
        for pick in self._picks(q, n_blocks):
            seen = seen | (k == pick)
        return seen

    def _picks(self, q: Tensor, n_blocks: Tensor) -> Iterator[Tensor]:
        """The random blocks of ``q`` for every head, -1 where there are not so many (Floyd's sampling, 1987)."""
        device, beside = q.device, self.window // 2
        stop = n_blocks - self.ends
        left = (torch.minimum(q - beside, stop) - self.ends).clamp(min=0)
        right = (q + beside + 1).clamp(min=self.ends)
        candidates = left + (stop - right).clamp(min=0)
        bits = mix(torch.full((1, 1, 1, 1), self.seed & 0xFFFFFFFF, dtype=torch.int64, device=device))
        for counter in (torch.arange(self.n_heads, device=device)[None, :, None, None], q, candidates):
            bits = mix(bits ^ mix(counter.long() & 0xFFFFFFFF) ^ 0x9E3779B1)
        chosen: list[Tensor] = []
        for t in range(self.n_random):
            last = candidates - self.n_random + t
            bits = mix(bits + 0x9E3779B9 & 0xFFFFFFFF)
            rank = bits % (last + 1).clamp(min=1)
            for earlier in chosen:
                rank = torch.where(earlier == rank, last, rank)
            rank = torch.where(last < 0, -1, rank)
            chosen.append(rank)
            yield torch.where(rank < 0, -1, torch.where(rank < left, self.ends + rank, right + rank - left))


def _blocks(span: Span) -> Iterator[Tensor]:
    """The first few blocks of every tile; its last one again where it has fewer."""
    for i in range(_WIDEST):
        yield torch.minimum(span.low + i, span.high)


register(
    BigBird,
    paper="arXiv:2007.14062 §2",
    cases=lambda: [
        BigBird(block=2, n_heads=4, n_random=1),
        BigBird(block=1, n_heads=4, ends=0, n_random=2, seed=3),
    ],
)
