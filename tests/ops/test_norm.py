"""Norms against fp64, their gradients, and the rounding of low precision."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from helpers import assert_close
from phylon.ops.norm import dispatch, layer_norm, rms_norm
from phylon.ops.rows import native as rows

D = 24


def written_rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight


def inputs(dtype: torch.dtype, offset: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((3, 5, D), (D,), (D,)))
    return tuple((t + offset * (t is x)).to(dtype).requires_grad_() for t in (x, weight, bias))  # type: ignore[return-value]


@pytest.mark.parametrize("eps", [1e-6, 0.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_against_fp64(dtype: torch.dtype, eps: float) -> None:
    x, weight, bias = inputs(dtype)
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    pairs = [
        (rms_norm(x, weight, eps), written_rms(wide[0], wide[1], eps)),
        (rms_norm(x, None, eps), written_rms(wide[0], None, eps)),
        (layer_norm(x, weight, bias, eps), F.layer_norm(wide[0], (D,), wide[1], wide[2], eps)),
        (layer_norm(x, weight, None, eps), F.layer_norm(wide[0], (D,), wide[1], None, eps)),
    ]
    for ours, theirs in pairs:
        assert ours.dtype == dtype
        assert_close(ours, theirs, tolerance)
        grads = (
            torch.autograd.grad((out * wide[0].detach().sin()).sum(), leaf)[0]
            for out, leaf in ((ours, x), (theirs, wide[0]))
        )
        assert_close(*grads, tolerance=10 * tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_are_wide(dtype: torch.dtype) -> None:
    """One rounding at the end: within half a unit in the last place of the exact value, also far from zero."""
    x, weight, bias = (t.detach() for t in inputs(dtype, offset=100.0))
    unit = torch.finfo(dtype).eps
    for ours, exact in (
        (rms_norm(x, weight, 1e-6), written_rms(x.double(), weight.double(), 1e-6)),
        (layer_norm(x, weight, bias, 1e-5), F.layer_norm(x.double(), (D,), weight.double(), bias.double(), 1e-5)),
    ):
        assert ours.dtype == dtype
        assert float(((ours.double() - exact).abs() / exact.abs().clamp(min=1e-2)).max()) <= 0.51 * unit + 1e-5


def test_fp16_does_not_overflow() -> None:
    """Squares above 65504 (case 7's kind)."""
    x = torch.full((1, D), 1000.0, dtype=torch.float16)
    assert torch.equal(rms_norm(x, None, 1e-6), torch.ones_like(x))


@pytest.mark.parametrize("of_x", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_weight", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_bias", [None, torch.float32, torch.bfloat16])
def test_any_mixture_of_dtypes(
    of_x: torch.dtype, of_weight: torch.dtype | None, of_bias: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every backend, forward and backward, and of the dtypes that were given."""
    monkeypatch.setattr(rows, "FEW", 0)
    made = [(t.detach(), dtype) for t, dtype in zip(inputs(torch.float64), (of_x, of_weight, of_bias), strict=True)]
    wide = [None if dtype is None else t.to(dtype).double().requires_grad_() for t, dtype in made]
    for centred in (True, False):
        if not centred and of_bias is not None:
            continue
        exact = F.layer_norm(wide[0], (D,), wide[1], wide[2]) if centred else written_rms(wide[0], wide[1], 1e-5)
        expected = torch.autograd.grad(exact.sin().sum(), [t for t in wide if t is not None])
        for name, backend in dispatch.backends.items():
            if backend.available():
                continue
            leaves = [None if dtype is None else t.to(dtype).requires_grad_() for t, dtype in made]
            x, weight, bias = leaves
            options = {"eps": 1e-5, "backend": name}
            y = layer_norm(x, weight, bias, **options) if centred else rms_norm(x, weight, **options)
            assert y.dtype == of_x
            given = [t for t in leaves if t is not None]
            for found, wanted, t in zip(torch.autograd.grad(y.sin().sum(), given), expected, given, strict=True):
                assert found.dtype == t.dtype
                low = torch.bfloat16 in (of_x, t.dtype)
                assert_close(found.double(), wanted, 2e-2 if low else 1e-5)
