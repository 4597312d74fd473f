"""The reversible rules a checkpoint layout is written in; each is used both ways and is exact bit for bit.

A rule relates one foreign name (``theirs``) to one or several of Phylon's (``ours``). Names hold placeholders: ``{p}``
stands for ``weight`` or ``bias``, any other (``{i}``) for a number, the same in all names of a rule. How far they reach
is read off our names, so one rule serves every block of a stack, and an absent bias asks for nothing.

What a layout may do to a tensor: move it (`Rename`), turn it over (`Transpose`), join several of ours row by row
(`Fused`, usually through `Concat`, `PermuteRotary` or the rows that `interleaved` and `rotary_rows` give), keep a stack
apart (`Stack`), store it under several names (`Tied`), or whatever else a pair of pure functions can undo
(`Reshaped`). `Drop`, `Copied`, `Constant`, `Computed` and `Checked` say what only one side has.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from phylon.checkpoint.source import SERIAL, TensorSource

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rule:
    """The plain move, and what the other rules change of it. ``theirs`` is written and asked for exactly once."""

    theirs: str
    ours: str | tuple[str, ...]

    @property
    def our_names(self) -> tuple[str, ...]:
        return (self.ours,) if isinstance(self.ours, str) else self.ours

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other foreign names that may hold the same tensor."""
        return ()

    @property
    def their_names(self) -> tuple[str, ...]:
        """The foreign names it may ask for, with their placeholders."""
        return (self.theirs, *self.aliases)

    def foreign(self, theirs: str, shapes: Sequence[Shape]) -> list[tuple[str, Shape]]:
        """Names and shapes of the foreign tensors, for our ``shapes`` and a filled-in ``theirs``."""
        return [(theirs, self.their_shape(shapes))]

    def their_shape(self, shapes: Sequence[Shape]) -> Shape:
        return shapes[0]

    def take(self, source: TensorSource, names: Sequence[str], outs: Sequence[torch.Tensor]) -> None:
        """Foreign to ours: fill ``outs`` from the tensors ``names``."""
        source.read_into(names[0], outs[0])

    def give(self, tensors: Sequence[torch.Tensor], which: int) -> torch.Tensor:
        """Ours to foreign: foreign tensor number ``which``, a view of ours where that is possible."""
        return tensors[0]


@dataclass(frozen=True)
class Rename(Rule):
    """The same tensor under another name."""

    ours: str


@dataclass(frozen=True)
class Transpose(Rule):
    """A matrix stored ``(in, out)``, as GPT-2's Conv1D does: the last two dimensions are swapped. A bias just moves."""

    ours: str

    def their_shape(self, shapes: Sequence[Shape]) -> Shape:
        return _turned(shapes[0])

    def take(self, source: TensorSource, names: Sequence[str], outs: Sequence[torch.Tensor]) -> None:
        source.read_into(names[0], _turn(outs[0]))

    def give(self, tensors: Sequence[torch.Tensor], which: int) -> torch.Tensor:
        return _turn(tensors[0])


@dataclass(frozen=True)
class Tied(Rule):
    """One parameter stored as ``theirs`` or as one of ``others``, or as several of them if they are equal bit for bit.

    It is written as ``theirs`` alone.
    """

    ours: str
    others: str | tuple[str, ...]

    @property
    def aliases(self) -> tuple[str, ...]:
        return (self.others,) if isinstance(self.others, str) else self.others


@dataclass(frozen=True)
class Stack(Rule):
    """Ours ``(X, …)`` is stored as X tensors; ``theirs`` holds ``{e}``, which counts them from 0.

    ``transpose`` turns each of them over.
    """

    ours: str
    transpose: bool = False

    def foreign(self, theirs: str, shapes: Sequence[Shape]) -> list[tuple[str, Shape]]:
        count, *rest = shapes[0]
        shape = _turned(tuple(rest)) if self.transpose else tuple(rest)
        return [(theirs.replace("{e}", str(e)), shape) for e in range(count)]

    def take(self, source: TensorSource, names: Sequence[str], outs: Sequence[torch.Tensor]) -> None:
        for e, name in enumerate(names):
            source.read_into(name, self.give(outs, e))

    def give(self, tensors: Sequence[torch.Tensor], which: int) -> torch.Tensor:
        return _turn(tensors[0][which]) if self.transpose else tensors[0][which]


