"""The law (design, section 3) checked on a model as it is: its own weights, vocabulary, dtype and device.

Each cell runs a few random documents another way and compares with every document alone in one plain call. A cell that
does not apply says why; positive controls show that the comparison could fail.
"""

import copy
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from phylon.model import Model, record
from phylon.ops import attention, scan
from phylon.ops.dispatch import Dispatch
from phylon.spec.base import Mechanism, Mixer, Spec
from phylon.spec.errors import UserError
from phylon.spec.registry import entry_of

DISPATCHES: tuple[Dispatch[Any], ...] = (attention.dispatch, scan.dispatch, scan.ssd_dispatch, scan.conv_dispatch)
TIGHT = {torch.float32: 1e-5, torch.float64: 1e-10}
"""Part of the largest value by which two ways may differ, where rounding of a few blocks is all there is."""

Reference = Callable[[Tensor], Mapping[str, Tensor]]
"""Another implementation of the same weights: tokens (B, T) to values by the names of ``phylon.record`` (any of them,
``heads.lm.logits`` at least), so that the first one that diverges can be named."""

Got = list[tuple[int, slice, Tensor]]
"""Values (n, W) that a way gave for a span of document number i."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One line of the table. ``passed`` is ``None`` where the cell does not apply, and ``reason`` says why."""

    name: str
    passed: bool | None
    error: float | None = None
    bound: float | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """All cells. ``passed``: no cell failed and at least one applied."""

    dtype: str
    lengths: list[int]
    cells: list[Cell] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(cell.passed is not False for cell in self.cells) and any(cell.passed for cell in self.cells)

    @property
    def failed(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.passed is False]

    def to_data(self) -> dict[str, Any]:
        """Plain values, ready for JSON: an error that is not finite becomes ``None`` and a reason."""
        cells: list[dict[str, Any]] = [asdict(cell) for cell in self.cells]
        for cell in cells:
            for key in ("error", "bound"):
                if isinstance(cell[key], float) and not math.isfinite(cell[key]):
                    cell |= {key: None, "reason": "the values are not finite"}
        return {"passed": self.passed, "dtype": self.dtype, "lengths": self.lengths, "cells": cells}


class _NotApplicable(Exception):
    """Why a cell says nothing of this model."""


