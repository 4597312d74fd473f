"""What every mixer's part of a state does; its tensors have one row for each row of the state."""

from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from phylon.layers.state.chunk import Chunk

if TYPE_CHECKING:
    from phylon.layers.state.state import State


class StatePart:
    """Interface of all parts. A forward pass appends; ``commit`` or ``rollback`` follows, once."""

    def commit(self, chunk: Chunk, state: "State") -> None:
        """Called once, after the whole forward pass."""

    def rollback(self) -> None:
        """Called when the forward pass failed: the state must be as before it."""

    def select(self, rows: Tensor) -> Self:
        """A part of the given rows, in that order, repeats allowed."""
        raise NotImplementedError

    def insert(self, rows: Tensor, other: Any) -> None:
        """Overwrite ``rows`` with the rows of ``other``, a part of the same kind."""
        raise NotImplementedError

    def can_crop(self, state: "State") -> str | None:
        """``None``, or the reason why earlier lengths cannot be restored."""
        return None

    @property
    def n_bytes(self) -> int:
        """Bytes of the buffers."""
        raise NotImplementedError