@dataclass(frozen=True, eq=False)
class Fused(Rule):
    """One foreign tensor whose rows (its slices along ``dim``) are those of several of ours, in any order.

    ``rows[k]``, int64: for each row of ``ours[k]``, which foreign row it is. Together they use every foreign row once.
    ``transpose``: the foreign matrix is stored ``(in, out)``; its rows are counted once it is turned over.
    """

    ours: tuple[str, ...]
    rows: tuple[torch.Tensor, ...]
    dim: int = 0
    transpose: bool = False

    def __post_init__(self) -> None:
        assert len(self.ours) == len(self.rows), self.theirs
        every = torch.cat(self.rows).sort().values
        assert torch.equal(every, torch.arange(len(every))), f"{self.theirs}: its rows are not used once each"

    def their_shape(self, shapes: Sequence[Shape]) -> Shape:
        whole = list(shapes[0])
        whole[self.dim] = 0
        for name, shape, rows in zip(self.ours, shapes, self.rows, strict=True):
            assert shape[self.dim] == len(rows), f"{name} is {shape}, {self.theirs} has {len(rows)} rows for it"
            rest = shape[: self.dim], shape[self.dim + 1 :]
            assert rest == (tuple(whole[: self.dim]), tuple(whole[self.dim + 1 :])), f"{name} is {shape}: no part"
            whole[self.dim] += len(rows)
        return _turned(tuple(whole)) if self.transpose else tuple(whole)

    def take(self, source: TensorSource, names: Sequence[str], outs: Sequence[torch.Tensor]) -> None:
        stored = source.read(names[0])
        stored = _turn(stored) if self.transpose else stored
        for rows, out in zip(self.rows, outs, strict=True):
            _copy_rows(out, stored, rows, self.dim)

    def give(self, tensors: Sequence[torch.Tensor], which: int) -> torch.Tensor:
        assert len({t.dtype for t in tensors}) == 1, f"the parts of {self.theirs} differ in dtype"
        shape = list(tensors[0].shape)
        shape[self.dim] = sum(len(rows) for rows in self.rows)
        whole = tensors[0].new_empty(shape)
        for rows, tensor in zip(self.rows, tensors, strict=True):
            whole.index_copy_(self.dim, rows.to(whole.device), tensor)
        return _turn(whole) if self.transpose else whole


@dataclass(frozen=True, eq=False)
class Reshaped(Rule):
    """Anything else: ``to`` makes ours (a tensor or a tuple) of the foreign tensor, ``back(*ours)`` undoes it exactly.

    Both are pure and work on any dtype and on the meta device, where the foreign shape comes from.
    """

    to: Callable[[torch.Tensor], torch.Tensor | tuple[torch.Tensor, ...]]
    back: Callable[..., torch.Tensor]

    def their_shape(self, shapes: Sequence[Shape]) -> Shape:
        return tuple(self.back(*(torch.empty(shape, device="meta") for shape in shapes)).shape)

    def take(self, source: TensorSource, names: Sequence[str], outs: Sequence[torch.Tensor]) -> None:
        made = self.to(source.read(names[0]))
        for out, tensor in zip(outs, (made,) if isinstance(made, torch.Tensor) else made, strict=True):
            assert out.shape == tensor.shape, f"{self.theirs}: {tuple(tensor.shape)} is not {tuple(out.shape)}"
            out.copy_(tensor)

    def give(self, tensors: Sequence[torch.Tensor], which: int) -> torch.Tensor:
        return self.back(*tensors)


@dataclass(frozen=True)
class Drop:
    """Foreign tensors that carry nothing of the model, and why. ``*`` stands for anything.

    Those that a file holds are given back to it (`Layout.unread`); none is made.
    """

    theirs: str
    reason: str


class Other(Drop):
    """Foreign tensors of another model that the file holds too: they may be large, and stay there alone."""


@dataclass(frozen=True)
class Copied:
    """A foreign tensor that its own code keeps and never reads: passed over, and written as a copy of ``ours``.

    Where a file holds something else there, that is given back (`Layout.unread`).
    """

    theirs: str
    ours: str


