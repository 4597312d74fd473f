"""Who may look at whom: pure index algebra, without parameters.

A pattern compares records of queries and keys. Two queries with equal records see the same keys, wherever they lie in
memory. Patterns compose with ``&`` and ``|``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from math import gcd
from operator import and_, or_
from typing import Any, TypeVar

import torch
from torch import Tensor

from phylon.patterns.bounds import Bounds, Tiles
from phylon.spec.base import Mechanism, Slot
from phylon.spec.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Records:
    """What a pattern knows of the tokens of one side.

    ``positions`` (B or 1, N) integer, counted within the document; ``segments`` (B or 1, N) integer, 0 is padding and
    equal ids are one document, or ``None`` when every token is real and of the same document; ``marks`` (B or 1, N)
    integer, given by the caller (0 where none are given); ``lengths`` (B or 1, N) integer, the tokens of the document,
    which ``measured`` counts. Nobody changes the tensors: what is made of them is kept in ``memo``.
    """

    positions: Tensor
    segments: Tensor | None = None
    marks: Tensor | None = None
    lengths: Tensor | None = None
    _memo: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def memo(self, key: Any, make: Callable[[], T]) -> T:
        """Compute once for these records what the blocks of a forward pass share (tile plans)."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    def as_queries(self) -> "Records":
        """Every field as (B or 1, 1, N, 1), ready to broadcast against keys."""
        return self.map(lambda field: field[:, None, :, None])

    def as_keys(self) -> "Records":
        """Every field as (B or 1, 1, 1, N)."""
        return self.map(lambda field: field[:, None, None, :])

    @property
    def batch(self) -> int:
        """Rows that differ: B or 1."""
        fields = (self.positions, self.segments, self.marks, self.lengths)
        return max(len(field) for field in fields if field is not None)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Records":
        """New records with every field changed."""
        optional = (self.segments, self.marks, self.lengths)
        return Records(change(self.positions), *(None if field is None else change(field) for field in optional))


class Pattern(Slot):
    """The slot that patterns fill, with composition."""

    def allowed(self, query: Records, key: Records) -> Tensor:
        """Boolean (B or 1, H or 1, T, S): may this query look at this key? The arguments broadcast."""
        raise NotImplementedError

    def tiles(self, query: Bounds, key: Bounds) -> Tiles:
        """Which tiles hold a visible pair, and which hold nothing else; the arguments broadcast as in ``allowed``."""
        return Tiles(*(torch.full((1, 1, 1, 1), answer, device=key.positions.low.device) for answer in (True, False)))

    @property
    def streams(self) -> bool:
        """True when nothing that a query sees depends on a later position of its document."""
        raise NotImplementedError

    @property
    def reach(self) -> int | None:
        """How many of the last keys a query may need, itself included; ``None`` when there is no bound."""
        return None

    @property
    def relative(self) -> bool:
        """True when ``allowed`` depends on the distance between the two positions and on nothing else."""
        return False

    @property
    def needs_lengths(self) -> bool:
        """True when the pattern reads the lengths of the documents: a longer document changes what its tokens see."""
        return False

    @property
    def heads(self) -> int:
        """How many heads the pattern tells apart; 1 when all see the same."""
        return 1

    @property
    def grain(self) -> int:
        """So many tokens, from a multiple of it on, see the same and are seen by the same."""
        return 1

    def __and__(self, other: "Pattern") -> "Pattern":
        mine, theirs = (p.patterns if isinstance(p, And) else (p,) for p in (self, other))
        return And(patterns=(*mine, *theirs))

    def __or__(self, other: "Pattern") -> "Pattern":
        mine, theirs = (p.patterns if isinstance(p, Or) else (p,) for p in (self, other))
        return Or(patterns=(*mine, *theirs))


