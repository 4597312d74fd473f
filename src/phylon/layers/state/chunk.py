"""What one forward pass appends to a state, and where its tokens stand."""

from dataclasses import dataclass

import torch
from torch import Tensor


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
    index = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    seen = torch.where(segments != 0, index, -1).cummax(1).values
    before = torch.cat([seen.new_full((len(segments), 1), -1), seen[:, :-1]], dim=1)
    return torch.where(before >= 0, segments.gather(1, before.clamp(min=0)), last_segment[:, None])
