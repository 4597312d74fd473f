"""What a pattern may know of whole tiles of tokens: the least and the greatest of each record."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from phylon.patterns.base import Records


class Tiles(NamedTuple):
    """Booleans (B or 1, H or 1, query tiles, key tiles) that broadcast.

    ``some`` is false only where no query of the tile sees a key of the tile; ``every`` is true only where each query
    sees each key. Either may err in the other direction, which costs time and nothing else.
    """

    some: Tensor
    every: Tensor


@dataclass(frozen=True)
class Span:
    """The least and the greatest value of a record in every tile; both (B or 1, tiles)."""

    low: Tensor
    high: Tensor

    def meets(self, value: int) -> Tensor:
        """Where ``value`` may occur."""
        return (self.low <= value) & (self.high >= value)

    def is_all(self, value: int) -> Tensor:
        """Where every token has ``value``."""
        return (self.low == value) & (self.high == value)


@dataclass(frozen=True)
class Bounds:
    """The spans of the records of one side; those that the records lack are ``None``."""

    positions: Span
    segments: Span | None = None
    marks: Span | None = None
    lengths: Span | None = None

    @staticmethod
    def of(records: "Records", block: int) -> "Bounds":
        """Bounds (B or 1, tiles) of tiles of ``block`` tokens; the last one may have fewer."""
        fields = (records.positions, records.segments, records.marks, records.lengths)
        return Bounds(*(None if field is None else _span(field, block) for field in fields))  # type: ignore[arg-type]

    def as_queries(self) -> "Bounds":
        """Every field as (B or 1, 1, tiles, 1)."""
        return self._index((slice(None), None, slice(None), None))

    def as_keys(self) -> "Bounds":
        """Every field as (B or 1, 1, 1, tiles)."""
        return self._index((slice(None), None, None, slice(None)))

    def rows(self, tiles: slice) -> "Bounds":
        """The bounds of some of the tiles."""
        return self._index((slice(None), tiles))

    def _index(self, index: tuple[slice | None, ...]) -> "Bounds":
        spans = (self.positions, self.segments, self.marks, self.lengths)
        changed = (None if s is None else Span(s.low[index], s.high[index]) for s in spans)
        return Bounds(*changed)  # type: ignore[arg-type]


def in_tiles(field: Tensor, block: int) -> Tensor:
    """``field`` (B or 1, N) as (B or 1, tiles, block); the last token fills up the last tile."""
    missing = -field.shape[1] % block
    if missing:
        field = torch.cat([field, field[:, -1:].expand(-1, missing)], 1)
    return field.unflatten(1, (-1, block))


def _span(field: Tensor, block: int) -> Span:
    return Span(*torch.aminmax(in_tiles(field, block), dim=-1))
