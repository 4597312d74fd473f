"""What the kernels of this folder must get right before anybody uses them, forward and backward, in every dtype."""

from typing import Any

import torch
from torch import Tensor

from phylon.ops.scan.call import Breaks, SSDCall
from phylon.ops.scan.reference import SSDReference
from phylon.ops.scan.ssd.native import SSDNative

_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 1e-2}


def check() -> str | None:
    """``None``, or what is wrong."""
    for dtype in _LIMITS:
        for breaks in (Breaks(), _breaks()):
            wrong = _compare(_inputs(dtype), breaks)
            if wrong is not None:
                return f"{wrong} in {str(dtype).removeprefix('torch.')}"
    return None


def _inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    """Two rows of ragged chunks; groups of five heads, more than a thread takes together."""
    g = torch.Generator().manual_seed(0)
    shapes = {"x": (2, 100, 10, 19), "B": (2, 100, 2, 37), "C": (2, 100, 2, 37), "D": (10,)}
    drawn = {name: torch.randn(*shape, generator=g).to(dtype) for name, shape in shapes.items()}
    drawn["dt"] = torch.nn.functional.softplus(torch.randn(2, 100, 10, generator=g)).to(dtype)
    return drawn | {"A": -torch.rand(10, generator=g), "state": torch.randn(2, 10, 19, 37, generator=g)}


def _breaks() -> Breaks:
    """Documents and padding."""
    numbers = torch.rand(2, 100, generator=torch.Generator().manual_seed(1))
    return Breaks(resets=numbers < 0.05, real=numbers < 0.8)


def _compare(inputs: dict[str, Tensor], breaks: Breaks) -> str | None:
    found: list[list[Any]] = []
    grads: list[Tensor] = []
    for backend, dtype in ((SSDNative(), None), (SSDReference(), torch.float64)):
        leaves = {name: t.to(dtype or t.dtype, copy=True).requires_grad_() for name, t in inputs.items()}
        outputs = backend.run(SSDCall(**leaves, breaks=breaks))
        grads = grads or [1 + t.detach() for t in outputs]
        torch.autograd.backward(outputs, [g.to(t.dtype) for g, t in zip(grads, outputs, strict=True)])
        found.append([*(t.detach() for t in outputs), *(t.grad for t in leaves.values())])
    names = ("y", "the state", *(f"the gradient of {name}" for name in inputs))
    for name, got, wanted in zip(names, *found, strict=True):
        error = float((got.double() - wanted).abs().max() / wanted.abs().max())
        if not error <= _LIMITS[got.dtype]:
            return f"{name} is off by {error:.1e}"
    return None
