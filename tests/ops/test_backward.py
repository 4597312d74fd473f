"""Every op with a backward of its own computes it as its forward was computed, and kernels read no foreign memory."""

import importlib
import pkgutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import phylon.ops
from phylon.ops import attention, experts, feedforward, linear, norm, rotary, scan, scores
from phylon.ops.embedding import embedding
from phylon.ops.loss import cross_entropy, linear_cross_entropy
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


def _run(op: str, backend: str) -> tuple[list[Tensor], Tensor]:
    """The inputs of an op and the first of what one backend makes of them."""
    dispatch, function, shapes = OPS[op]
    leaves = [draw(*shape).requires_grad_() for shape in shapes]
    if reason := dispatch.backends[backend].available():  # type: ignore[attr-defined]
        pytest.skip(reason)
    with dispatch.force(backend):  # type: ignore[attr-defined]
        out = function(*leaves)
    return leaves, out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize(("op", "backend"), [o for o in OWN if o[0] not in ("rotary", "experts", "loss")])
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, "meta"], ids=str)
def test_pytorchs_defaults_are_nothing_to_a_kernel(op: str, backend: str, default: torch.dtype | str) -> None:
    """Memory that a kernel fills has its own dtype and device: a default's would be too small, or nowhere."""
    found, before = [], torch.get_default_dtype()
    for changed in (False, True):
        leaves, _ = _run(op, backend)
        try:
            if changed and isinstance(default, str):
                torch.set_default_device(default)
            elif changed:
                torch.set_default_dtype(default)  # type: ignore[arg-type]
            with OPS[op][0].force(backend):  # type: ignore[attr-defined]
                out = OPS[op][1](*leaves)
            first = out[0] if isinstance(out, tuple) else out
            found.append([first.detach(), *torch.autograd.grad(first.float().sum(), leaves, allow_unused=True)])
        finally:
            torch.set_default_dtype(before)
            torch.set_default_device(None)
    for plain, other in zip(*found, strict=True):
        assert plain is other is None or torch.equal(plain, other)


@pytest.mark.parametrize(("op", "backend"), [o for o in OWN if o != ("conv", "shifted")])
def test_a_second_derivative_is_refused_in_one_line(op: str, backend: str) -> None:
    leaves, first = _run(op, backend)
    with pytest.raises(UserError, match="has no second derivative: use"):
        torch.autograd.grad(first.square().sum(), leaves, create_graph=True, allow_unused=True)


@pytest.mark.parametrize(("op", "backend"), [o for o in OWN if o != ("conv", "shifted")])
def test_several_gradients_at_once_are_refused_in_one_line(op: str, backend: str) -> None:
    leaves, first = _run(op, backend)
    with pytest.raises(UserError, match=r"takes one gradient at a time.*: use"):
        torch.autograd.grad(first, leaves, torch.ones(2, *first.shape), is_grads_batched=True, allow_unused=True)


def _value(op: str) -> Callable[..., Tensor]:
    function = OPS[op][1]

    def value(*leaves: Tensor) -> Tensor:
        out = function(*leaves)
        return sum(o.float().sin().sum() for o in (out if isinstance(out, tuple) else (out,)))  # type: ignore[return-value]

    return value


def _close(ours: Tensor | tuple[Tensor, ...], wanted: Tensor | tuple[Tensor, ...]) -> None:
    pairs = [(ours, wanted)] if isinstance(ours, Tensor) else zip(ours, wanted, strict=True)
    for mine, other in pairs:
        assert mine.shape == other.shape
        assert float((mine - other).norm()) <= 1e-4 * max(1e-3, float(other.norm()))


def _by_reference(op: str, leaves: list[Tensor], tangents: list[Tensor]) -> tuple[tuple[Tensor, ...], ...]:
    """The gradients, and their derivatives along ``tangents``, by two backward passes."""
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    with scores.dispatch.force("reference") if op == "loss" else OPS[op][0].force("reference"):  # type: ignore[attr-defined]
        if op == "loss":
            h, w, b = leaves
            value = cross_entropy(h @ w.T + b, torch.arange(len(h)) % 97, z_loss=0.1).sum.sin()
        else:
            value = _value(op)(*leaves)
        grads = torch.autograd.grad(value, leaves, create_graph=True)
        along = sum((g * t).sum() for g, t in zip(grads, tangents, strict=True))
        second = torch.autograd.grad(along, leaves, materialize_grads=True)  # type: ignore[arg-type]
    return tuple(g.detach() for g in grads), second


