"""What one forward pass appends to a state, and where its tokens stand."""

from dataclasses import dataclass

import torch
from torch import Tensor

from phylon.ops.checks import may_ask
from phylon.spec.errors import UserError


@dataclass(frozen=True)
class Chunk:
    """``positions`` and ``segments`` (B or 1, T) of the new tokens; ``counts`` how many of each row are real.

    ``uniform``: no padding, and every row has the same length before and after, so that slices serve for indices.
    """

    positions: Tensor
    segments: Tensor | None
    counts: list[int]
    n_tokens: int
    uniform: bool

    def real(self) -> tuple[Tensor, Tensor, Tensor]:
        """``(row, column, rank)`` of every real token; ``rank`` counts the real tokens of its row before it."""
        assert self.segments is not None
        is_real = self.segments != 0
        row, column = is_real.nonzero(as_tuple=True)
        rank = (is_real.cumsum(1) - 1)[row, column]
        return row, column, rank


def positions_from_segments(
    segments: Tensor, last_segment: Tensor | None = None, next_position: Tensor | None = None
) -> Tensor:
    """Positions (B, T) within each run of equal ids; padding (0) stands between tokens without counting.

    ``last_segment`` and ``next_position`` (B,) say which document the row was in and where it goes on.
    """
    real = segments != 0
    rank = real.cumsum(1) - 1
    batch = len(segments)
    if last_segment is None or next_position is None:
        last_segment = segments.new_zeros(batch)
        next_position = segments.new_zeros(batch)
    starts = real & (segments != previous_segments(segments, last_segment))
    offset = torch.where(starts, rank, -1).cummax(1).values
    offset = torch.where(offset >= 0, offset, -next_position[:, None])
    return torch.where(real, rank - offset, 0)


def previous_segments(segments: Tensor, last_segment: Tensor) -> Tensor:
    """The id (B, T) of the nearest real token before each token, or the row's ``last_segment`` (B,) where none is."""
    return _previous(segments, segments, last_segment)


def _previous(values: Tensor, segments: Tensor, first: Tensor) -> Tensor:
    """The value (B, T) of the nearest real token before each token, or the row's ``first`` (B,) where none is."""
    index = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    seen = torch.where(segments != 0, index, -1).cummax(1).values
    before = torch.cat([seen.new_full((len(segments), 1), -1), seen[:, :-1]], dim=1)
    return torch.where(before >= 0, values.gather(1, before.clamp(min=0)), first[:, None])


def check_rising(positions: Tensor, segments: Tensor, last_segment: Tensor, next_position: Tensor) -> None:
    """Refuse positions that do not rise within a document: a token does not see the keys that come after it.

    On the whole text tokens see each other by position; to a state, later ones are not there yet.
    """
    if not may_ask(positions):
        return
    same = (segments != 0) & (segments == previous_segments(segments, last_segment))
    fallen = same & (positions <= _previous(positions.expand_as(segments), segments, next_position - 1))
    if bool(fallen.any()):
        row, column = fallen.nonzero()[0].tolist()
        at = int(positions.expand_as(segments)[row, column])
        raise UserError(
            f"row {row}: position {at} does not rise within its document; a state takes tokens in their order, "
            "so call the model on the whole text, without one"
        )
