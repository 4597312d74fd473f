"""The native activations and norms at the ends of the numbers, forward and backward: PyTorch's own values."""

import math

import pytest
import torch
from torch.nn import functional as F

from phylon.ops import norm
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("centred", [True, False])
def test_norms_are_finite_wherever_pytorchs_are(
    centred: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the least number to the greatest; equal to it forward, and backward, where squares hold, to fp64."""
    monkeypatch.setattr(rows, "FEW", 0)
    scales = torch.tensor([10.0**e for e in range(-44, 38, 2)] + [1e19, 1.7e19, 2e19, 1e37, 5e37])
    shapes = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)).clamp(-3, 3)
    shapes[1, 1:], shapes[3, ::2], shapes[4] = 0, 1, shapes[4].abs()
    values = (scales[:, None, None] * shapes).flatten(0, 1)
    values = torch.cat([values, 3.3e38 * shapes.sign()]).to(dtype)
    weight, bias = torch.linspace(-1, 2, 40).to(dtype), torch.linspace(0, 1, 40).to(dtype)
    found = []
    for kind, ours in ((dtype, True), (dtype, False), (torch.float64, False)):
        leaf, w, b = values.to(kind, copy=True).requires_grad_(), weight.to(kind), bias.to(kind)
        if centred:
            y = norm.layer_norm(leaf, w, b, 1e-12, backend="native") if ours else F.layer_norm(leaf, (40,), w, b, 1e-12)
        else:
            y = norm.rms_norm(leaf, w, 1e-12, backend="native") if ours else F.rms_norm(leaf, (40,), w, 1e-12)
        pull = torch.linspace(2, -1, 40).to(dtype).to(kind).expand_as(leaf)
        found.append((y.detach().double(), torch.autograd.grad(y, leaf, pull)[0].double()))
    (y, grad), theirs, (_, exact) = found
    tolerance = 1e-4 if dtype is torch.float32 else 3e-2
    both = theirs[0].isfinite().all(-1)
    assert int(both.sum()) > 150
    assert float((y - theirs[0])[both].abs().max()) <= tolerance * 10
    assert bool(grad[theirs[1].isfinite()].isfinite().all())
    held = values.abs().amax(-1) < 1e17
    error, size = (grad - exact)[held].norm(dim=-1), exact[held].norm(dim=-1)
    assert bool((error <= tolerance * size).all())
