"""The native activations at the ends of the numbers, forward and backward: PyTorch's own values."""

import math

import pytest
import torch

from phylon.ops.activation import ACTIVATIONS
from phylon.ops.rows import native as rows

pytestmark = pytest.mark.skipif(rows.LIBRARY.reason() is not None, reason=f"native: {rows.LIBRARY.reason()}")

LARGEST = torch.finfo(torch.float32).max
ENDS = [0.0, 1e-40, 1e-30, 1e-4, 0.3, 1.0, 5.0, 20.0, 87.0, 88.5, 100.0, 1e4, 1e10, 1e19, 1e30, LARGEST, math.inf]
X = torch.tensor([*ENDS, *(-x for x in ENDS), math.nan])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("upstream", [1.0, -2.0, math.inf, math.nan])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_are_pytorchs(kind: str, upstream: float, gated: bool) -> None:
    x = X
    if kind == "gelu":  # PyTorch's own product overflows at the largest numbers
        x = X[~(X >= LARGEST)]
    if math.isinf(upstream):  # infinity times a sigmoid that is 0 here, and there a number without leading digits
        x = x[(x.abs() <= 5) | (x.abs() > 1000) | x.isnan()]
    leaf, up = x.clone()[None].requires_grad_(), torch.full((1, len(x)), 0.5, requires_grad=True)
    wanted = ACTIVATIONS[kind](leaf) * (up if gated else 1)
    g = torch.full_like(wanted, upstream)
    grads = torch.autograd.grad(wanted, [leaf, up] if gated else [leaf], g)
    factor = up.detach() if gated else None
    got = rows.activation(kind, x[None], up=factor)
    made = rows.ActivationGradients(kind, g.clone(), x[None], None, factor, None, again=True)
    same = {"rtol": 1e-5, "atol": 1e-6, "equal_nan": True}
    torch.testing.assert_close(got, wanted.detach(), **same)
    torch.testing.assert_close(made.y, wanted.detach(), **same)
    torch.testing.assert_close(made.x, grads[0], **same)
    if gated:
        torch.testing.assert_close(made.up, grads[1], **same)