class _Composed(Mechanism, Pattern, frozen=True, kw_only=True):
    """Several patterns over the same pair of tokens."""

    patterns: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        if not self.patterns:
            raise UserError("a composed pattern needs at least one part")
        counts = {pattern.heads for pattern in self.patterns} - {1}
        if len(counts) > 1:
            raise UserError(f"patterns for {' and '.join(map(str, sorted(counts)))} heads cannot be composed")

    @property
    def relative(self) -> bool:
        return all(pattern.relative for pattern in self.patterns)

    @property
    def needs_lengths(self) -> bool:
        return any(pattern.needs_lengths for pattern in self.patterns)

    @property
    def heads(self) -> int:
        return max(pattern.heads for pattern in self.patterns)

    @property
    def grain(self) -> int:
        return gcd(*(pattern.grain for pattern in self.patterns))


class And(_Composed, frozen=True, kw_only=True):
    """Allowed where every part allows."""

    def allowed(self, query: Records, key: Records) -> Tensor:
        return reduce(and_, (pattern.allowed(query, key) for pattern in self.patterns))

    def tiles(self, query: Bounds, key: Bounds) -> Tiles:
        some, every = zip(*(pattern.tiles(query, key) for pattern in self.patterns), strict=True)
        return Tiles(reduce(and_, some), reduce(and_, every))

    @property
    def streams(self) -> bool:
        return any(pattern.streams for pattern in self.patterns) and not self.needs_lengths

    @property
    def reach(self) -> int | None:
        return min((p.reach for p in self.patterns if p.reach is not None), default=None)


class Or(_Composed, frozen=True, kw_only=True):
    """Allowed where any part allows."""

    def allowed(self, query: Records, key: Records) -> Tensor:
        return reduce(or_, (pattern.allowed(query, key) for pattern in self.patterns))

    def tiles(self, query: Bounds, key: Bounds) -> Tiles:
        some, every = zip(*(pattern.tiles(query, key) for pattern in self.patterns), strict=True)
        return Tiles(reduce(or_, some), reduce(or_, every))

    @property
    def streams(self) -> bool:
        return all(pattern.streams for pattern in self.patterns)

    @property
    def reach(self) -> int | None:
        reaches = [pattern.reach for pattern in self.patterns]
        return None if None in reaches else max(r for r in reaches if r is not None)


def everything(query: Records, key: Records) -> Tensor:
    """``True`` for every pair."""
    return torch.ones_like(query.positions, dtype=torch.bool) & torch.ones_like(key.positions, dtype=torch.bool)


def aligned(n_queries: int, n_keys: int, device: torch.device) -> tuple[Records, Records]:
    """Records where none are given: one document, the last query at the last key (bottom-right)."""
    keys = torch.arange(n_keys, device=device)[None]
    return Records(torch.arange(n_keys - n_queries, n_keys, device=device)[None]), Records(keys)


def measured(query: Records, key: Records) -> tuple[Records, Records]:
    """The same records with the lengths of the documents, counted over the keys (where the whole text is)."""
    if query.lengths is not None and key.lengths is not None:
        return query, key
    if key.segments is None and query.segments is None:
        count = torch.full((1, 1), key.positions.shape[1], device=key.positions.device)
        lengths = [count.expand(1, side.positions.shape[1]) for side in (query, key)]
    else:
        lengths = _counted(query, key)
    sides = zip((query, key), lengths, strict=True)
    made = [Records(side.positions, side.segments, side.marks, length) for side, length in sides]
    return made[0], made[1]


def _counted(query: Records, key: Records) -> list[Tensor]:
    ids = [torch.ones_like(s.positions) if s.segments is None else s.segments for s in (query, key)]
    batch = max(map(len, ids))
    ids = [side.expand(batch, -1) for side in ids]
    known, place = torch.unique(torch.cat(ids, 1), return_inverse=True)
    of_query, of_key = place.split([side.shape[1] for side in ids], 1)
    counts = place.new_zeros(batch, len(known)).scatter_add_(1, of_key, torch.ones_like(of_key))
    return [counts.gather(1, of_query), counts.gather(1, of_key)]