def verify(model: Model, *, reference: Reference | None = None, length: int | None = None, seed: int = 0) -> Report:
    """Run the law's table on ``model``, with random documents of at most ``length`` tokens of its own vocabulary.

    Two ways agree if they differ by at most 1e-5 of the largest value (fp32), or if the other way is at most twice as
    far from a run in higher precision as the plain pass is (deep models; the only rule in low precision). ``length``
    defaults to 24, or to eight more than a window that is no longer than 128.

    Raises:
        UserError: the model is not one that reads tokens.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return _run(_Subject(model, length, seed), reference)
    finally:
        model.train(was_training)


def _run(subject: "_Subject", reference: Reference | None) -> Report:
    ways: list[tuple[str, str, Callable[[_Subject], Got]]] = [
        ("chunks", "chunks", _chunks),
        ("steps", "chunks", _steps),
        ("left_padding", "padding", lambda s: _padded(s, left=True)),
        ("right_padding", "padding", lambda s: _padded(s, left=False)),
        ("padded_chunks", "padding", _padded_chunks),
        ("packing", "packing", _packed),
        ("batching", "batch", _batched),
        ("after_another_call", "history", _after_another),
    ]
    for dispatch in DISPATCHES:
        for name in dispatch.backends:
            ways.append((f"backend_{dispatch.op}_{name}", "backends", _on_backend(dispatch, name)))
    cells = [subject.cell(name, law, way) for name, law, way in ways]
    cells += [_window(subject), *_controls(subject)]
    if reference is not None:
        cells += compare(subject, reference)
    return Report(dtype=str(subject.model.dtype).removeprefix("torch."), lengths=subject.lengths, cells=cells)


class _Subject:
    """The model, its documents and what they give alone."""

    def __init__(self, model: Model, length: int | None, seed: int) -> None:
        self.model = model
        embed = model.spec.last_stack.embed
        self.vocab: int = getattr(embed, "vocab_size", 0)
        if not self.vocab:
            raise UserError(f"verify reads tokens, and this model's input is {type(embed).__name__}")
        self.mechanisms = [node for node in _nodes(model.spec) if isinstance(node, Mechanism)]
        patterns = [node.pattern for node in self.mechanisms if hasattr(node, "pattern")]  # type: ignore[attr-defined]
        self.reach: int | None = min((p.reach for p in patterns if p.reach is not None), default=None)
        self.mixes = any(isinstance(node, Mixer) for node in self.mechanisms)
        if length is not None and length < 6:
            raise UserError(f"verify needs texts of 6 tokens at least, got a length of {length}")
        wanted = length or (self.reach + 8 if self.reach is not None and 16 < self.reach <= 128 else 24)
        limits = [getattr(node, "max_seq_len", None) for node in self.mechanisms]
        longest = min([wanted, *(n for n in limits if n is not None)])
        if longest < 6:
            raise UserError(f"verify needs texts of 6 tokens at least, the model or the length given allows {longest}")
        self.lengths = [longest, max(3, longest // 3), max(4, 2 * longest // 3)]
        self.generator = torch.Generator().manual_seed(seed)
        self.rows = [self.random(n) for n in self.lengths]
        self.sources = [self.random(n) for n in (5, 5, 5)] if model.encoder and model.decoder else None
        self.alone = [self.run(row[None], [i])[0] for i, row in enumerate(self.rows)]
        self.scale = max(float(values.abs().max()) for values in self.alone)
        self._truth: list[Tensor] | None = None

    def random(self, n: int) -> Tensor:
        return torch.randint(self.vocab, (n,), generator=self.generator).to(self.model.device)

    def run(self, tokens: Tensor, documents: list[int], model: Model | None = None, **given: Any) -> Tensor:
        """(B, T, W): what the model gives at every token; ``documents`` says which source each row goes with."""
        state = given.get("state")
        if self.sources is not None and (state is None or not any(state.lengths)):
            given["source"] = torch.stack([self.sources[i] for i in documents])
        out = (model or self.model)(tokens, **given)
        scored = out.logits is not None and out.logits.shape[:2] == tokens.shape
        return (out.logits if scored else out.hidden).to(torch.promote_types(out.hidden.dtype, torch.float32))

    def state(self, batch: int) -> Any:
        try:
            return self.model.new_state(batch)
        except UserError as error:
            raise _NotApplicable(str(error)) from None

    def cell(self, name: str, law: str, way: Callable[["_Subject"], Got]) -> Cell:
        """Run a way and compare it with the documents alone."""
        for node in self.mechanisms:
            reason = entry_of(node).exceptions.get(law)
            if reason:
                return Cell(name=name, passed=None, reason=f"{entry_of(node).kind} cannot obey: {reason}")
        try:
            return self.judge(name, way(self))
        except _NotApplicable as error:
            return Cell(name=name, passed=None, reason=str(error))
        except UserError as error:
            return Cell(name=name, passed=False, reason=f"refused: {error}")

    def judge(self, name: str, got: Got) -> Cell:
        """Tight agreement, or as near to a run in higher precision as the plain pass is, within a factor of two."""
        error = max(_distance(values, self.alone[i][span]) for i, span, values in got)
        tight = TIGHT.get(self.model.dtype)
        if tight is not None and error <= tight * self.scale < math.inf:
            return Cell(name=name, passed=True, error=error, bound=tight * self.scale)
        truth = self.truth()
        error = _mean_error([(values, truth[i][span]) for i, span, values in got])
        bound = 2 * _mean_error([(self.alone[i][span], truth[i][span]) for i, span, _ in got])
        how = "root mean square against a run in higher precision; the bound is twice that of the plain pass"
        return Cell(name=name, passed=error <= bound < math.inf, error=error, bound=bound, reason=how)

    def truth(self) -> list[Tensor]:
        """The documents alone in higher precision (fp64, fp32 for low precision): a second copy of the model."""
        if self._truth is None:
            low = self.model.dtype not in TIGHT
            precise = copy.deepcopy(self.model).to(torch.float32 if low else torch.float64)
            self._truth = [self.run(row[None], [i], precise)[0] for i, row in enumerate(self.rows)]
        return self._truth


def _distance(a: Tensor, b: Tensor) -> float:
    """Largest difference; infinite where either holds a NaN or an infinity."""
    assert a.shape == b.shape, (a.shape, b.shape)
    difference = float((a.double() - b.double()).abs().max())
    return math.inf if math.isnan(difference) else difference


def _mean_error(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Root mean square of all differences; infinite where a value is not finite."""
    squares = torch.cat([(a.double() - b.double()).square().flatten() for a, b in pairs])
    error = float(squares.mean().sqrt())
    return math.inf if math.isnan(error) else error


