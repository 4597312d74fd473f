"""What a recurrent mixer keeps between steps: a few tensors of fixed size a row, however long the text."""

from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from phylon.layers.state.chunk import Chunk, previous_segments
from phylon.layers.state.part import StatePart
from phylon.ops.scan import Breaks

if TYPE_CHECKING:
    from phylon.layers.context import Context
    from phylon.layers.state.state import State


class RecurrentState(StatePart):
    """``tensors`` (B, …) each: for Mamba the inputs of the convolution before, and the state of the recurrence.

    A forward pass reads them and calls ``update``; the new ones count from ``commit`` on. ``spare`` is memory for the
    new ones, so that a step allocates nothing and a pass that fails leaves the old ones as they were.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors
        self.spare = tuple(torch.empty_like(t) for t in tensors)
        self._pending: tuple[Tensor, ...] | None = None

    def update(self, *tensors: Tensor) -> None:
        """What the chunk under way leaves behind, in the order and with the shapes of ``tensors``."""
        assert [t.shape for t in tensors] == [t.shape for t in self.tensors], "a recurrent state keeps its shapes"
        self._pending = tensors

    def commit(self, chunk: Chunk, state: "State") -> None:
        assert self._pending is not None, "the mixer did not update its state"
        for kept, new in zip(self.spare, self._pending, strict=True):
            if new is not kept:
                # Copied, because a new tensor may be a view of a whole chunk.
                kept.copy_(new)
        self.tensors, self.spare, self._pending = self.spare, self.tensors, None

    def rollback(self) -> None:
        self._pending = None

    def select(self, rows: Tensor) -> Self:
        return type(self)(*(t[rows] for t in self.tensors))

    def insert(self, rows: Tensor, other: "RecurrentState") -> None:
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            mine[rows] = theirs.to(mine.dtype)

    def can_crop(self, state: "State") -> str | None:
        return "a recurrent state holds its whole past in one sum and cannot forget the end of it"

    @property
    def n_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)


def boundaries(ctx: "Context") -> Breaks:
    """Where recurrent mixers forget and where they stand still, computed once per forward pass."""
    return ctx.memo("boundaries", lambda: _boundaries(ctx))


def _boundaries(ctx: "Context") -> Breaks:
    segments = ctx.records.segments
    if segments is None:
        return Breaks()
    last = segments.new_zeros(len(segments))
    if ctx.state is not None:
        last = torch.tensor(ctx.state.last_segment, device=segments.device, dtype=segments.dtype)
    before = previous_segments(segments, last)
    real = segments != 0
    # A row that has seen nothing yet has nothing to forget.
    resets = real & (before != 0) & (segments != before)
    return Breaks(resets=_unless_plain(resets, False), real=_unless_plain(real, True))


def _unless_plain(mask: Tensor, plain: bool) -> Tensor | None:
    """``mask``, or ``None`` where it says ``plain`` everywhere; asked on the CPU only, where asking is free."""
    return None if mask.device.type == "cpu" and bool((mask == plain).all()) else mask
