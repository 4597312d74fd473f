"""A model beside another implementation of the same weights: the first component that diverges is named."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from phylon.checkpoint.law import TIGHT, Cell, Subject, distance
from phylon.model import record
from phylon.ops import native
from phylon.spec.errors import UserError

Reference = Callable[..., Mapping[str, Tensor]]
"""Another implementation of the same weights. It is called with what the model is called with (``tokens`` (B, T) and
``source`` (B, S), or ``images`` (B, C, H, W), by keyword) and gives values by the names of ``phylon.record``, any of
them, so that the first one that diverges can be named."""


def compare(s: Subject, reference: Reference) -> list[Cell]:
    """One cell a value that ``reference`` gives, in the order of the forward pass; the first that diverges leads.

    A reference that refuses (``UserError``) is one cell that does not apply. The bound, as a part of the largest value:
    1e-5 a block in fp32, 16 roundings of the dtype in low precision.
    """
    inputs = s.shared_inputs()
    try:
        theirs = dict(reference(**inputs))
    except UserError as error:
        return [Cell(name="reference", passed=None, reason=str(error))]
    # With PyTorch's own operations, as the reference computes: other kernels round otherwise, and are other cells.
    with native.without(), torch.no_grad(), record(s.model) as points:
        s.model(**inputs)
    cells = [
        Cell(name=f"reference:{name}", passed=None, reason="this model records no such value")
        for name in theirs
        if name not in points
    ]
    # What is recorded as scores or weights runs another kernel; what is compared comes from the plain pass.
    with native.without(), torch.no_grad(), record(s.model, *(name for name in theirs if name in points)) as ours:
        s.model(**inputs)
    tight, n_blocks = TIGHT.get(s.model.dtype), sum(len(stack.blocks) for stack in s.model.spec.stacks.values())
    share = 16 * torch.finfo(s.model.dtype).eps if tight is None else tight * max(1, n_blocks)
    cells += [_cell(name, value, theirs[name], share) for name, value in ours.items() if name in theirs]
    first = next((cell for cell in cells if cell.passed is False), None)
    if first is not None:
        name = first.name.removeprefix("reference:")
        cells.insert(0, Cell(name="reference", passed=False, reason=f"the first component that diverges is {name}"))
    return cells


def _cell(name: str, value: Tensor, other: Tensor, share: float) -> Cell:
    other = other.to(value.device)
    if other.shape != value.shape and other.numel() == value.numel() and other.shape[-1] == value.shape[-1]:
        other = other.view(value.shape)  # experts give their tokens in one row
    if other.shape != value.shape:
        reason = f"ours is {tuple(value.shape)}, the reference's {tuple(other.shape)}"
        return Cell(name=f"reference:{name}", passed=False, reason=reason)
    error, bound = distance(value, other), share * float(other.abs().max())
    return Cell(name=f"reference:{name}", passed=error <= bound < math.inf, error=error, bound=bound)
