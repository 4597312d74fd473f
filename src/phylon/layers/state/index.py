"""Positions and segments of the keys that a state holds: one index for all mixers of the same geometry."""

import torch
from torch import Tensor

from phylon.layers.state.chunk import Chunk
from phylon.patterns import Records

FIRST_CAPACITY = 64
"""Tokens that a state has room for before it grows."""


class FullIndex:
    """Every token a row has seen, at the slot of its rank. ``capacity`` doubles when no maximum was given."""

    def __init__(self, batch: int, max_len: int | None, device: torch.device) -> None:
        self.capacity = max_len or FIRST_CAPACITY
        self.positions = torch.zeros(batch, self.capacity, dtype=torch.int32, device=device)
        self.segments = torch.zeros_like(self.positions)
        self.n_keys = 0
        self.slots: slice | tuple[Tensor, Tensor, Tensor] = slice(0, 0)

    def begin(self, chunk: Chunk, lengths: list[int]) -> None:
        """Enter the chunk's tokens; nothing counts until the state commits."""
        self.n_keys = max(n + c for n, c in zip(lengths, chunk.counts, strict=True))
        while self.n_keys > self.capacity:
            self.capacity *= 2
        self.positions = grown(self.positions, self.capacity)
        self.segments = grown(self.segments, self.capacity)
        if chunk.uniform:
            start = lengths[0]
            self.slots = slice(start, start + chunk.n_tokens)
            self.positions[:, self.slots] = chunk.positions.to(torch.int32)
            self.segments[:, self.slots] = 1 if chunk.segments is None else chunk.segments.to(torch.int32)
            return
        start_B = torch.tensor(lengths, device=self.segments.device)
        beyond = torch.arange(self.capacity, device=self.segments.device)[None] >= start_B[:, None]
        self.segments.masked_fill_(beyond, 0)
        row, column, rank = chunk.real()
        slot = start_B[row] + rank
        self.slots = (row, column, slot)
        positions = chunk.positions.expand(len(lengths), -1)
        self.positions[row, slot] = positions[row, column].to(torch.int32)
        assert chunk.segments is not None
        self.segments[row, slot] = chunk.segments[row, column].to(torch.int32)

    def records(self) -> Records:
        """Records (B, S) of the keys, the chunk's included; slots beyond a row's length are padding."""
        return Records(self.positions[:, : self.n_keys], self.segments[:, : self.n_keys])

    def commit(self, chunk: Chunk, lengths: list[int]) -> None:
        """Nothing to do: the tokens are in their slots."""

    def rollback(self) -> None:
        """Nothing to do: ``begin`` clears what lies beyond a row's length."""

    def crop(self, lengths: list[int]) -> None:
        """Nothing to do, for the same reason."""


class RollingIndex:
    """The last ``window`` tokens of each row, at slot ``rank modulo window``."""

    def __init__(self, batch: int, window: int, device: torch.device) -> None:
        self.window = window
        self.positions = torch.zeros(batch, window, dtype=torch.int32, device=device)
        self.segments = torch.zeros_like(self.positions)
        self.slot: int | None = None
        self.n_kept = 0
        self.chunk: Chunk | None = None
        self._undo: tuple[Tensor, Tensor, int] | None = None

    def begin(self, chunk: Chunk, lengths: list[int]) -> None:
        """A single token per row goes straight into its slot, whose old token no later query may see any more."""
        self.chunk = chunk
        self.n_kept = min(max(lengths), self.window)
        self.slot = None
        if chunk.uniform and chunk.n_tokens == 1:
            self.slot = slot = lengths[0] % self.window
            self._undo = (self.positions[:, slot].clone(), self.segments[:, slot].clone(), slot)
            self.n_kept = min(lengths[0] + 1, self.window)
            self.positions[:, slot] = chunk.positions[:, 0].to(torch.int32)
            self.segments[:, slot] = 1 if chunk.segments is None else chunk.segments[:, 0].to(torch.int32)

    def records(self) -> Records:
        """Records of the kept keys, followed by the chunk's unless it is already among them."""
        positions, segments = self.positions[:, : self.n_kept], self.segments[:, : self.n_kept]
        if self.slot is not None:
            return Records(positions, segments)
        assert self.chunk is not None
        new = self.chunk.positions.expand(len(positions), -1).to(torch.int32)
        new_segments = torch.ones_like(new) if self.chunk.segments is None else self.chunk.segments.to(torch.int32)
        return Records(torch.cat([positions, new], 1), torch.cat([segments, new_segments.expand_as(new)], 1))

    def destinations(self, chunk: Chunk, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """``(row, column, slot)`` of the tokens that stay in the buffer."""
        device = self.positions.device
        counts = torch.tensor(chunk.counts, device=device)
        if chunk.segments is None or chunk.uniform:
            grid = torch.ones(len(lengths), chunk.n_tokens, dtype=torch.bool, device=device)
            row, column = grid.nonzero(as_tuple=True)
            rank = column
        else:
            row, column, rank = chunk.real()
        stays = rank >= counts[row] - self.window
        row, column, rank = row[stays], column[stays], rank[stays]
        return row, column, (torch.tensor(lengths, device=device)[row] + rank) % self.window

    def commit(self, chunk: Chunk, lengths: list[int]) -> None:
        self._undo = None
        if self.slot is None:
            row, column, slot = self.destinations(chunk, lengths)
            self.positions[row, slot] = chunk.positions.expand(len(lengths), -1)[row, column].to(torch.int32)
            new = torch.ones_like(self.positions[:, :1]) if chunk.segments is None else chunk.segments
            new = new.expand(len(lengths), chunk.n_tokens)
            self.segments[row, slot] = new[row, column].to(torch.int32)
        self.chunk = None

    def rollback(self) -> None:
        """Forget the chunk of a forward pass that failed."""
        if self._undo is not None:
            positions, segments, slot = self._undo
            self.positions[:, slot], self.segments[:, slot] = positions, segments
        self._undo = self.chunk = None

    def crop(self, lengths: list[int]) -> None:
        for row, length in enumerate(lengths):
            self.segments[row, length:] = 0


def grown(buffer: Tensor, capacity: int) -> Tensor:
    """``buffer`` (B, N, …) with at least ``capacity`` slots; new slots are zero."""
    if buffer.shape[1] >= capacity:
        return buffer
    new = buffer.new_zeros(buffer.shape[0], capacity, *buffer.shape[2:])
    new[:, : buffer.shape[1]] = buffer
    return new
