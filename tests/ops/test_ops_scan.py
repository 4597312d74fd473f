"""Selective scan, SSD and causal convolution: every backend against the written-out recurrence."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from phylon.ops import scan
from phylon.ops.scan import causal_conv, chunked, selective_scan, ssd_scan
from phylon.ops.scan.ssd import chunked as ssd
from phylon.spec import UserError

SIZES = [1, 7, 63, 100]


def scan_inputs(length: int, *, batch: int = 2, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    width, size = 5, 3

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    return {
        "x": draw(batch, length, width),
        "dt": torch.nn.functional.softplus(draw(batch, length, width)),
        "A": -torch.exp(draw(width, size)),
        "B": draw(batch, length, size),
        "C": draw(batch, length, size),
        "D": draw(width),
        "state": draw(batch, width, size),
    }


def ssd_inputs(length: int, *, batch: int = 2, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    heads, groups, width, size = 6, 2, 3, 4

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    return {
        "x": draw(batch, length, heads, width),
        "dt": torch.nn.functional.softplus(draw(batch, length, heads)),
        "A": -torch.exp(draw(heads)),
        "B": draw(batch, length, groups, size),
        "C": draw(batch, length, groups, size),
        "D": draw(heads),
        "state": draw(batch, heads, width, size),
    }


def conv_inputs(length: int, *, batch: int = 2, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    width, reach = 5, 4
    shapes = {
        "x": (batch, length, width),
        "weight": (width, reach),
        "bias": (width,),
        "tail": (batch, reach - 1, width),
    }
    return {name: torch.randn(*s, generator=g, dtype=torch.float64).to(dtype) for name, s in shapes.items()}


OPS: dict[str, tuple[Any, Any, str]] = {
    "scan": (selective_scan, scan_inputs, "chunked"),
    "ssd": (ssd_scan, ssd_inputs, "chunked"),
    "conv": (causal_conv, conv_inputs, "shifted"),
}
BY_TIME = ("x", "dt", "B", "C")


@pytest.fixture(params=sorted(OPS))
def op(request: pytest.FixtureRequest) -> tuple[Any, Any, str]:
    return OPS[request.param]


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a short text has several chunks and a ragged last one."""
    monkeypatch.setattr(chunked, "_LONGEST", 4)
    monkeypatch.setattr(ssd, "CHUNK", 4)


