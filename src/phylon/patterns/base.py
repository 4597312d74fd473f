"""Who may look at whom: pure index algebra, without parameters.

A pattern compares records of queries and keys. Two queries with equal records see the same keys, wherever they lie in
memory. Patterns compose with ``&`` and ``|``.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from phylon.spec.base import Mechanism, Slot
from phylon.spec.errors import UserError


@dataclass(frozen=True)
class Records:
    """What a pattern knows of the tokens of one side.

    ``positions`` (B or 1, N) integer, counted within the document; ``segments`` (B or 1, N) integer, 0 is padding and
    equal ids are one document, or ``None`` when every token is real and of the same document; ``marks`` (B or 1, N).
    """

    positions: Tensor
    segments: Tensor | None = None
    marks: Tensor | None = None

    def as_queries(self) -> "Records":
        """Every field as (B or 1, 1, N, 1), ready to broadcast against keys."""
        return self._map(lambda field: field[:, None, :, None])

    def as_keys(self) -> "Records":
        """Every field as (B or 1, 1, 1, N)."""
        return self._map(lambda field: field[:, None, None, :])

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Records":
        segments = None if self.segments is None else change(self.segments)
        return Records(change(self.positions), segments, None if self.marks is None else change(self.marks))


class Pattern(Slot):
    """The slot that patterns fill, with composition."""

    def allowed(self, query: Records, key: Records) -> Tensor:
        """Boolean (B or 1, H or 1, T, S): may this query look at this key? The arguments broadcast."""
        raise NotImplementedError

    @property
    def streams(self) -> bool:
        """True when no query ever looks at a later position of its document."""
        raise NotImplementedError

    @property
    def reach(self) -> int | None:
        """How many of the last keys a query may need, itself included; ``None`` when there is no bound."""
        return None

    def __and__(self, other: "Pattern") -> "Pattern":
        mine, theirs = (p.patterns if isinstance(p, And) else (p,) for p in (self, other))
        return And(patterns=(*mine, *theirs))

    def __or__(self, other: "Pattern") -> "Pattern":
        mine, theirs = (p.patterns if isinstance(p, Or) else (p,) for p in (self, other))
        return Or(patterns=(*mine, *theirs))


class And(Mechanism, Pattern, frozen=True, kw_only=True):
    """Allowed where every part allows."""

    patterns: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        _check_parts(self.patterns)

    def allowed(self, query: Records, key: Records) -> Tensor:
        result = self.patterns[0].allowed(query, key)
        for pattern in self.patterns[1:]:
            result = result & pattern.allowed(query, key)
        return result

    @property
    def streams(self) -> bool:
        return any(pattern.streams for pattern in self.patterns)

    @property
    def reach(self) -> int | None:
        return min((p.reach for p in self.patterns if p.reach is not None), default=None)


class Or(Mechanism, Pattern, frozen=True, kw_only=True):
    """Allowed where any part allows."""

    patterns: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        _check_parts(self.patterns)

    def allowed(self, query: Records, key: Records) -> Tensor:
        result = self.patterns[0].allowed(query, key)
        for pattern in self.patterns[1:]:
            result = result | pattern.allowed(query, key)
        return result

    @property
    def streams(self) -> bool:
        return all(pattern.streams for pattern in self.patterns)

    @property
    def reach(self) -> int | None:
        reaches = [pattern.reach for pattern in self.patterns]
        return None if None in reaches else max(r for r in reaches if r is not None)


def _check_parts(patterns: tuple[Pattern, ...]) -> None:
    if not patterns:
        raise UserError("a composed pattern needs at least one part")


def aligned(n_queries: int, n_keys: int, device: torch.device) -> tuple[Records, Records]:
    """Records where none are given: one document, the last query at the last key (bottom-right)."""
    keys = torch.arange(n_keys, device=device)[None]
    return Records(torch.arange(n_keys - n_queries, n_keys, device=device)[None]), Records(keys)