def _nodes(value: Any) -> Iterator[Spec]:
    if isinstance(value, Spec):
        yield value
        for name in value.__struct_fields__:
            if name not in value.training_only:
                yield from _nodes(getattr(value, name))
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _nodes(inner)
    elif isinstance(value, tuple):
        for inner in value:
            yield from _nodes(inner)


def _chunks(s: _Subject) -> Got:
    state, parts = s.state(1), []
    sizes = [3, 1, s.lengths[0] // 2 - 2]
    for part in s.rows[0][None].split([*sizes, s.lengths[0] - sum(sizes)], dim=1):
        parts.append(s.run(part, [0], state=state))
    return [(0, slice(None), torch.cat(parts, dim=1)[0])]


def _steps(s: _Subject) -> Got:
    state = s.state(1)
    parts = [s.run(token, [0], state=state) for token in s.rows[0][None].split(1, dim=1)]
    return [(0, slice(None), torch.cat(parts, dim=1)[0])]


def _rows(s: _Subject, left: bool) -> tuple[Tensor, Tensor]:
    """All documents, one a row; what stands at padding is a token like any other."""
    width = max(s.lengths) + 2
    tokens = s.random(width * len(s.rows)).view(len(s.rows), width)
    segments = torch.zeros_like(tokens)
    for i, row in enumerate(s.rows):
        where = slice(width - len(row), width) if left else slice(0, len(row))
        tokens[i, where], segments[i, where] = row, 1
    return tokens, segments


def _real(values: Tensor, segments: Tensor) -> Got:
    return [(i, slice(None), row[real != 0]) for i, (row, real) in enumerate(zip(values, segments, strict=True))]


def _padded(s: _Subject, left: bool) -> Got:
    tokens, segments = _rows(s, left)
    return _real(s.run(tokens, [0, 1, 2], segments=segments), segments)


def _padded_chunks(s: _Subject) -> Got:
    state = s.state(len(s.rows))
    tokens, segments = _rows(s, left=True)
    parts = [
        s.run(t, [0, 1, 2], segments=ids, state=state)
        for t, ids in zip(tokens.split(5, dim=1), segments.split(5, dim=1), strict=True)
    ]
    return _real(torch.cat(parts, dim=1), segments)


def _packed(s: _Subject) -> Got:
    if s.sources is not None:
        raise _NotApplicable("an encoder-decoder packs sources and targets together; verify gives one source a row")
    short = s.rows[1:]
    tokens = torch.cat(short)
    segments = torch.cat([torch.full_like(row, i + 1) for i, row in enumerate(short)])
    values = s.run(tokens[None], [0], segments=segments[None])[0]
    return [(i + 1, slice(None), values[segments == i + 1]) for i in range(len(short))]


def _batched(s: _Subject) -> Got:
    others = [s.random(s.lengths[0]) for _ in range(2)]
    values = s.run(torch.stack([others[0], s.rows[0], others[1]]), [1, 0, 2])
    return [(0, slice(None), values[1])]


def _after_another(s: _Subject) -> Got:
    s.run(torch.stack([s.random(s.lengths[0]), s.random(s.lengths[0])]), [0, 1])
    s.run(s.random(2)[None], [0])
    return [(i, slice(None), s.run(row[None], [i])[0]) for i, row in enumerate(s.rows)]


def _on_backend(dispatch: Dispatch[Any], name: str) -> Callable[[_Subject], Got]:
    def way(s: _Subject) -> Got:
        reason = dispatch.backends[name].available()
        if reason:
            raise _NotApplicable(reason)
        try:
            with dispatch.force(name), _calls(dispatch) as calls:
                got = [(i, slice(None), s.run(row[None], [i])[0]) for i, row in enumerate(s.rows)]
                got += _padded(s, left=True)
        except UserError as error:
            raise _NotApplicable(str(error)) from None
        if not calls:
            raise _NotApplicable(f"the model never calls the op {dispatch.op}")
        return got

    return way


@contextmanager
def _calls(dispatch: Dispatch[Any]) -> Generator[list[str]]:
    """The backend of every call of an op inside the block."""
    plain, seen = dispatch.pick, []

    def counted(call: Any, name: str | None = None) -> Any:
        backend = plain(call, name)
        seen.append(backend.name)
        return backend

    dispatch.pick = counted  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del dispatch.pick


def _window(s: _Subject) -> Cell:
    """Whether the texts were long enough for a window to matter: said, never assumed."""
    if s.reach is None:
        return Cell(name="window", passed=None, reason="no pattern bounds how far a token looks back")
    if s.reach >= s.lengths[0]:
        reason = f"the window of {s.reach} is not shorter than the {s.lengths[0]} tokens read; give a greater length"
        return Cell(name="window", passed=None, reason=reason)
    return Cell(name="window", passed=True, error=0.0, bound=0.0, reason=f"texts are longer than the window {s.reach}")


def _controls(s: _Subject) -> Iterator[Cell]:
    """What must make a difference: without these, a model that ignores its history would pass everything."""
    row = s.rows[0].clone()
    row[1] = (row[1] + 1) % s.vocab
    blind = "no mixer looks at other tokens" if s.reach == 1 or not s.mixes else None
    if blind:
        yield Cell(name="control_history", passed=None, reason=blind)
        yield Cell(name="control_state", passed=None, reason=blind)
        return
    yield _must_differ(s, "control_history", s.run(row[None], [0])[0, 2:4], s.alone[0][2:4])
    try:
        s.state(1)
    except _NotApplicable as error:
        yield Cell(name="causality", passed=None, reason=str(error))
        yield Cell(name="control_state", passed=None, reason=str(error))
        return
    last = s.rows[0].clone()
    last[-1] = (last[-1] + 1) % s.vocab
    yield s.judge("causality", [(0, slice(0, -1), s.run(last[None], [0])[0, :-1])])
    after = []
    for start in (row[None, :2], s.rows[0][None, :2]):
        state = s.state(1)
        s.run(start, [0], state=state)
        after.append(s.run(s.rows[0][None, 2:4], [0], state=state)[0])
    yield _must_differ(s, "control_state", *after)


def _must_differ(s: _Subject, name: str, changed: Tensor, before: Tensor) -> Cell:
    """Well above rounding: a hundred times the tight bound, or what low precision rounds to."""
    difference = _distance(changed, before)
    bound = s.scale * (100 * TIGHT[s.model.dtype] if s.model.dtype in TIGHT else torch.finfo(s.model.dtype).eps)
    reason = "a changed token must show in the next ones: the error is to exceed the bound"
    return Cell(name=name, passed=bound < difference < math.inf, error=difference, bound=bound, reason=reason)


def compare(subject: "_Subject | Model", reference: Reference) -> list[Cell]:
    """One cell a value that ``reference`` gives, in the order of the forward pass; the first that diverges leads.

    The bound, as a part of the largest value: 1e-5 a block in fp32, 16 roundings of the dtype in low precision.
    """
    with torch.no_grad():
        s = subject if isinstance(subject, _Subject) else _Subject(subject, None, 0)
    tokens = s.rows[0][None]
    theirs = dict(reference(tokens))
    with record(s.model, *theirs) as ours, torch.no_grad():
        s.model(tokens)
    unknown = [name for name in theirs if name not in ours]
    cells = [Cell(name=f"reference:{name}", passed=None, reason="this model records no such value") for name in unknown]
    tight = TIGHT.get(s.model.dtype)
    share = (
        16 * torch.finfo(s.model.dtype).eps if tight is None else tight * max(1, len(s.model.spec.last_stack.blocks))
    )
    for name, value in ours.items():
        other = theirs[name].to(value.device)
        if other.shape != value.shape:
            reason = f"ours is {tuple(value.shape)}, the reference's {tuple(other.shape)}"
            cells.append(Cell(name=f"reference:{name}", passed=False, reason=reason))
            continue
        error, bound = _distance(value, other), share * float(other.abs().max())
        cells.append(Cell(name=f"reference:{name}", passed=error <= bound < math.inf, error=error, bound=bound))
    first = next((cell for cell in cells if cell.passed is False), None)
    if first is not None:
        name = first.name.removeprefix("reference:")
        cells.insert(0, Cell(name="reference", passed=False, reason=f"the first component that diverges is {name}"))
    return cells