def masks(length: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(length)
    real = torch.rand(batch, length, generator=g) > 0.3
    resets = (torch.rand(batch, length, generator=g) > 0.7) & real
    return resets, real


def with_grad(function: Any, inputs: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    leaves = {name: t.clone().requires_grad_() for name, t in inputs.items()}
    y, state = function(**leaves, **options)
    g = torch.Generator().manual_seed(9)
    loss = sum((t * torch.randn(t.shape, generator=g, dtype=t.dtype)).sum() for t in (y, state))
    loss.backward()
    return y.detach(), state.detach(), {name: t.grad for name, t in leaves.items()}


@pytest.mark.parametrize("length", SIZES)
@pytest.mark.parametrize("broken", ["plain", "resets", "padding", "both"])
def test_backend_equals_the_recurrence_forward_and_backward(op: Any, length: int, broken: str) -> None:
    function, make, name = op
    resets, real = masks(length)
    options = {"resets": resets if broken in ("resets", "both") else None}
    options["real"] = real if broken in ("padding", "both") else None
    inputs = make(length)
    if options["real"] is not None:
        # Padding may hold anything.
        inputs |= {n: inputs[n].masked_fill(~_like(real, inputs[n]), torch.nan) for n in BY_TIME if n in inputs}
    wanted = with_grad(function, inputs, **options, backend="reference")
    got = with_grad(function, inputs, **options, backend=name)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    if options["real"] is not None:
        assert not got[0][~real].any()
        assert all(bool(torch.isfinite(t).all()) for t in got[2].values())


def _like(mask: Tensor, tensor: Tensor) -> Tensor:
    return mask.reshape(*mask.shape, *[1] * (tensor.ndim - 2))


@pytest.mark.parametrize("length", SIZES)
@pytest.mark.usefixtures("short_chunks")
def test_gradients_are_those_of_the_function(op: Any, length: int) -> None:
    function, make, name = op
    inputs = {n: t.requires_grad_() for n, t in make(length).items()}
    resets, real = masks(length)

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return function(**dict(zip(inputs, tensors, strict=True)), resets=resets, real=real, backend=name)

    assert torch.autograd.gradcheck(run, tuple(inputs.values()), fast_mode=length > 1)


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(1, 9), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_any_chunking_equals_the_whole(cuts: list[int], seed: int) -> None:
    length = sum(cuts)
    resets, real = masks(length)
    for function, make, name in OPS.values():
        inputs = make(length, seed=seed)
        whole, last = function(**inputs, resets=resets, real=real, backend=name)
        carry = "tail" if "tail" in inputs else "state"
        state, outputs = inputs[carry], []
        for piece in zip(
            *(t.split(cuts, 1) for t in (resets, real, *(inputs[n] for n in _times(inputs)))), strict=True
        ):
            parts = inputs | dict(zip(_times(inputs), piece[2:], strict=True)) | {carry: state}
            y, state = function(**parts, resets=piece[0], real=piece[1], backend=name)
            outputs.append(y)
        torch.testing.assert_close((torch.cat(outputs, 1), state), (whole, last), rtol=1e-10, atol=1e-10)


def _times(inputs: dict[str, Tensor]) -> list[str]:
    return [name for name in BY_TIME if name in inputs]


def test_padding_leaves_the_state_bit_for_bit(op: Any) -> None:
    function, make, name = op
    inputs = make(3, dtype=torch.float32)
    carry = inputs["tail" if "tail" in inputs else "state"]
    padding = torch.zeros(2, 3, dtype=torch.bool)
    y, state = function(**inputs, real=padding, backend=name)
    assert torch.equal(state, carry)
    assert not y.any()


def test_a_reset_forgets_everything_and_nothing_else_does(op: Any) -> None:
    function, make, name = op
    inputs = make(8)
    resets = torch.zeros(2, 8, dtype=torch.bool)
    resets[:, 5] = True
    fresh = {n: t[:, 5:] if n in BY_TIME else t for n, t in inputs.items() if n not in ("tail", "state")}
    alone, _ = function(**fresh, backend=name)
    packed, _ = function(**inputs, resets=resets, backend=name)
    plain, _ = function(**inputs, backend=name)
    torch.testing.assert_close(packed[:, 5:], alone)
    torch.testing.assert_close(packed[:, :5], plain[:, :5])
    assert (packed[:, 5] - plain[:, 5]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["scan", "ssd"])
def test_sixteen_bits_in_fp32_inside(name: str) -> None:
    function, make, backend = OPS[name]
    inputs = make(40, dtype=torch.bfloat16)
    exact, exact_state = function(**{n: t.double() for n, t in inputs.items()}, backend="reference")
    y, state = function(**inputs, backend=backend)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(state.double(), exact_state, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y32, state = function(**{n: t.float() for n, t in inputs.items()}, backend=backend)
    torch.testing.assert_close((y32.double(), state.double()), (exact, exact_state), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["scan", "ssd"])
def test_large_steps_do_not_cancel(name: str) -> None:
    """A step that forgets everything, then small ones: sums from the start of the chunk would lose their difference."""
    function, make, backend = OPS[name]
    inputs = make(60, dtype=torch.float32)
    inputs["dt"][:, ::10] = 3000.0
    wanted = function(**{n: t.double() for n, t in inputs.items()}, backend="reference")
    got = function(**inputs, backend=backend)
    for a, b in zip(got, wanted, strict=True):
        assert (a - b).abs().max() <= 1e-6 * b.abs().max()


class _Largest(TorchDispatchMode):
    """The most numbers that any tensor made inside has."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return out


@pytest.mark.parametrize("length", [256, 1024])
def test_no_tensor_of_all_states(length: int) -> None:
    width, size = 8, 64
    x, dt = torch.randn(1, length, width, requires_grad=True), torch.rand(1, length, width)
    B, C = torch.randn(1, length, size), torch.randn(1, length, size)
    with _Largest() as seen:
        y, _ = selective_scan(x, dt, -torch.rand(width, size), B, C, torch.ones(width), backend="chunked")
        y.sum().backward()
    # The states of a chunk, or the gradients of B and C; all states would be length * width * size.
    assert seen.numbers == max(64 * width * size, length * size)


@pytest.mark.parametrize("size", [5, 40])
@pytest.mark.parametrize("length", [100, 200])
def test_what_the_backward_pass_keeps_is_no_larger_than_its_inputs(
    size: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensor between the passes grows with T x D x N; states between two kept ones give the same gradients."""
    monkeypatch.setattr(chunked, "_LONGEST", 8)
    width, kept = 8, []
    r = partial(torch.randn, dtype=torch.float64)
    leaves = [r(1, length, width), r(1, length, width).abs(), -r(width, size).abs()]
    leaves += [r(1, length, size), r(1, length, size), r(width)]
    given = {t.requires_grad_().untyped_storage().data_ptr() for t in leaves}

    def keep(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in given:
            kept.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y, last = selective_scan(*leaves, backend="chunked")
    assert max(kept) <= length * width + width * size
    found = torch.autograd.grad((y.square().sum(), last.sum()), leaves)
    y, last = selective_scan(*leaves, backend="reference")
    wanted = torch.autograd.grad((y.square().sum(), last.sum()), leaves)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@torch.no_grad()
def test_a_step_of_a_scan_makes_nothing_of_the_states_size(dtype: torch.dtype) -> None:
    inputs = {n: t.to(dtype) for n, t in scan_inputs(1, dtype=torch.float32).items()}
    state = inputs.pop("state").float()
    A = inputs.pop("A").float()
    into = torch.empty_like(state)
    with _LargestPiece(state, A, into, *inputs.values()) as made:
        y, last = selective_scan(**inputs, A=A, state=state, into=into, backend="chunked")
    assert last is into
    assert made.bytes < into.untyped_storage().nbytes() / 2
    wanted = selective_scan(**inputs, A=A, state=state, backend="reference")
    torch.testing.assert_close(last, wanted[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y, wanted[0], rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-3)


def test_chunks_fit_the_cache_but_never_shrink_to_single_steps() -> None:
    assert [chunked.chunk_length(n) for n in (16, 512 * 16, 2**14, 2**30)] == [64, 32, 16, 16]


@pytest.mark.parametrize("name", ["scan", "ssd"])
def test_the_state_keeps_nothing_else_alive(name: str) -> None:
    function, make, backend = OPS[name]
    _, state = function(**make(9), backend=backend)
    assert state.untyped_storage().nbytes() == state.numel() * state.element_size()


def test_a_step_is_small() -> None:
    inputs = scan_inputs(1)
    with _Largest() as seen:
        selective_scan(**inputs)
    assert seen.numbers == inputs["state"].numel()


@pytest.mark.parametrize("length", [1, 2, 37])
def test_both_ways_to_run_the_recurrence_agree(length: int) -> None:
    a, b, h = (torch.randn(2, *n, 5, 3, dtype=torch.float64) for n in ((length,), (length,), ()))
    loop, rounds = b.clone(), b.clone()
    chunked.recur(a, loop, h)
    rounds[:, 0] += a[:, 0] * h
    chunked.double(a.clone(), rounds)
    torch.testing.assert_close(rounds, loop)
    loop, rounds = b.clone(), b.flip(1)
    chunked.recur_back(a, loop)
    chunked.double(torch.cat([a[:, :1], a[:, 1:].flip(1)], 1), rounds)
    torch.testing.assert_close(rounds.flip(1), loop)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"A": torch.zeros(5, 9)}, "B is"),
        ({"D": torch.zeros(4)}, "D is (4,), expected (5,)"),
        ({"x": torch.zeros(2, 5)}, "x (B, T, D)"),
        ({"x": torch.zeros(2, 0, 5)}, "none of them 0"),
        ({"state": torch.zeros(1, 5, 3)}, "state is"),
        ({"resets": torch.zeros(2, 4)}, "resets must be boolean (2, 4)"),
        ({"real": torch.zeros(2, 3, dtype=torch.bool)}, "real must be boolean"),
        ({"backend": "chunky"}, "did you mean 'chunked'"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        selective_scan(**(scan_inputs(4) | change))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_groups_divide_heads() -> None:
    inputs = ssd_inputs(4) | {"B": torch.zeros(2, 4, 4, 4)}
    with pytest.raises(UserError, match="6 heads are no multiple of 4 groups"):
        ssd_scan(**inputs)


def test_explain_lists_every_backend() -> None:
    lines = scan.explain(**scan_inputs(4))
    found = [(line.backend, line.chosen, line.reason) for line in lines]
    assert found == [
        ("native", False, "it takes float32 and bfloat16, not float64"),
        ("triton", False, scan.dispatch.backends["triton"].available() or "it runs on GPUs, not on cpu"),
        ("chunked", True, None),
        ("reference", False, None),
    ]


@pytest.mark.parametrize("op", ["scan", "ssd", "conv"])
def test_a_reset_at_padding_is_none(op: str) -> None:
    """Padding leaves the state exactly as it is, whatever the masks say of it, on every backend."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    b, t, d, n, w = 2, 9, 6, 4, 4
    inputs = {
        "scan": (draw(b, t, d), draw(b, t, d).abs(), -draw(d, n).abs(), draw(b, t, n), draw(b, t, n), draw(d)),
        "ssd": (draw(b, t, 2, d), draw(b, t, 2).abs(), -draw(2).abs(), draw(b, t, 1, n), draw(b, t, 1, n), draw(2)),
        "conv": (draw(b, t, d), draw(d, w)),
    }[op]
    state = {"scan": draw(b, d, n), "ssd": draw(b, 2, d, n), "conv": draw(b, w - 1, d)}[op]
    function = {"scan": scan.selective_scan, "ssd": scan.ssd_scan, "conv": scan.causal_conv}[op]
    dispatch = {"scan": scan.dispatch, "ssd": scan.ssd_dispatch, "conv": scan.conv_dispatch}[op]
    before = {"tail" if op == "conv" else "state": state}
    real = torch.zeros(b, t, dtype=torch.bool)
    everywhere = torch.ones(b, t, dtype=torch.bool)
    mixed = torch.arange(t).expand(b, t) % 3 != 1
    for name, backend in dispatch.backends.items():
        if backend.available() or name == "triton":  # its kernels have a test of their own
            continue
        _, after = function(*inputs, **before, resets=everywhere, real=real, backend=name)
        assert torch.equal(after, state), name
        only = function(*inputs, **before, resets=mixed & (torch.arange(t) == 3), real=mixed, backend=name)
        both = function(*inputs, **before, resets=~mixed | (torch.arange(t) == 3), real=mixed, backend=name)
        for ours, theirs in zip(both, only, strict=True):
            assert torch.equal(ours, theirs), name


class _LargestPiece(TorchDispatchMode):
    """The bytes of the largest piece of memory that an operation made."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.known, self.bytes = {t.untyped_storage().data_ptr() for t in known}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in self.known:
            self.bytes = max(self.bytes, out.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_of_ssd_allocates_nothing_of_the_states_size(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    shapes = ((2, 1, 4, 32), (2, 1, 4), (4,), (2, 1, 2, 64), (2, 1, 2, 64), (4,))
    x, dt, A, B, C, D = (torch.randn(*shape, generator=g) for shape in shapes)
    inputs = [*(t.to(dtype) for t in (x, dt.abs())), -A.abs(), *(t.to(dtype) for t in (B, C)), D]
    state = torch.randn(2, 4, 32, 64, generator=g)
    into, plain = torch.empty_like(state), ssd_scan(*inputs, state=state, backend="reference")
    with torch.no_grad(), _LargestPiece(state, into, *inputs) as made:
        y, last = ssd_scan(*inputs, state=state, into=into)
    assert last is into
    assert made.bytes < into.untyped_storage().nbytes() / 8
    torch.testing.assert_close(last, plain[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y, plain[0], rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-4)


def test_torch_func_gets_the_recurrence() -> None:
    inputs = scan_inputs(7, dtype=torch.float32)
    x = inputs.pop("x")

    def total(x: Tensor) -> Tensor:
        return selective_scan(x, **inputs)[0].square().sum()

    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(total(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(total)(x), expected)
    every = torch.func.vmap(lambda x: selective_scan(x, **inputs)[0])(torch.stack([x, 2 * x]))
    torch.testing.assert_close(every[1], selective_scan(2 * x, **inputs)[0])
    with pytest.raises(UserError, match=r"torch\.func .* see into the reference alone"):
        torch.func.grad(lambda x: selective_scan(x, **inputs, backend="chunked")[0].sum())(x)
