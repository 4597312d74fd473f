"""The Triton scan against the reference in Triton's interpreter; ``test_attention_triton.py`` starts its process."""

import importlib.util

import pytest
import torch
from torch import Tensor

from phylon.ops.scan import Breaks, dispatch
from phylon.ops.scan import triton as launcher
from phylon.ops.scan.call import ScanCall
from phylon.ops.triton import interpreted

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(not interpreted(), reason="runs inside test_in_the_interpreter"),
]


def both_ways(name: str, leaves: list[Tensor], breaks: Breaks) -> list[Tensor]:
    x, dt, a, b, c, d, state = leaves
    call = ScanCall(x=x, dt=dt, A=a, B=b, C=c, D=d, state=state, breaks=breaks)
    assert dispatch.backends[name].available() is dispatch.backends[name].supports(call) is None
    y, last = dispatch.backends[name].run(call)
    generator = torch.Generator().manual_seed(1)
    loss = sum((out * torch.randn(out.shape, generator=generator)).sum() for out in (y, last))
    assert isinstance(loss, Tensor)
    return [y.detach(), last.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("broken", [False, True])
def test_inside_equals_the_reference(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts, chunks and blocks of channels, none of them whole; documents, padding of NaN, a state before."""
    monkeypatch.setattr(launcher, "_CHUNK", 8)
    monkeypatch.setattr(launcher, "_PART", 2)
    monkeypatch.setattr(launcher, "_NUMBERS", 16)
    generator = torch.Generator().manual_seed(0)
    rows, tokens, width, size = 2, 19, 5, 3
    shapes = ((rows, tokens, width), (rows, tokens, width), (width, size), (rows, tokens, size), (rows, tokens, size))
    x, dt, a, b, c = (torch.randn(shape, generator=generator) for shape in shapes)
    d, state = torch.randn(width, generator=generator), torch.randn(rows, width, size, generator=generator)
    resets, real = torch.zeros(rows, tokens, dtype=torch.bool), torch.ones(rows, tokens, dtype=torch.bool)
    if broken:
        resets[0, 7], real[1, :3], x[1, :3] = True, False, torch.nan
    leaves = [t.requires_grad_() for t in (x, dt.abs() / 3, -a.abs() - 0.1, b, c, d, state)]
    breaks = Breaks(resets=resets, real=real) if broken else Breaks()
    for i, (mine, other) in enumerate(
        zip(*(both_ways(n, leaves, breaks) for n in ("triton", "reference")), strict=True)
    ):
        assert float((mine - other).norm() / other.norm()) <= 2e-6, f"tensor {i}"
