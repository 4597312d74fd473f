"""The patterns of the standard Transformers: full, causal, windows, documents."""

import torch
from torch import Tensor

from phylon.patterns.base import And, Or, Pattern, Records, everything
from phylon.patterns.bounds import Bounds, Span, Tiles
from phylon.spec.base import Mechanism
from phylon.spec.errors import UserError
from phylon.spec.registry import register


class Full(Mechanism, Pattern, frozen=True, kw_only=True):
    """Every query sees every key. *Attention Is All You Need* (arXiv:1706.03762), section 3.2.3, encoder."""

    def allowed(self, query: Records, key: Records) -> Tensor:
        return everything(query, key)

    def tiles(self, query: Bounds, key: Bounds) -> Tiles:
        ones = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=key.positions.low.device)
        return Tiles(ones, ones)

    @property
    def streams(self) -> bool:
        return False

    @property
    def relative(self) -> bool:
        return True


class Causal(Mechanism, Pattern, frozen=True, kw_only=True):
    """A query sees itself and what came before: ``key <= query``. arXiv:1706.03762, section 3.2.3, decoder."""

    def allowed(self, query: Records, key: Records) -> Tensor:
        return key.positions <= query.positions

    def tiles(self, query: Bounds, key: Bounds) -> Tiles:
        q, k = query.positions, key.positions
        return Tiles(k.low <= q.high, k.high <= q.low)

    @property
    def streams(self) -> bool:
        return True

    @property
    def relative(self) -> bool:
        return True


class Window(Mechanism, Pattern, frozen=True, kw_only=True):
    """A causal window of ``size`` tokens: itself and the ``size - 1`` before it. Mistral 7B (arXiv:2310.06825), §2."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError(f"window size must be at least 1, got {self.size}")

    def allowed(self, query: Records, key: Records) -> Tensor:
        return (key.positions <= query.positions) & (key.positions > query.positions - self.size)

    def tiles(self, query: Bounds, key: Bounds) -> Tiles:
        q, k = query.positions, key.positions
        some = (k.low <= q.high) & (k.high > q.low - self.size)
        return Tiles(some, (k.high <= q.low) & (k.low > q.high - self.size))

    @property
    def streams(self) -> bool:
        return True

    @property
    def relative(self) -> bool:
        return True

    @property
    def reach(self) -> int | None:
        return self.size


class SymmetricWindow(Mechanism, Pattern, frozen=True, kw_only=True):
    """At most ``radius`` tokens away on either side. Longformer (arXiv:2004.05150), §3.1 (its w is 2 x radius)."""

    radius: int

    def __post_init__(self) -> None:
        if self.radius < 0:
            raise UserError(f"window radius must be at least 0, got {self.radius}")

    def allowed(self, query: Records, key: Records) -> Tensor:
        return (key.positions - query.positions).abs() <= self.radius

    def tiles(self, query: Bounds, key: Bounds) -> Tiles:
        q, k = query.positions, key.positions
        some = (k.low - q.high <= self.radius) & (q.low - k.high <= self.radius)
        return Tiles(some, (k.high - q.low <= self.radius) & (q.high - k.low <= self.radius))

    @property
    def streams(self) -> bool:
        return self.radius == 0

    @property
    def relative(self) -> bool:
        return True


class Document(Mechanism, Pattern, frozen=True, kw_only=True):
    """Query and key are of one document, and neither is padding: equal segments, not 0."""

    def allowed(self, query: Records, key: Records) -> Tensor:
        if query.segments is None and key.segments is None:
            return everything(query, key)
        ones = torch.ones((), dtype=torch.int64, device=query.positions.device)
        query_ids = ones if query.segments is None else query.segments
        key_ids = ones if key.segments is None else key.segments
        shape = everything(query, key)
        return (query_ids == key_ids) & (key_ids != 0) & shape

    def tiles(self, query: Bounds, key: Bounds) -> Tiles:
        if query.segments is None and key.segments is None:
            return Full().tiles(query, key)
        one = torch.ones((1, 1, 1, 1), dtype=torch.int64, device=key.positions.low.device)
        q, k = (Span(one, one) if side.segments is None else side.segments for side in (query, key))
        some = (torch.maximum(q.low, k.low) <= torch.minimum(q.high, k.high)) & ~q.is_all(0) & ~k.is_all(0)
        return Tiles(some, (q.low == q.high) & (k.low == k.high) & (q.low == k.low) & (k.low != 0))

    @property
    def streams(self) -> bool:
        return False


register(Full, paper="arXiv:1706.03762 §3.2.3", cases=lambda: [Full()])
register(Causal, paper="arXiv:1706.03762 §3.2.3", cases=lambda: [Causal()])
register(Window, paper="arXiv:2310.06825 §2", cases=lambda: [Window(size=1), Window(size=4)])
register(
    SymmetricWindow, paper="arXiv:2004.05150 §3.1", cases=lambda: [SymmetricWindow(radius=0), SymmetricWindow(radius=2)]
)
register(Document, paper="packing with segments; design", cases=lambda: [Document()])
register(And, paper="composition", cases=lambda: [And(patterns=(Causal(), SymmetricWindow(radius=2)))])
register(Or, paper="composition", cases=lambda: [Or(patterns=(Window(size=2), Causal()))])
