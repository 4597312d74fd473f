"""What a way of running a model is judged by (design, section 3): cells, their bounds, and the report."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from phylon.model import Model
from phylon.ops import attention, experts, feedforward, linear, native, norm, rotary, scan, scores
from phylon.ops.dispatch import Dispatch
from phylon.spec.base import Mechanism, Spec
from phylon.spec.errors import UserError
from phylon.spec.registry import entry_of

DISPATCHES: tuple[Dispatch[Any], ...] = (attention.dispatch, scan.dispatch, scan.ssd_dispatch, scan.conv_dispatch)
_OTHERS: tuple[Dispatch[Any], ...] = tuple(op.dispatch for op in (experts, feedforward, linear, norm, rotary, scores))
TIGHT = {torch.float32: 1e-5, torch.float64: 1e-10}
"""Part of the largest value by which two ways may differ, where rounding of a few blocks is all there is."""

NEIGHBOURS = 3
"""Inputs a rounding away that the plain pass is tried on as well: one rounding alone may happen to be small."""

ENOUGH = 8192
"""Numbers that the narrowest map of a model must give for every kernel to serve it: below, plain operations do."""

Values = dict[str, Tensor]
"""All that a model gives for one document, by name: a row a token (n, W), or one row for the whole (1, W)."""

Got = list[tuple[int, slice, Values]]
"""What a way gave for a span of document number i; it need not give every value."""

TOKEN = "a changed token must show in the next ones"


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
    """All cells. ``passed``: no cell failed and at least one applied. ``lengths``: tokens of each document or image."""

    dtype: str
    lengths: list[int]
    cells: list[Cell] = field(default_factory=list)
    inputs: str = "documents"

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
        given = {"dtype": self.dtype, "inputs": self.inputs, "lengths": self.lengths}
        return {"passed": self.passed} | given | {"cells": cells}


class NotApplicable(Exception):
    """Why a cell says nothing of this model."""


class Subject(ABC):
    """The model, its inputs and what they give alone."""

    lengths: list[int]

    def __init__(self, model: Model, seed: int) -> None:
        self.model = model
        self.mechanisms = [node for node in nodes(model.spec) if isinstance(node, Mechanism)]
        self.generator = torch.Generator().manual_seed(seed)
        self._neighbours: list[tuple[list[Values], list[Values]]] = []

    def run_alone(self) -> None:
        """What every other way is compared with; the inputs are made by now."""
        with self.baseline():
            self.alone = self.each(self.model)
        self.scales = {name: max(_largest(values[name]) for values in self.alone) for name in self.alone[0]}

    def baseline(self) -> AbstractContextManager[None]:
        """How ``alone`` is computed."""
        return nullcontext()

    def exactly(self) -> AbstractContextManager[None]:
        """How the run in higher precision is computed: no kernel that is compiled here has a part in it."""
        return native.without()

    @abstractmethod
    def each(self, model: Model) -> list[Values]:
        """What every input gives alone in one plain call."""

    @abstractmethod
    def shared_inputs(self) -> dict[str, Tensor]:
        """What the model and a reference are both called with."""

    def cell(self, name: str, law: str, way: Callable[[Any], Got]) -> Cell:
        """Run a way and compare it with the documents alone."""
        for node in self.mechanisms:
            reason = entry_of(node).exceptions.get(law)
            if reason:
                return Cell(name=name, passed=None, reason=f"{entry_of(node).kind} cannot obey: {reason}")
        try:
            return self.judge(name, way(self))
        except NotApplicable as error:
            return Cell(name=name, passed=None, reason=str(error))
        except UserError as error:
            return Cell(name=name, passed=False, reason=f"refused: {error}")

    def judge(self, name: str, got: Got) -> Cell:
        """The value that fares worst, of all that the model gives: each has a scale of its own."""
        cells = [
            self._judge(name, part, [(i, span, values[part]) for i, span, values in got if part in values])
            for part in self.scales
            if any(part in values for _, _, values in got)
        ]
        failed = next((cell for cell in cells if cell.passed is False), None)
        return failed or max(cells, key=lambda cell: (cell.error or 0.0) / (cell.bound or 1.0))

    def _judge(self, name: str, part: str, got: list[tuple[int, slice, Tensor]]) -> Cell:
        """Tight agreement, or as near to a run in higher precision as the plain pass is, within a factor of two.

        What the plain pass is off by is one draw of a rounding. Where it does not cover the error, the worst draw of
        the same documents a rounding away decides: they are of the same size in a model of any depth, and a fault is
        in none of them.
        """
        shapes = [(tuple(values.shape), tuple(self.alone[i][part][span].shape)) for i, span, values in got]
        odd = next((both for both in shapes if both[0] != both[1]), None)
        if odd is not None:
            return Cell(name=name, passed=False, reason=f"{part} is {odd[0]}, and {odd[1]} alone")
        error = max(distance(values, self.alone[i][part][span]) for i, span, values in got)
        tight, scale = TIGHT.get(self.model.dtype), self.scales[part]
        if tight is not None and error <= tight * scale < math.inf:
            return Cell(name=name, passed=True, error=error, bound=tight * scale)
        error = mean_error([(values, self.truth[i][part][span]) for i, span, values in got])
        bound = 0.0
        for plain, exact in self.roundings():
            bound = max(bound, 2 * mean_error([(plain[i][part][span], exact[i][part][span]) for i, span, _ in got]))
            if error <= bound:
                break
        how = "root mean square against a run in higher precision; the bound is twice that of the plain pass"
        passed = error <= bound < math.inf
        return Cell(name=name, passed=passed, error=error, bound=bound, reason=how if passed else f"{part}: {how}")

    @cached_property
    def wide(self) -> Model:
        """A second copy of the model in higher precision, kept from then on: fp64, fp32 for low precision."""
        low = self.model.dtype not in TIGHT
        return copy.deepcopy(self.model).to(torch.float32 if low else torch.float64)

    @cached_property
    def truth(self) -> list[Values]:
        """All alone in higher precision."""
        with self.exactly():
            return self.each(self.wide)

    @cached_property
    def called(self) -> set[str]:
        """The ops that the plain pass calls."""
        with ExitStack() as stack:
            calls = {dispatch.op: stack.enter_context(_calls(dispatch)) for dispatch in DISPATCHES}
            self.each(self.model)
        return {op for op, seen in calls.items() if seen}

    @cached_property
    def steady(self) -> bool:
        """Whether the plain pass gives the same again, but for rounding: what it gives later says nothing otherwise."""
        with self.baseline():
            again = self.each(self.model)
        return all(
            mean_error([(a[part], b[part]) for a, b in zip(again, self.alone, strict=True)])
            <= 2 * mean_error([(a[part], b[part]) for a, b in zip(self.alone, self.truth, strict=True)])
            for part in self.scales
        )

    def roundings(self) -> Iterator[tuple[list[Values], list[Values]]]:
        """Pairs of the plain pass and the same in higher precision: as it is, then of neighbours of the inputs."""
        yield self.alone, self.truth
        for k in range(NEIGHBOURS if self.steady else 0):
            if k == len(self._neighbours):
                with self.baseline():
                    plain = self._moved(self.model, k)
                with self.exactly():
                    self._neighbours.append((plain, self._moved(self.wide, k)))
            yield self._neighbours[k]

    def _moved(self, model: Model, seed: int) -> list[Values]:
        with moved(model, seed, self.model.dtype):
            return self.each(model)


class Readable:
    """Mixed into a subject ``of`` another: what it gives alone comes from the readable backends.

    A plain pass is judged by that. Its inputs are those of the other, and a call large enough for every kernel to act.
    """

    of: Any

    def baseline(self) -> AbstractContextManager[None]:
        return readable()

    def exactly(self) -> AbstractContextManager[None]:
        return readable()

    @property
    def wide(self) -> Model:
        """The copy that the subject has."""
        wide: Model = self.of.wide
        return wide


def kernels(s: Subject) -> Iterator[Cell]:
    """The plain pass of a ``Readable`` subject on the backends that are chosen by themselves, twice: some kernels serve
    passes with gradients alone."""
    yield s.cell("kernels", "backends", _plain_pass)
    yield s.cell("kernels_with_gradients", "backends", _with_gradients)


def _plain_pass(s: Subject) -> Got:
    return [(i, slice(None), values) for i, values in enumerate(s.each(s.model))]


def _with_gradients(s: Subject) -> Got:
    if not any(parameter.requires_grad for parameter in s.model.parameters()):
        raise NotApplicable("no parameter learns")
    with torch.enable_grad():
        got = _plain_pass(s)
    return [(i, span, {name: value.detach() for name, value in values.items()}) for i, span, values in got]


def enough_rows(model: Model, length: int) -> int:
    """Rows of ``length`` tokens for which the narrowest map of the blocks gives ``ENOUGH`` numbers."""
    widths = [
        p.shape[0] for stack in model.spec.stacks for p in getattr(model, stack).blocks.parameters() if p.ndim == 2
    ]
    return -(-ENOUGH // (length * max(8, min(widths, default=8))))


@contextmanager
def readable() -> Generator[None]:
    """Inside, every op runs its reference, and nothing that is compiled here."""
    with ExitStack() as stack:
        stack.enter_context(native.without())
        for dispatch in (*DISPATCHES, *_OTHERS):
            stack.enter_context(dispatch.force("reference"))
        yield


S = TypeVar("S", bound=Subject)


@contextmanager
def moved(model: Model, seed: int, dtype: torch.dtype) -> Generator[None]:
    """Inside, what every stack embeds is off by about a rounding of ``dtype``, by the same factors for one seed.

    The roundings behind it are then other ones, and the results of a model in two precisions are still comparable.
    """
    generator, eps = torch.Generator().manual_seed(seed), torch.finfo(dtype).eps

    def move(module: nn.Module, given: Any, out: Tensor) -> Tensor:
        noise = torch.rand(out.shape, generator=generator, dtype=torch.float64).to(out.device)
        # What both store is a number of the narrower dtype: rounding it in one of them only would be another error.
        return (out * (1 + eps * (2 * noise - 1))).to(dtype).to(out.dtype)

    stacks = [getattr(model, name) for name in model.spec.stacks]
    handles = [stack.embed.register_forward_hook(move) for stack in stacks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def distance(a: Tensor, b: Tensor) -> float:
    """Largest difference; infinite where either holds a NaN or an infinity."""
    assert a.shape == b.shape, (a.shape, b.shape)
    difference = float((a.double() - b.double()).abs().max())
    return math.inf if math.isnan(difference) else difference


def _largest(values: Tensor) -> float:
    return float(values.abs().max())


def mean_error(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Root mean square of all differences; infinite where a value is not finite."""
    squares = torch.cat([(a.double() - b.double()).square().flatten() for a, b in pairs])
    error = float(squares.mean().sqrt())
    return math.inf if math.isnan(error) else error