@pytest.mark.parametrize("op", OPS)
def test_torch_func_and_forward_mode(op: str) -> None:
    """Gradients, those by example, products with the Jacobian and the Hessian: from the references, unasked."""
    value, shapes = _value(op), OPS[op][2]
    leaves, tangents = ([draw(*shape) * scale for shape in shapes] for scale in (1.0, 0.01))
    tangents = [t.flip(0) for t in tangents]
    places = tuple(range(len(leaves)))
    grads, second = _by_reference(op, leaves, tangents)
    gradient = torch.func.grad(value, places)
    _close(gradient(*leaves), grads)
    along = torch.stack([(g * t).sum() for g, t in zip(grads, tangents, strict=True)]).sum()
    _close(torch.func.jvp(value, tuple(leaves), tuple(tangents))[1], along)
    with forward_ad.dual_level():
        dual = value(*(forward_ad.make_dual(leaf, t) for leaf, t in zip(leaves, tangents, strict=True)))
        _close(forward_ad.unpack_dual(dual).tangent, along)
    _close(torch.func.jvp(gradient, tuple(leaves), tuple(tangents))[1], second)
    pairs = [torch.stack([leaf, leaf.flip(0)]) for leaf in leaves]
    wanted = [_by_reference(op, [pair[i] for pair in pairs], tangents)[0] for i in (0, 1)]
    _close(torch.func.vmap(gradient)(*pairs), tuple(torch.stack(both) for both in zip(*wanted, strict=True)))


@pytest.mark.parametrize(("op", "backend"), [(op, name) for op, name in OWN if op != "loss"])
def test_a_backend_of_our_own_says_that_torch_func_cannot_see_it(op: str, backend: str) -> None:
    leaves = tuple(draw(*shape) for shape in OPS[op][2])
    if reason := OPS[op][0].backends[backend].available():  # type: ignore[attr-defined]
        pytest.skip(reason)
    with (
        OPS[op][0].force(backend),  # type: ignore[attr-defined]
        pytest.raises(UserError, match=r"cannot run this call: torch\.func and forward-mode .* see into the ref"),
    ):
        torch.func.grad(_value(op))(*leaves)


def test_experts_by_example_even_where_their_tokens_differ() -> None:
    """And the rows that are sent nowhere may hold anything."""
    x, gates, up, down = draw(2, 6, 8), draw(2, 6, 2), draw(4, 5, 8), draw(4, 8, 5)
    chosen = torch.randint(-1, 4, (2, 6, 2), generator=torch.Generator().manual_seed(0))
    chosen[0, 0], x[0, 0] = -1, torch.nan

    def value(up: Tensor, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
        return experts.experts(x, chosen, gates, experts.ExpertWeights(up=up, down=down)).sin().sum()

    ours = torch.func.vmap(torch.func.grad(value), (None, 0, 0, 0))(up, x, gates, chosen)
    for i in (0, 1):
        leaf = up.clone().requires_grad_()
        _close(ours[i], *torch.autograd.grad(value(leaf, x[i], gates[i], chosen[i]), leaf))


def test_the_table_under_torch_func() -> None:
    ids, weight, pull = torch.tensor([[3, 1, 3]]), draw(5, 4), draw(1, 3, 4)
    leaf = weight.clone().requires_grad_()
    rows, table = embedding(ids, leaf)
    ones = torch.stack([pull, 2 * pull])
    outputs, grads = (rows, table), (ones, torch.ones(2, 5, 4))
    (made,) = torch.autograd.grad(outputs, leaf, grads, is_grads_batched=True)
    wanted = torch.func.grad(lambda w: (embedding(ids, w)[0] * pull).sum())(weight)
    _close(made, torch.stack([1 + wanted, 1 + 2 * wanted]))


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
