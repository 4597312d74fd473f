"""Documents forget each other exactly: what one holds, NaN too, reaches no output or gradient of another."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from phylon.ops import scan
from phylon.ops.scan import causal_conv, selective_scan, ssd_scan
from phylon.ops.scan.ssd import chunked as ssd

BATCH, LENGTH = 2, 40
STARTS = ([0, 1, 19, 33], [0, 24, 25])
"""Where the documents of each row begin; the state before the first is of another one."""


def _inputs(op: str) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    sizes = {
        "scan": {"x": (BATCH, LENGTH, 5), "dt": (BATCH, LENGTH, 5), "A": (5, 3), "B": (BATCH, LENGTH, 3)},
        "ssd": {"x": (BATCH, LENGTH, 4, 3), "dt": (BATCH, LENGTH, 4), "A": (4,), "B": (BATCH, LENGTH, 2, 3)},
        "conv": {"x": (BATCH, LENGTH, 5), "weight": (5, 4), "bias": (5,), "tail": (BATCH, 3, 5)},
    }[op]
    more = {"scan": {"C": (BATCH, LENGTH, 3), "D": (5,), "state": (BATCH, 5, 3)}}
    more["ssd"] = {"C": (BATCH, LENGTH, 2, 3), "D": (4,), "state": (BATCH, 4, 3, 3)}
    made = {name: torch.randn(*shape, generator=g) for name, shape in (sizes | more.get(op, {})).items()}
    if op != "conv":
        made |= {"dt": torch.nn.functional.softplus(made["dt"]), "A": -torch.exp(made["A"])}
    return made


OPS = {
    "scan": (selective_scan, scan.dispatch),
    "ssd": (ssd_scan, scan.ssd_dispatch),
    "conv": (causal_conv, scan.conv_dispatch),
}
CASES = [(op, name) for op, (_, dispatch) in OPS.items() for name in dispatch.backends]


def _resets() -> Tensor:
    resets = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    for row, starts in enumerate(STARTS):
        resets[row, starts] = True
    return resets


def _run(op: str, name: str, inputs: dict[str, Tensor], seen: Tensor, real: Tensor | None = None) -> Any:
    """Outputs and gradients where the tokens that are not ``seen`` have a loss that is no number."""
    function, dispatch = OPS[op]
    backend = dispatch.backends[name]
    if backend.available():
        pytest.skip(backend.available())
    leaves = {n: t.clone().requires_grad_() for n, t in inputs.items()}
    y, last = function(**leaves, resets=_resets(), real=real, backend=name)
    g = torch.Generator().manual_seed(4)
    grad = torch.randn(y.shape, generator=g).masked_fill(~_like(seen, y), math.nan)
    grads = torch.autograd.grad([y, last], list(leaves.values()), [grad, torch.zeros_like(last)])
    return y.detach(), dict(zip(leaves, grads, strict=True))


def _like(mask: Tensor, x: Tensor) -> Tensor:
    return mask.reshape(*mask.shape, *[1] * (x.ndim - 2))


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssd, "CHUNK", 8)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("op", "name"), CASES)
def test_the_state_before_a_reset_is_forgotten(op: str, name: str, value: float) -> None:
    """All gradients are finite, those of the parameters and of the forgotten state too."""
    inputs, everything = _inputs(op), torch.ones(BATCH, LENGTH, dtype=torch.bool)
    carried = "tail" if op == "conv" else "state"
    wanted, wanted_grads = _run(op, name, inputs, everything)
    got, grads = _run(op, name, inputs | {carried: torch.full_like(inputs[carried], value)}, everything)
    assert torch.equal(got, wanted)
    assert not grads[carried].any()
    for what, grad in grads.items():
        assert torch.equal(grad, wanted_grads[what]), what


@pytest.mark.parametrize("document", [0, 1, 2])
@pytest.mark.parametrize(("op", "name"), CASES)
def test_one_document_reaches_no_other(op: str, name: str, document: int) -> None:
    """Its inputs are NaN and its outputs have NaN for a gradient: other tokens have what they had without."""
    inputs, everything = _inputs(op), torch.ones(BATCH, LENGTH, dtype=torch.bool)
    other = _resets().cumsum(1) != document + 1
    by_time = [n for n in ("x", "dt", "B", "C") if n in inputs]
    poisoned = {n: inputs[n].masked_fill(~_like(other, inputs[n]), math.nan) for n in by_time}
    wanted, wanted_grads = _run(op, name, inputs, everything)
    got, grads = _run(op, name, inputs | poisoned, other)
    torch.testing.assert_close(got[other], wanted[other])
    for what in by_time:
        torch.testing.assert_close(grads[what][other], wanted_grads[what][other], msg=lambda m, w=what: f"{w}: {m}")


@pytest.mark.parametrize(("op", "name"), CASES)
def test_padding_reaches_nothing(op: str, name: str) -> None:
    """NaN in padding, and in the gradients of its outputs."""
    inputs, real = _inputs(op), torch.ones(BATCH, LENGTH, dtype=torch.bool)
    real[0, 5:9] = real[1, 20:24] = real[1, 36:] = False
    by_time = [n for n in ("x", "dt", "B", "C") if n in inputs]
    poisoned = {n: inputs[n].masked_fill(~_like(real, inputs[n]), math.nan) for n in by_time}
    _, wanted = _run(op, name, inputs, torch.ones_like(real), real)
    y, grads = _run(op, name, inputs | poisoned, real, real)
    assert torch.isfinite(y).all()
    for what, grad in grads.items():
        torch.testing.assert_close(grad, wanted[what], msg=lambda m, w=what: f"{w}: {m}")
        if what in by_time:
            assert not grad[~real].any()


def test_recurrences_by_doubling_forget_too() -> None:
    """What runs on a GPU."""
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(BATCH, LENGTH, 5, 3, generator=g, dtype=torch.float64) for _ in range(2))
    documents = _resets().cumsum(1)
    bad = documents == 2
    for x, y, found in ((a, b, documents), (a.flip(1), b.flip(1), documents.flip(1))):
        hidden = (found == 2)[..., None, None]
        wanted, got = y.clone(), y.masked_fill(hidden, math.nan)
        scan.chunked.double(x.clone(), wanted, found)
        scan.chunked.double(x.masked_fill(hidden, math.nan), got, found)
        kept = ~hidden.expand_as(got)
        assert torch.equal(got[kept], wanted[kept])
    assert bad.any()
