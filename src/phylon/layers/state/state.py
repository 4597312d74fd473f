"""The state of a whole model between calls: lengths, documents, key indices, and one part a mixer."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from phylon.layers.state.chunk import Chunk, check_rising, positions_from_segments
from phylon.layers.state.index import FullIndex, RollingIndex, grown
from phylon.layers.state.part import StatePart
from phylon.patterns import Records
from phylon.spec.errors import UserError

T = TypeVar("T")


class State:
    """What the model keeps between calls; inference only.

    ``lengths`` real tokens per row; padding is never appended. ``aligned``: every row is one document of the same
    length without gaps; ``chunk_aligned`` the same with the chunk under way. A forward pass calls ``begin``, the mixers
    append to their part, and ``commit`` makes the new lengths valid; a pass that fails calls ``rollback``, which leaves
    the state as it was. ``source`` are the records of the encoder's output, once a call has given it.
    """

    def __init__(self, batch_size: int, max_len: int | None, device: torch.device) -> None:
        self.max_len = max_len
        self.device = device
        self.lengths = [0] * batch_size
        self.last_segment = [0] * batch_size
        self.next_position = [0] * batch_size
        self.aligned = True
        self.chunk_aligned = True
        self.source: Records | None = None
        self.parts: dict[str, StatePart] = {}
        self._indices: dict[int | None, FullIndex | RollingIndex] = {}
        self._memo: dict[Any, Any] = {}

    @property
    def batch_size(self) -> int:
        return len(self.lengths)

    def add(self, path: str, part: StatePart) -> None:
        """Register the part of a mixer that keeps no keys of the row's own tokens: recurrent, cross."""
        self.parts[path] = part

    def add_keys(self, path: str, part: StatePart, window: int | None) -> None:
        """Register a mixer's part, and the key index of its geometry."""
        self.parts[path] = part
        if window not in self._indices:
            made = (
                FullIndex(self.batch_size, self.max_len, self.device)
                if window is None
                else RollingIndex(self.batch_size, window, self.device)
            )
            self._indices[window] = made

    def index(self, window: int | None) -> FullIndex | RollingIndex:
        """The key index of all full (``None``) or rolling parts of one window."""
        return self._indices[window]

    def memo(self, key: Any, make: Callable[[], T]) -> T:
        """Compute once per forward pass what several parts share."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    def chunk(self, n_tokens: int, segments: Tensor | None, positions: Tensor | None) -> Chunk:
        """Where the next ``n_tokens`` of every row stand. Left-out segments continue the row's last document."""
        same_length = len(set(self.lengths)) == 1
        if segments is None and positions is None and self.aligned and same_length:
            start = self.next_position[0]
            made = torch.arange(start, start + n_tokens, device=self.device)[None]
            return self._fits(Chunk(made, None, [n_tokens] * self.batch_size, n_tokens, True))
        last = torch.tensor(self.last_segment, device=self.device)
        if segments is None:
            segments = last.clamp(min=1)[:, None].expand(-1, n_tokens)
        coming = torch.tensor(self.next_position, device=self.device)
        if positions is None:
            positions = positions_from_segments(segments, last, coming)
        else:
            check_rising(positions, segments, last, coming)
        counts = (segments != 0).sum(1).tolist()
        uniform = same_length and set(counts) == {n_tokens}
        return self._fits(Chunk(positions, segments, counts, n_tokens, uniform))

    def _fits(self, chunk: Chunk) -> Chunk:
        longest = max(n + c for n, c in zip(self.lengths, chunk.counts, strict=True))
        if self.max_len is not None and longest > self.max_len:
            raise UserError(f"{longest} tokens exceed the state's max_len of {self.max_len}; make it with a larger one")
        return chunk

    def begin(self, chunk: Chunk) -> None:
        """Enter a chunk into the key indices."""
        self._memo = {}
        self.chunk_aligned = self.aligned and chunk.segments is None and chunk.uniform
        for index in self._indices.values():
            index.begin(chunk, self.lengths)

    def commit(self, chunk: Chunk, source: Records | None = None) -> None:
        """Make the chunk part of the state: once, after the whole forward pass. ``source``: records of the memory."""
        if source is not None:
            self.source = source
        for part in self.parts.values():
            part.commit(chunk, self)
        for index in self._indices.values():
            index.commit(chunk, self.lengths)
        self.aligned = self.chunk_aligned
        self.lengths = [n + c for n, c in zip(self.lengths, chunk.counts, strict=True)]
        if chunk.segments is None:
            self.last_segment = [1] * self.batch_size
            last = chunk.positions[:, -1].tolist()
            self.next_position = [p + 1 for p in (last * self.batch_size if len(last) == 1 else last)]
        else:
            self._commit_documents(chunk)
        self._memo = {}

    def _commit_documents(self, chunk: Chunk) -> None:
        assert chunk.segments is not None
        segments = chunk.segments.expand(self.batch_size, -1).tolist()
        positions = chunk.positions.expand(self.batch_size, -1).tolist()
        for row, (ids, places) in enumerate(zip(segments, positions, strict=True)):
            for segment, position in zip(reversed(ids), reversed(places), strict=True):
                if segment:
                    self.last_segment[row], self.next_position[row] = segment, position + 1
                    break

    def rollback(self) -> None:
        """Undo ``begin`` and what the parts appended: the forward pass failed."""
        for undone in (*self.parts.values(), *self._indices.values()):
            undone.rollback()
        self.chunk_aligned, self._memo = self.aligned, {}

    def rows(self, rows: Sequence[int] | Tensor) -> "State":
        """A new state of the given rows, in that order; a row may repeat."""
        index = torch.as_tensor(rows, device=self.device)
        chosen = index.tolist()
        new = State(len(chosen), self.max_len, self.device)
        new.lengths = [self.lengths[i] for i in chosen]
        new.last_segment = [self.last_segment[i] for i in chosen]
        new.next_position = [self.next_position[i] for i in chosen]
        new.aligned = self.aligned
        new.source = (
            None if self.source is None else Records(self.source.positions[index], _segments(self.source)[index])
        )
        new.parts = {path: part.select(index) for path, part in self.parts.items()}
        for window, key_index in self._indices.items():
            made = copy.copy(key_index)
            made.positions, made.segments = key_index.positions[index], key_index.segments[index]
            new._indices[window] = made
        return new

    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        """Replace the rows by the given ones (beam search)."""
        self.__dict__.update(self.rows(rows).__dict__)

    def fork(self, n: int) -> "State":
        """A new state with every row ``n`` times, copies next to each other."""
        return self.rows([row for row in range(self.batch_size) for _ in range(n)])

    def insert(self, rows: Sequence[int] | Tensor, other: "State") -> None:
        """Overwrite ``rows`` with the rows of ``other`` (serving: a new request takes a free row)."""
        index = torch.as_tensor(rows, device=self.device)
        if len(index) != other.batch_size:
            raise UserError(f"{len(index)} rows to overwrite, but the other state has {other.batch_size}")
        if self.parts.keys() != other.parts.keys() or self._indices.keys() != other._indices.keys():
            raise UserError("the two states keep different things; make both from one model with the same max_len")
        if (self.source is None) != (other.source is None):
            raise UserError("only one of the two states has read its source; run the first call on both")
        for path, part in self.parts.items():
            part.insert(index, other.parts[path])
        for window, mine in self._indices.items():
            theirs = other._indices[window]
            slots = max(mine.positions.shape[1], theirs.positions.shape[1])
            for name in ("positions", "segments"):
                buffer = grown(getattr(mine, name), slots)
                buffer[index] = grown(getattr(theirs, name), slots)
                setattr(mine, name, buffer)
            if isinstance(mine, FullIndex):
                mine.capacity = slots
        if self.source is not None and other.source is not None:
            self.source = _with_rows(self.source, index, other.source)
        for i, row in enumerate(index.tolist()):
            self.lengths[row] = other.lengths[i]
            self.last_segment[row], self.next_position[row] = other.last_segment[i], other.next_position[i]
        self.aligned = self.aligned and other.aligned and len(set(self.lengths)) == 1

    def crop(self, lengths: int | Sequence[int]) -> None:
        """Forget what came after the first ``lengths`` tokens; ``UserError`` with the reason where that cannot be."""
        wanted = [lengths] * self.batch_size if isinstance(lengths, int) else list(lengths)
        if len(wanted) != self.batch_size:
            raise UserError(f"{len(wanted)} lengths to crop to, but the state has {self.batch_size} rows")
        wanted = [min(n, m) for n, m in zip(wanted, self.lengths, strict=True)]
        if min(wanted, default=0) < 0:
            raise UserError(f"cannot crop a state to {min(wanted)} tokens")
        if wanted == self.lengths:
            return
        for path, part in self.parts.items():
            reason = part.can_crop(self)
            if reason:
                raise UserError(f"cannot crop the state of {path}: {reason}")
        for row, length in enumerate(wanted):
            if length == self.lengths[row]:
                continue
            some = next(iter(self._indices.values()), None)
            assert some is not None or length == 0, "a part without a key index must refuse in can_crop"
            self.last_segment[row] = int(some.segments[row, length - 1]) if some and length else 0
            self.next_position[row] = int(some.positions[row, length - 1]) + 1 if some and length else 0
        for index in self._indices.values():
            index.crop(wanted)
        self.lengths = wanted
        self.aligned = (self.aligned or not any(wanted)) and len(set(wanted)) == 1

    @property
    def n_bytes(self) -> int:
        """Bytes of keys, values and recurrent states."""
        return sum(part.n_bytes for part in self.parts.values())

    @property
    def index_bytes(self) -> int:
        """Bytes of the positions and segments, shared by all mixers of one geometry."""
        tensors = [t for index in self._indices.values() for t in (index.positions, index.segments)]
        return sum(t.numel() * t.element_size() for t in tensors)


def _segments(source: Records) -> Tensor:
    assert source.segments is not None, "a state keeps the segments of its source explicitly"
    return source.segments


def _with_rows(mine: Records, rows: Tensor, theirs: Records) -> Records:
    """The given rows replaced; the shorter side is filled up with padding."""
    slots = max(mine.positions.shape[1], theirs.positions.shape[1])
    fields = []
    for own, new in ((mine.positions, theirs.positions), (_segments(mine), _segments(theirs))):
        field = grown(own, slots).clone()
        field[rows] = grown(new, slots)
        fields.append(field)
    return Records(*fields)
