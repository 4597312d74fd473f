"""What a low-precision product is made of, with and without bf16 units."""

import pytest
import torch

from phylon.ops import products
from phylon.ops.linear import joined, linears


@pytest.mark.parametrize("units", [True, False])
def test_bf16_products_round_once(units: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without units the product is that of the unrounded weights, rounded once: no further from the truth."""
    monkeypatch.setattr(products, "bf16_units", lambda: units)
    monkeypatch.setattr(joined, "FEW_ROWS", 1)
    made = torch.Generator().manual_seed(0)
    x, w = torch.randn(20, 33, generator=made), torch.randn(7, 33, generator=made).requires_grad_()
    exact = (x.double() @ w.double().T).detach()
    with torch.autocast("cpu", torch.bfloat16):
        (y,) = linears(x, (w,), (None,), backend="joined")
    assert y.dtype == torch.bfloat16
    error, rounding = float((y.double() - exact).norm()), float((exact.bfloat16().double() - exact).norm())
    # With units the product's own rounding is the machine's; without it is one rounding of the exact product.
    assert error <= (10 if units else 1.001) * rounding
    y.float().sum().backward()
    assert w.grad is not None
    assert w.grad.dtype == torch.float32


def test_what_is_left_to_pytorch() -> None:
    x, w = torch.randn(64, 8), torch.randn(4, 8)
    assert "without gradients" in (joined.refusal(x, (w,)) or "")
    assert "fewer than" in (joined.refusal(x[:2], (w.requires_grad_(),)) or "")
    assert "float16" in (joined.refusal(x.half(), (w.half(),)) or "")
    assert joined.refusal(x, (w,)) is None