@dataclass(frozen=True)
class Constant:
    """A tensor of ours that the format does not store, because it always holds ``value`` there."""

    ours: str
    value: float


@dataclass(frozen=True)
class Computed:
    """A foreign tensor that follows from the configuration: checked when read, made anew when written.

    Where a file's differs by rounding or dtype, that is given back (`Layout.unread`).
    """

    theirs: str
    make: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Checked(Computed):
    """A computed tensor that files may leave out: a file's own is given back, and none is made."""


def Concat(theirs: str, ours: tuple[str, ...], sizes: Sequence[int], dim: int = 0, transpose: bool = False) -> Fused:
    """Ours one after the other along ``dim``, of ``sizes`` rows each (not necessarily equal)."""
    return Fused(theirs, ours, interleaved(1, sizes), dim, transpose)


def PermuteRotary(theirs: str, ours: str, n_heads: int, head_dim: int, rotary_dim: int | None = None) -> Fused:
    """A q or k projection (weight or bias) stored for interleaved rotary pairs; ours are half-split."""
    return Fused(theirs, (ours,), (rotary_rows(n_heads, head_dim, rotary_dim),))


def interleaved(groups: int, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Rows for parts that alternate: ``groups`` times ``sizes[0]`` rows of part 0, ``sizes[1]`` of part 1, ….

    NeoX and Bloom: ``(n_heads, (E, E, E))``; Falcon: ``(n_kv_heads, (n_heads // n_kv_heads * E, E, E))``; gate and up
    in turn: ``(d_ff, (1, 1))``; one after the other: ``(1, sizes)``.
    """
    table = torch.arange(groups * sum(sizes)).view(groups, sum(sizes))
    return tuple(part.reshape(-1) for part in table.split(list(sizes), dim=1))


def rotary_rows(n_heads: int, head_dim: int, rotary_dim: int | None = None, start: int = 0) -> torch.Tensor:
    """For each half-split row, where it is in the layout of neighbouring pairs; int64 ``(n_heads * head_dim,)``.

    Rotated are the ``rotary_dim`` (R, default all) rows from ``start`` on in each head: ours ``(2, R/2)``, theirs
    ``(R/2, 2)``. The others stay. Index other rows with it (``rows[rotary_rows(…)]``) where the tensor is fused too.
    """
    rotary_dim = head_dim - start if rotary_dim is None else rotary_dim
    assert rotary_dim % 2 == 0, f"rotary_dim {rotary_dim} is odd"
    assert 0 <= start <= head_dim - rotary_dim, (head_dim, rotary_dim, start)
    rows = torch.arange(n_heads * head_dim).view(n_heads, head_dim)
    turned = rows[:, start : start + rotary_dim].view(n_heads, rotary_dim // 2, 2).transpose(1, 2).reshape(n_heads, -1)
    return torch.cat((rows[:, :start], turned, rows[:, start + rotary_dim :]), dim=1).view(-1)


def _turned(shape: Shape) -> Shape:
    return (*shape[:-2], shape[-1], shape[-2]) if len(shape) > 1 else shape


def _turn(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(-2, -1) if tensor.dim() > 1 else tensor


def _copy_rows(out: torch.Tensor, stored: torch.Tensor, rows: torch.Tensor, dim: int) -> None:
    """``out = stored[rows]`` along ``dim``, with at most a chunk of the rows gathered between."""
    first, count = int(rows[0]) if len(rows) else 0, len(rows)
    if torch.equal(rows, torch.arange(first, first + count)):
        out.copy_(stored.narrow(dim, first, count))
        return
    step = max(1, SERIAL * count // max(1, out.numel()))
    size = list(out.shape)
    size[dim] = min(step, count)
    buffer = stored.new_empty(size)  # one, not one a turn: freed blocks of this size linger in the allocator
    for k in range(0, count, step):
        part = buffer.narrow(dim, 0, min(step, count - k))
        torch.index_select(stored, dim, rows[k : k + step], out=part)
        out.narrow(dim, k, part.shape[dim]).copy_(part)