def nodes(value: Any) -> Iterator[Spec]:
    if isinstance(value, Spec):
        yield value
        for name in value.__struct_fields__:
            if name not in value.training_only:
                yield from nodes(getattr(value, name))
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from nodes(inner)
    elif isinstance(value, tuple):
        for inner in value:
            yield from nodes(inner)


def on_backend(dispatch: Dispatch[Any], name: str, tried: Callable[[S], Got]) -> Callable[[S], Got]:
    """``tried`` with every call of an op on one backend."""

    def way(s: S) -> Got:
        reason = dispatch.backends[name].available()
        if reason:
            raise NotApplicable(reason)
        if dispatch.op not in s.called:
            raise NotApplicable(f"the model never calls the op {dispatch.op}")
        try:
            with dispatch.force(name):
                return tried(s)
        except UserError as error:
            raise NotApplicable(str(error)) from None

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


def must_differ(s: Subject, name: str, part: str, changed: Tensor, before: Tensor, what: str = TOKEN) -> Cell:
    """Well above rounding: a hundred times the tight bound, or what low precision rounds to.

    In a model whose parts say little beside its residual stream, as before any training, ten times its own rounding is
    enough: what a run in higher precision differs by.
    """
    difference, scale = distance(changed, before), s.scales[part]
    bound = scale * (100 * TIGHT[s.model.dtype] if s.model.dtype in TIGHT else torch.finfo(s.model.dtype).eps)
    if s.model.dtype in TIGHT and difference <= bound:
        rounding = max(distance(a[part], b[part]) for a, b in zip(s.alone, s.truth, strict=True))
        bound = min(bound, 10 * max(rounding, torch.finfo(s.model.dtype).eps * scale))
    reason = f"{what}: the error is to exceed the bound"
    return Cell(name=name, passed=bound < difference < math.inf, error=difference, bound=bound, reason=reason)
