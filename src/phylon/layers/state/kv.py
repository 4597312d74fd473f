"""Keys and values kept between steps: all of them, or the last window."""

from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from phylon.layers.state.chunk import Chunk
from phylon.layers.state.index import FullIndex, RollingIndex, grown
from phylon.layers.state.part import StatePart
from phylon.patterns import Records

if TYPE_CHECKING:
    from phylon.layers.state.state import State


class KVState(StatePart):
    """Interface of an attention's state. ``k`` (B, slots, K, E), ``v`` (B, slots, K, Ev)."""

    k: Tensor
    v: Tensor

    def append(self, k: Tensor, v: Tensor, state: "State") -> tuple[Tensor, Tensor, Records | None]:
        """Add the chunk's keys and values (B, T, K, E); all keys and values a query may need, and their records.

        The records are ``None`` where all rows are one document in order, so that kernels may align bottom-right.
        """
        raise NotImplementedError

    def select(self, rows: Tensor) -> Self:
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.k, new.v = self.k[rows], self.v[rows]
        return new

    def insert(self, rows: Tensor, other: "KVState") -> None:
        slots = max(self.k.shape[1], other.k.shape[1])
        self.k, self.v = grown(self.k, slots), grown(self.v, slots)
        self.k[rows], self.v[rows] = grown(other.k, slots), grown(other.v, slots)

    @property
    def n_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.k, self.v))


class FullKV(KVState):
    """Every key and value since the start. ``2 x K x E`` numbers a token."""

    window = None

    def __init__(self, batch: int, heads: int, widths: tuple[int, int], max_len: int | None, like: Tensor) -> None:
        slots = max_len or 0
        self.k = like.new_zeros(batch, slots, heads, widths[0])
        self.v = like.new_zeros(batch, slots, heads, widths[1])

    def append(self, k: Tensor, v: Tensor, state: "State") -> tuple[Tensor, Tensor, Records | None]:
        index = state.index(None)
        assert isinstance(index, FullIndex)
        self.k, self.v = grown(self.k, index.capacity), grown(self.v, index.capacity)
        if isinstance(index.slots, slice):
            self.k[:, index.slots], self.v[:, index.slots] = k, v
        else:
            row, column, slot = index.slots
            self.k[row, slot], self.v[row, slot] = k[row, column].to(self.k.dtype), v[row, column].to(self.v.dtype)
        records = None if state.chunk_aligned else state.memo(("records", None), index.records)
        return self.k[:, : index.n_keys].to(k.dtype), self.v[:, : index.n_keys].to(v.dtype), records


class CrossKV(KVState):
    """Keys and values of the encoder's output, computed once, by the first forward pass."""

    def __init__(self, batch: int, heads: int, width: int, like: Tensor) -> None:
        self.k = like.new_zeros(batch, 0, heads, width)
        self.v = like.new_zeros(batch, 0, heads, width)
        self._pending: tuple[Tensor, Tensor] | None = None

    def fill(self, k: Tensor, v: Tensor) -> None:
        """Keep ``k`` and ``v`` (B, S, K, E) once the forward pass commits."""
        self._pending = (k, v)

    def commit(self, chunk: Chunk, state: "State") -> None:
        if self._pending is not None:
            (self.k, self.v), self._pending = self._pending, None

    def rollback(self) -> None:
        self._pending = None


class RollingKV(KVState):
    """The last ``window`` keys and values. Mistral 7B (arXiv:2310.06825), section 2, rolling buffer cache."""

    def __init__(self, batch: int, heads: int, widths: tuple[int, int], window: int, like: Tensor) -> None:
        self.window = window
        self.k = like.new_zeros(batch, window, heads, widths[0])
        self.v = like.new_zeros(batch, window, heads, widths[1])
        self._pending: tuple[Tensor, Tensor] | None = None
        self._undo: tuple[Tensor, Tensor, int] | None = None

    def append(self, k: Tensor, v: Tensor, state: "State") -> tuple[Tensor, Tensor, Records | None]:
        index = state.index(self.window)
        assert isinstance(index, RollingIndex)
        records = state.memo(("records", self.window), index.records)
        old_k, old_v = self.k[:, : index.n_kept], self.v[:, : index.n_kept]
        if index.slot is not None:
            slot = index.slot
            self._undo = (self.k[:, slot].clone(), self.v[:, slot].clone(), slot)
            self.k[:, slot], self.v[:, slot] = k[:, 0], v[:, 0]
            return old_k.to(k.dtype), old_v.to(v.dtype), records
        self._pending = (k, v)
        return torch.cat([old_k.to(k.dtype), k], 1), torch.cat([old_v.to(v.dtype), v], 1), records

    def rollback(self) -> None:
        if self._undo is not None:
            old_k, old_v, slot = self._undo
            self.k[:, slot], self.v[:, slot] = old_k, old_v
        self._pending = self._undo = None

    def commit(self, chunk: Chunk, state: "State") -> None:
        self._undo = None
        if self._pending is None:
            return
        index = state.index(self.window)
        assert isinstance(index, RollingIndex)
        row, column, slot = state.memo(("destinations", self.window), lambda: index.destinations(chunk, state.lengths))
        k, v = self._pending
        self.k[row, slot], self.v[row, slot] = k[row, column].to(self.k.dtype), v[row, column].to(self.v.dtype)
        self._pending = None

    def can_crop(self, state: "State") -> str | None:
        if max(state.lengths, default=0) > self.window:
            return f"a rolling buffer of {self.window} has already overwritten older tokens"
        return None
