"""A model beside another implementation of the same weights: the first component that diverges is named."""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from phylon.checkpoint.law import NEIGHBOURS, TIGHT, Cell, Subject, distance, mean_error, moved
from phylon.model import Model, record
from phylon.ops import native
from phylon.spec.errors import UserError

Reference = Callable[..., Mapping[str, Tensor]]
"""Another implementation of the same weights. It is called with what the model is called with (``tokens`` (B, T) and
``source`` (B, S), or ``images`` (B, C, H, W), by keyword; images of another size too, which it may refuse with a
``UserError``) and gives values by the names of ``phylon.record``, any of them, so that the first one that diverges can
be named."""


def compare(s: Subject, reference: Reference, title: str = "reference") -> list[Cell]:
    """One cell a value that ``reference`` gives, in the order of the forward pass; the first that diverges leads.

    ``title`` is what the names of the cells begin with. A reference that refuses (``UserError``) is one cell that does
    not apply. The bound, as a part of the largest value: 1e-5 a block in fp32, 16 roundings of the dtype in low
    precision. A value beyond it passes if it is as near to ours in higher precision as our own plain pass is, within a
    factor of two: in a model that magnifies rounding, no two programs agree better than that.
    """
    inputs = s.shared_inputs()
    try:
        theirs = dict(reference(**inputs))
    except UserError as error:
        return [Cell(name=title, passed=None, reason=str(error))]
    except (Exception, SystemExit) as error:
        return [Cell(name=title, passed=False, reason=f"it fails: {type(error).__name__}: {error}")]
    odd = [name for name, value in theirs.items() if not isinstance(value, Tensor)]
    if odd or not theirs:
        reason = f"its '{odd[0]}' is no tensor but {type(theirs[odd[0]]).__name__}" if odd else "it gives no value"
        return [Cell(name=title, passed=False, reason=reason)]
    # With PyTorch's own operations, as the reference computes: other kernels round otherwise, and are other cells.
    with native.without(), torch.no_grad(), record(s.model) as points:
        s.model(**inputs)
    cells = [
        Cell(name=f"{title}:{name}", passed=None, reason="this model records no such value")
        for name in theirs
        if name not in points
    ]
    # What is recorded as scores or weights runs another kernel; what is compared comes from the plain pass.
    with native.without(), torch.no_grad(), record(s.model, *(name for name in theirs if name in points)) as ours:
        s.model(**inputs)
    tight, n_blocks = TIGHT.get(s.model.dtype), sum(len(stack.blocks) for stack in s.model.spec.stacks.values())
    share = 16 * torch.finfo(s.model.dtype).eps if tight is None else tight * max(1, n_blocks)
    judged = {name: _cell(value, theirs[name], share) for name, value in ours.items() if name in theirs}
    far = [name for name, cell in judged.items() if cell.passed is False and cell.bound is not None]
    rounded = _by_rounding(s, inputs, theirs, far) if far else {}
    cells += [replace(cell, name=f"{title}:{name}") for name, cell in (judged | rounded).items()]
    first = next((cell for cell in cells if cell.passed is False), None)
    if first is not None:
        name = first.name.removeprefix(f"{title}:")
        cells.insert(0, Cell(name=title, passed=False, reason=f"the first component that diverges is {name}"))
    return cells


def _cell(value: Tensor, other: Tensor, share: float) -> Cell:
    other = _alike(other, value)
    if other.shape != value.shape:
        reason = f"ours is {tuple(value.shape)}, the reference's {tuple(other.shape)}"
        return Cell(name="", passed=False, reason=reason)
    error, bound = distance(value, other), share * float(other.abs().max())
    return Cell(name="", passed=error <= bound < math.inf, error=error, bound=bound)


def _alike(other: Tensor, value: Tensor) -> Tensor:
    other = other.to(value.device)
    if other.shape != value.shape and other.numel() == value.numel() and other.shape[-1] == value.shape[-1]:
        return other.view(value.shape)  # experts give their tokens in one row
    return other


def _by_rounding(
    s: Subject, inputs: Mapping[str, Tensor], theirs: Mapping[str, Tensor], names: list[str]
) -> dict[str, Cell]:
    """The cells of some values by the run in higher precision."""
    errors: dict[str, float] = {}
    bounds = dict.fromkeys(names, 0.0)
    for k in range(1 + NEIGHBOURS if s.steady else 1):
        # The first pair is of the inputs as they are, the others of what lies a rounding beside them.
        plain, exact = (_points(s, model, inputs, names, k) for model in (s.model, s.wide))
        for name in names:
            if k == 0:
                errors[name] = mean_error([(_alike(theirs[name], exact[name]), exact[name])])
            bounds[name] = max(bounds[name], 2 * mean_error([(plain[name], exact[name])]))
    how = "root mean square against our run in higher precision; the bound is twice that of our plain pass"
    return {
        name: Cell(
            name="",
            passed=errors[name] <= bounds[name] < math.inf,
            error=errors[name],
            bound=bounds[name],
            reason=how,
        )
        for name in names
    }


def _points(s: Subject, model: Model, inputs: Mapping[str, Tensor], names: list[str], k: int) -> Mapping[str, Tensor]:
    beside = moved(model, k, s.model.dtype) if k else nullcontext()
    with native.without(), torch.no_grad(), beside, record(model, *names) as points:
        model(**inputs)
    return points
