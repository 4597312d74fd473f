"""Every op with a backward of its own computes it as its forward was computed, and kernels read no foreign memory."""

import importlib
import pkgutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import phylon.ops
from phylon.ops import attention, experts, feedforward, linear, norm, rotary, scan, scores
from phylon.ops.loss import linear_cross_entropy
from phylon.ops.native import pointer, strided
from phylon.ops.triton import unavailable
from phylon.spec import UserError


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _rotated(x: Tensor) -> Tensor:
    angles = torch.arange(90.0)[None, :, None, None] * torch.linspace(1, 0.1, 16)
    return rotary.rotate(x, (angles.cos(), angles.sin()))


def _expert(x: Tensor, gates: Tensor, up: Tensor, down: Tensor, gate: Tensor) -> Tensor:
    chosen = torch.arange(2 * len(x)).view(-1, 2) % len(up)
    return experts.experts(x, chosen, gates, experts.ExpertWeights(up=up, down=down, gate=gate))


def _scanned(*t: Tensor) -> tuple[Tensor, ...]:
    return scan.selective_scan(t[0], t[1].abs(), -t[2].abs(), *t[3:])


def _ssd(*t: Tensor) -> tuple[Tensor, ...]:
    return scan.ssd_scan(t[0], t[1].abs(), -t[2].abs(), *t[3:])


_SCAN = ((2, 70, 130), (2, 70, 130), (130, 9), (2, 70, 9), (2, 70, 9), (130,))
_SSD = ((2, 70, 4, 8), (2, 70, 4), (4,), (2, 70, 2, 9), (2, 70, 2, 9), (4,))
_FEED = ((90, 300), (100, 300), (100,), (300, 100), (300,), (100, 300), (100,))

OPS: dict[str, tuple[object, Callable[..., object], tuple[tuple[int, ...], ...]]] = {
    "attention": (attention.dispatch, attention.attention, ((2, 90, 4, 16),) * 3),
    "conv": (
        scan.conv_dispatch,
        lambda x, w, b: scan.causal_conv(x, w, b, activation="silu"),
        ((2, 70, 130), (130, 4), (130,)),
    ),
    "experts": (experts.dispatch, _expert, ((300, 64), (300, 2), (5, 40, 64), (5, 64, 40), (5, 40, 64))),
    "feedforward": (
        feedforward.dispatch,
        lambda x, u, ub, d, db, *_: feedforward.feedforward(x, (u, ub), (d, db), activation="gelu"),
        _FEED[:5],
    ),
    "feedforward, gated": (
        feedforward.dispatch,
        lambda x, u, ub, d, db, g, gb: feedforward.feedforward(x, (u, ub), (d, db), (g, gb), activation="silu"),
        _FEED,
    ),
    "linear": (
        linear.dispatch,
        lambda x, a, b, c: linear.linears(x, (a, b), (c, None)),
        ((90, 300), (40, 300), (50, 300), (40,)),
    ),
    "loss": (
        scores.dispatch,
        lambda h, w, b: linear_cross_entropy(h, w, torch.arange(len(h)) % 97, bias=b, z_loss=0.1).sum,
        ((300, 64), (97, 64), (97,)),
    ),
    "norm": (norm.dispatch, lambda x, w, b: norm.layer_norm(x, w, b, 1e-5), ((90, 300), (300,), (300,))),
    "norm, added": (norm.dispatch, lambda x, h, w: norm.add_rms_norm(x, h, w, 1e-5), ((90, 300), (90, 300), (300,))),
    "rotary": (rotary.dispatch, _rotated, ((2, 90, 4, 64),)),
    "scan": (scan.dispatch, _scanned, _SCAN),
    "ssd": (scan.ssd_dispatch, _ssd, _SSD),
}
"""By op: its dispatch, the op of its inputs, their shapes."""
OWN = [
    (op, name)
    for op, (dispatch, _, _) in OPS.items()
    for name in dispatch.backends  # type: ignore[attr-defined]
    if name not in ("reference", "grouped", "flex", "triton", "sdpa") and (op, name) not in {("ssd", "chunked")}
]
"""Backends that are more than PyTorch's own operations; on those PyTorch's rules for autocast hold."""


