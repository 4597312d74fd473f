"""What a low-precision product is made of, with and without bf16 units."""

from typing import Any

import pytest
import torch

from phylon.ops import products
from phylon.ops.linear import joined, linears
from phylon.ops.native import library


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


@pytest.mark.parametrize(
    ("flags", "units"),
    [
        ("flags\t\t: fpu avx512f avx512_vnni", False),
        ("flags\t\t: fpu avx512f avx512_bf16 amx_tile amx_bf16 amx_int8", True),
        ("flags\t\t: fpu avx512f amx_tile amx_bf16", True),
        ("Features\t: fp asimd", False),
        ("Features\t: fp asimd sve bf16", True),
        ("", True),
    ],
)
def test_products_in_f32_only_without_units(flags: str, units: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With units every product of a layer is PyTorch's own in bf16, forward and backward; without, none of them is."""
    monkeypatch.setattr(library, "_processor", lambda: flags)
    monkeypatch.setattr(joined, "FEW_ROWS", 1)
    factors: set[torch.dtype] = set()
    multiply = torch.mm

    def watched(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
        factors.update((a.dtype, b.dtype))
        return multiply(a, b, **options)

    monkeypatch.setattr(torch, "mm", watched)
    products.bf16_units.cache_clear()
    try:
        x, w = torch.randn(20, 33, requires_grad=True), torch.randn(7, 33, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            (y,) = linears(x, (w,), (None,), backend="joined")
        y.float().square().sum().backward()
    finally:
        products.bf16_units.cache_clear()
    assert factors == {torch.bfloat16 if units else torch.float32}


def test_what_is_left_to_pytorch() -> None:
    x, w = torch.randn(64, 8), torch.randn(4, 8)
    assert "without gradients" in (joined.refusal(x, (w,)) or "")
    assert "fewer than" in (joined.refusal(x[:2], (w.requires_grad_(),)) or "")
    assert "float16" in (joined.refusal(x.half(), (w.half(),)) or "")
    assert joined.refusal(x, (w,)) is None
