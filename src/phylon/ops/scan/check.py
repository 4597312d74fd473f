"""What the kernels of scans and convolutions must get right before anybody uses them: every one, in every dtype.

``CHECKS`` is the table: a kernel of the library without a line in it is not used.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from phylon.ops.native import Library
from phylon.ops.scan.call import Breaks, ConvCall, ScanCall
from phylon.ops.scan.native import LIBRARY, ConvNative, ScanNative
from phylon.ops.scan.reference import ConvReference, ScanReference
from phylon.ops.scan.step import StepCall, StepComposed, StepNative

_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 1e-2}

Draw = Callable[..., Tensor]
Found = Iterator[tuple[str, Tensor, Tensor]]
"""What is compared: its name, what the kernel made, and what it should be."""


def check() -> str | None:
    """``None``, or which kernel is wrong, or not known here."""
    return checked(LIBRARY, CHECKS)


def checked(library: Library, checks: dict[str, Callable[[Draw], Found]]) -> str | None:
    """The same of any library and its table."""
    unknown = library.functions.keys() - checks.keys()
    if unknown:
        return f"nothing checks {min(unknown)}"
    for check_one, dtype in product(dict.fromkeys(checks.values()), _LIMITS):
        draw = partial(_draw, torch.Generator().manual_seed(0), dtype)
        for what, got, wanted in check_one(draw):
            error = float((got.double() - wanted).abs().max() / wanted.abs().max())
            if not error <= _LIMITS[got.dtype]:
                return f"{what} in {str(dtype).removeprefix('torch.')} is off by {error:.1e}"
    return None


def _draw(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def _scans(draw: Draw) -> Found:
    """More numbers of state than steps in a chunk, so that chunks lie between two kept states; and few."""
    for length, width, size in ((40, 37, 9), (70, 5, 40)):
        inputs = {"x": draw(2, length, width), "B": draw(2, length, size), "C": draw(2, length, size)}
        inputs |= {"dt": torch.nn.functional.softplus(draw(2, length, width)), "D": draw(width)}
        inputs |= {"A": -torch.exp(draw(width, size)), "state": draw(2, width, size).float()}
        made = partial(ScanCall, breaks=broken(length))
        yield from both_ways("a scan", ScanNative(), ScanReference(), made, inputs)


def _convolutions(draw: Draw) -> Found:
    length, width, reach = 20, 37, 4
    inputs = {"x": draw(2, length, width), "weight": draw(width, reach), "bias": draw(width)}
    inputs |= {"tail": draw(2, reach - 1, width)}
    for activation, breaks in ((None, broken(length)), ("silu", broken(length)), ("silu", Breaks())):
        made = partial(ConvCall, breaks=breaks, activation=activation)
        yield from both_ways("a convolution", ConvNative(), ConvReference(), made, inputs)


def _steps(draw: Draw) -> Found:
    batch, width, size, rank, reach = 2, 37, 9, 3, 4
    given = {"x": draw(batch, 1, width), "z": draw(batch, 1, width), "tail": draw(batch, reach - 1, width)}
    given |= {"conv_weight": draw(width, reach), "conv_bias": draw(width), "dt_bias": draw(width), "D": draw(width)}
    given |= {"x_proj": draw(rank + 2 * size, width) / 6, "dt_proj": draw(width, rank), "A_log": draw(width, size)}
    given |= {"state": draw(batch, width, size).float()}
    found = []
    for backend, dtype in ((StepNative(), None), (StepComposed(), torch.float64)):
        tensors = {name: t if dtype is None else t.to(dtype) for name, t in given.items()}
        call = StepCall(
            **tensors, new_tail=torch.empty_like(tensors["tail"]), new_state=torch.empty_like(tensors["state"])
        )
        with torch.no_grad():
            found.append((backend.run(call), call.new_tail, call.new_state))
    for name, got, wanted in zip(("the output", "the tail", "the state"), *found, strict=True):
        yield f"{name} of a step", got, wanted


def broken(length: int) -> Breaks:
    """Documents and padding."""
    resets, real = torch.rand(2, 2, length, generator=torch.Generator().manual_seed(1)) > 0.2
    return Breaks(resets=~resets & real, real=real)


def both_ways(of: str, kernel: Any, reference: Any, make: Callable[..., Any], inputs: dict[str, Tensor]) -> Found:
    """Outputs and gradients, the latter of a quadratic function of the outputs as the kernel makes them."""
    found, grads = [], []
    for backend, dtype in ((kernel, None), (reference, torch.float64)):
        leaves = {name: t.detach().to(dtype or t.dtype, copy=True).requires_grad_() for name, t in inputs.items()}
        outputs = backend.run(make(**leaves))
        grads = grads or [1 + t.detach() for t in outputs]
        torch.autograd.backward(outputs, [g.to(t.dtype) for g, t in zip(grads, outputs, strict=True)])
        found.append([*(t.detach() for t in outputs), *(t.grad for t in leaves.values())])
    names = ("the output", "the state", *(f"the gradient of {name}" for name in inputs))
    for name, got, wanted in zip(names, *found, strict=True):
        yield f"{name} of {of}", got, wanted


CHECKS: dict[str, Callable[[Draw], Found]] = {
    "scan_starts": _scans,
    "scan_forward": _scans,
    "scan_backward": _scans,
    "mamba_step": _steps,
    "conv_forward": _convolutions,
    "conv_backward": _convolutions,
}