def _made(op: str, backend: str, *, backward_inside: bool, low: bool = True) -> list[Tensor]:
    dispatch, function, shapes = OPS[op]
    leaves = [draw(*shape).requires_grad_() for shape in shapes]
    if reason := dispatch.backends[backend].available():  # type: ignore[attr-defined]
        pytest.skip(reason)
    found: list[Tensor] = []
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        try:
            with dispatch.force(backend):  # type: ignore[attr-defined]
                out = function(*leaves)
        except UserError as refused:
            pytest.skip(str(refused))
        outputs = out if isinstance(out, tuple) else (out,)
        value = torch.stack([(o.float() * (1 + o.detach().float())).sum() for o in outputs]).sum()
        if backward_inside:
            found = list(torch.autograd.grad(value, leaves))
    return found or list(torch.autograd.grad(value, leaves))


@pytest.mark.parametrize(("op", "backend"), OWN)
def test_a_backward_inside_autocast_is_that_outside(op: str, backend: str) -> None:
    inside, outside = (_made(op, backend, backward_inside=way) for way in (True, False))
    for ours, theirs in zip(inside, outside, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(("op", "backend"), [o for o in OWN if o != ("conv", "shifted")])
def test_a_second_derivative_is_refused_in_one_line(op: str, backend: str) -> None:
    dispatch, function, shapes = OPS[op]
    leaves = [draw(*shape).requires_grad_() for shape in shapes]
    if reason := dispatch.backends[backend].available():  # type: ignore[attr-defined]
        pytest.skip(reason)
    with dispatch.force(backend):  # type: ignore[attr-defined]
        out = function(*leaves)
    first = out[0] if isinstance(out, tuple) else out
    with pytest.raises(UserError, match="has no second derivative: use"):
        torch.autograd.grad(first.square().sum(), leaves, create_graph=True, allow_unused=True)


def test_a_second_derivative_of_the_references_is_there() -> None:
    x, *rest = (draw(*shape).requires_grad_() for shape in ((1, 5, 3), (1, 5, 3), (3, 2), (1, 5, 2), (1, 5, 2), (3,)))
    for name in ("reference", "chunked"):
        with scan.dispatch.force(name):
            y = _scanned(x, *rest)[0].square().sum()
        if name == "reference":
            (first,) = torch.autograd.grad(y, x, create_graph=True)
            assert first.requires_grad


def test_every_backward_of_our_own_goes_through_the_same_door() -> None:
    for info in pkgutil.walk_packages(phylon.ops.__path__, "phylon.ops."):
        if "triton" not in info.name or unavailable() is None:
            importlib.import_module(info.name)
    own = [kind for kind in torch.autograd.Function.__subclasses__() if kind.__module__.startswith("phylon.")]
    assert len(own) >= 13
    for kind in own:
        assert kind.backward.__code__.co_name == "apart", f"{kind.__module__}.{kind.__name__}: use ops.backward"


def test_a_kernel_gets_no_address_of_less_than_it_reads() -> None:
    x = torch.zeros(6, 4)
    assert pointer(None, 4) is None
    assert pointer(x, 24) == x.data_ptr()
    for wrong in (x[:5], x.bfloat16(), x.T, x[:, :2].repeat(1, 2).T, x.to("meta")):
        with pytest.raises(AssertionError, match="a kernel takes 24 dense numbers"):
            pointer(wrong, 24)
    assert strided(x[:, :2], (6, 2), torch.float32) == (x.data_ptr(), 4)
    for wrong in (x, x[:, ::2], x[:, :2].bfloat16()):
        with pytest.raises(AssertionError, match="dense at the end"):
            strided(wrong, (6, 2), torch.float32)
