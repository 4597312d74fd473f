"""The C++ scan and convolution against the written-out recurrences: shapes, documents, padding, threads, memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import Made
from phylon.ops import scan
from phylon.ops.scan import causal_conv, native, selective_scan
from phylon.spec import UserError

LENGTHS = [1, 7, 63, 100, 129]
WIDTHS = [(5, 3), (37, 16), (16, 1), (130, 64)]
BY_TIME = ("x", "dt", "B", "C")

pytestmark = pytest.mark.skipif(native.LIBRARY.reason() is not None, reason=f"native: {native.LIBRARY.reason()}")


def draw(seed: int) -> Any:
    g = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)


def scan_inputs(length: int, width: int, size: int, batch: int = 3) -> dict[str, Tensor]:
    r = draw(length)
    return {
        "x": r(batch, length, width),
        "dt": torch.nn.functional.softplus(r(batch, length, width) - 1),
        "A": -torch.exp(r(width, size)),
        "B": r(batch, length, size),
        "C": r(batch, length, size),
        "D": r(width),
        "state": r(batch, width, size),
    }


def conv_inputs(length: int, width: int, reach: int, batch: int = 3) -> dict[str, Tensor]:
    r = draw(length)
    shapes = {
        "x": (batch, length, width),
        "weight": (width, reach),
        "bias": (width,),
        "tail": (batch, reach - 1, width),
    }
    return {name: r(*shape) for name, shape in shapes.items()}


def masks(length: int, kind: str) -> dict[str, Tensor | None]:
    """Documents, and padding on the left, on the right, in the middle, everywhere in the last row."""
    if kind == "plain":
        return {"resets": None, "real": None}
    g = torch.Generator().manual_seed(length)
    real = torch.ones(3, length, dtype=torch.bool)
    real[0, : length // 3] = False
    real[1, length // 3 : length // 2] = False
    real[1, length - length // 5 :] = False
    real[2] = False
    return {"resets": (torch.rand(3, length, generator=g) > 0.8) & real, "real": real}


def poisoned(inputs: dict[str, Tensor], real: Tensor | None) -> dict[str, Tensor]:
    if real is None:
        return inputs
    return inputs | {n: inputs[n].masked_fill(~real[..., None], torch.nan) for n in BY_TIME if n in inputs}


def everything(function: Any, inputs: dict[str, Tensor], dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    """Outputs and gradients, in fp64."""
    leaves = {n: t.to(dtype, copy=True).requires_grad_() for n, t in inputs.items()}
    y, state = function(**leaves, **options)
    r = draw(1)
    real = options.get("real")
    g = r(*y.shape)
    # What comes back to padding may be anything as well.
    g = g if real is None else g.masked_fill(~real[..., None], torch.nan)
    torch.autograd.backward([y, state], [g.to(y.dtype), r(*state.shape).to(state.dtype)])
    return {"y": y.detach(), "last": state.detach(), **{n: t.grad for n, t in leaves.items() if t.grad is not None}}


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor], bound: float) -> None:
    assert got.keys() == wanted.keys()
    for name, value in got.items():
        assert value.isfinite().all(), name
        error, scale = (value.double() - wanted[name].double()).abs().max(), wanted[name].abs().max()
        assert error <= bound * max(float(scale), 1e-3), f"{name}: {float(error / scale)}"


def exact(function: Any, inputs: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """The reference in fp64, with zeros where the padding is (it multiplies gradients of padding by zero)."""
    real = options.get("real")
    leaves = {n: t.clone().requires_grad_() for n, t in inputs.items()}
    y, state = function(**leaves, **options, backend="reference")
    r = draw(1)
    g = r(*y.shape)
    g = g if real is None else g.masked_fill(~real[..., None], 0)
    torch.autograd.backward([y, state], [g, r(*state.shape)])
    grads = {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in leaves.items() if t.numel()}
    return {"y": y.detach(), "last": state.detach(), **grads}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", ["plain", "broken"])
def test_scan_equals_the_recurrence(length: int, kind: str) -> None:
    for width, size in WIDTHS if length < 129 else WIDTHS[:2]:
        inputs, options = scan_inputs(length, width, size), masks(length, kind)
        inputs = poisoned(inputs, options["real"])
        wanted = exact(selective_scan, inputs, **options)
        got = everything(selective_scan, inputs, torch.float32, **options, backend="native")
        assert_close(got, wanted, 3e-6)
        if options["real"] is not None:
            padding = ~options["real"]
            assert all(not got[n][padding].any() for n in ("y", *BY_TIME))
            assert torch.equal(got["last"][2], inputs["state"][2].float()), "an all-padding row is left as it is"


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
def test_conv_equals_the_recurrence(length: int, activation: str | None) -> None:
    for kind in ("plain", "broken"):
        for width, reach in ((5, 4), (37, 2), (130, 4), (16, 1)):
            inputs, options = conv_inputs(length, width, reach), masks(length, kind)
            inputs = poisoned(inputs, options["real"])
            if activation == "gelu" and options["real"] is not None:
                continue  # another activation is PyTorch's, whose gradient multiplies what comes back to padding
            wanted = exact(causal_conv, inputs, **options, activation=activation)
            got = everything(causal_conv, inputs, torch.float32, **options, activation=activation, backend="native")
            got = {n: t for n, t in got.items() if n in wanted}
            wanted = {n: t for n, t in wanted.items() if n in got}
            assert_close(
                {n: t for n, t in got.items() if t.numel()}, {n: wanted[n] for n in got if got[n].numel()}, 3e-6
            )


@pytest.mark.parametrize("kind", ["plain", "broken"])
def test_sixteen_bits_outside(kind: str) -> None:
    """Rounded once on the way in and once on the way out; fp32 state. At most twice plain PyTorch's error."""
    options = masks(100, kind)
    for function, inputs in ((selective_scan, scan_inputs(100, 37, 16)), (causal_conv, conv_inputs(100, 37, 4))):
        inputs = {n: t.bfloat16().double() for n, t in poisoned(inputs, options["real"]).items()}
        held = {n: t if n in ("A", "D", "state") else t.bfloat16() for n, t in inputs.items()}
        wanted = exact(function, inputs, **options)
        leaves = {n: t.float() if t.dtype is torch.float64 else t for n, t in held.items()}
        leaves = {n: t.clone().requires_grad_() for n, t in leaves.items()}
        y, last = function(**leaves, **options, backend="native")
        assert (y.dtype, last.dtype) == (torch.bfloat16, leaves.get("state", y).dtype)
        r = draw(1)
        g = r(*y.shape)
        g = g if options["real"] is None else g.masked_fill(~options["real"][..., None], 0)
        torch.autograd.backward([y, last], [g.to(y.dtype), r(*last.shape).to(last.dtype)])
        got = {"y": y.detach(), "last": last.detach(), **{n: t.grad for n, t in leaves.items()}}
        assert all(got[n].dtype == leaves[n].dtype for n in leaves)
        assert_close(got, wanted, 2**-7)


def test_the_number_of_threads_changes_no_bit() -> None:
    threads, options = torch.get_num_threads(), masks(200, "broken")
    found = []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            found.append(
                everything(selective_scan, scan_inputs(200, 300, 17), torch.float32, **options, backend="native")
                | {
                    f"conv {n}": t
                    for n, t in everything(
                        causal_conv, conv_inputs(200, 300, 4), torch.float32, **options, backend="native"
                    ).items()
                }
            )
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(found[0][n], other[n]) for n in other)


def test_slices_of_a_wider_tensor_are_read_where_they_are() -> None:
    inputs = {n: t.float() for n, t in scan_inputs(70, 20, 6).items()}
    joined = torch.cat([inputs["dt"], inputs["B"], inputs["C"]], -1)
    dt, B, C = joined.split([20, 6, 6], -1)
    turned = inputs["x"].mT.contiguous().mT
    assert turned.stride(-1) != 1
    wanted = selective_scan(**inputs, backend="native")
    got = selective_scan(**inputs | {"x": turned, "dt": dt, "B": B, "C": C}, backend="native")
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_decay_is_exact_where_it_must_be() -> None:
    """A step of zero keeps the state bit for bit; one that forgets everything forgets everything."""
    state = torch.randn(1, 4, 3)
    ones = {n: torch.ones(1, 1, k) for n, k in (("x", 4), ("B", 3), ("C", 3))}
    A = -torch.rand(4, 3) - 0.5
    keep = selective_scan(**ones, dt=torch.zeros(1, 1, 4), A=A, D=torch.ones(4), state=state.clone(), backend="native")[
        1
    ]
    assert torch.equal(keep, state)
    for dt in (50.0, 1e4, 1e30):
        gone = selective_scan(
            **ones | {"x": torch.zeros(1, 1, 4)},
            dt=torch.full((1, 1, 4), dt),
            A=A,
            D=torch.ones(4),
            state=state,
            backend="native",
        )[1]
        assert gone.abs().max() <= 1e-10
        assert gone.isfinite().all()


@pytest.mark.parametrize("rate", [1e-4, 0.1, 3.0, 40.0])
def test_exponentials_are_good_to_their_last_bits(rate: float) -> None:
    """One step from a state of one, without an input, is the exponential itself."""
    dt = torch.linspace(0, 1, 4096)[None, None]
    ones = torch.ones(1, 1, 4096)
    state, A = torch.ones(1, 4096, 1), torch.full((4096, 1), -rate)
    got = selective_scan(
        0 * ones, dt, A, torch.ones(1, 1, 1), torch.ones(1, 1, 1), torch.ones(4096), state=state, backend="native"
    )[1]
    wanted = torch.exp(dt.double() * A.double()[:, 0])[0, 0]
    # The exponent itself is rounded: dt * A to half a unit of its last place.
    assert ((got[0, :, 0] / wanted - 1).abs() <= 2e-7 + 1.3e-7 * rate * dt[0, 0]).all()


@pytest.mark.parametrize("length", [512, 2048])
def test_no_tensor_of_all_states(length: int) -> None:
    """Outputs, gradients, and of every 32nd step the state."""
    width, size = 128, 16
    leaves = {
        n: torch.rand(1, length, k, requires_grad=True)
        for n, k in zip(BY_TIME, (width, width, size, size), strict=True)
    }
    A, D = (-torch.rand(width, size)).requires_grad_(), torch.ones(width, requires_grad=True)
    with Made() as made:
        y, _ = selective_scan(**leaves, A=A, D=D, backend="native")
        y.backward(torch.ones_like(y))
    states = length * width * size * 4
    assert max(made.sizes) == length * width * 4
    starts = states // 32
    gradients = 4 * length * width * 4 + 2 * length * size * 4
    assert sum(made.sizes) <= starts + gradients + 16 * width * size * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_makes_its_output_and_nothing_else(dtype: torch.dtype) -> None:
    inputs = {n: t.to(dtype) for n, t in scan_inputs(1, 64, 16, batch=1).items()}
    inputs["state"] = inputs["state"].float()
    conv = {n: t.to(dtype) for n, t in conv_inputs(1, 64, 4, batch=1).items()}
    into, tail = torch.empty_like(inputs["state"]), torch.empty_like(conv["tail"])
    with Made() as made:
        _, last = selective_scan(**inputs, into=into, backend="native")
    assert last is into
    assert made.sizes == [64 * dtype.itemsize]
    with Made() as made:
        _, last = causal_conv(**conv, into=tail, activation="silu", backend="native")
    assert last is tail
    assert made.sizes == [64 * dtype.itemsize]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_read_where_they_lie(dtype: torch.dtype) -> None:
    """Any strides of the taps give the same bits, and a gradient like the weight."""
    inputs = {n: t.to(dtype) for n, t in conv_inputs(9, 37, 4).items()}
    turned = inputs | {"weight": inputs["weight"].mT.contiguous().mT}
    wide = inputs | {"weight": torch.stack([inputs["weight"]] * 2, -1).flatten(1)[:, ::2]}
    outputs = []
    for given in (inputs, turned, wide):
        weight = given["weight"].requires_grad_()
        y, last = causal_conv(**given, activation="silu", backend="native")
        (grad,) = torch.autograd.grad(y.float().square().sum(), weight)
        assert (grad.shape, grad.dtype) == (weight.shape, dtype)
        outputs.append((y, last, grad))
    assert all(torch.equal(a, b) for other in outputs[1:] for a, b in zip(outputs[0], other, strict=True))


@pytest.mark.parametrize("backend", ["native", "chunked", "reference"])
def test_into_holds_the_last_state(backend: str) -> None:
    inputs = {n: t.float() for n, t in scan_inputs(9, 8, 3).items()}
    wanted = selective_scan(**inputs, backend=backend)
    into = torch.empty_like(inputs["state"])
    y, last = selective_scan(**inputs, into=into, backend=backend)
    assert last is into
    assert torch.equal(into, wanted[1])
    assert torch.equal(y, wanted[0])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"x": torch.zeros(3, 4, 8, dtype=torch.float64)}, "it takes float32 and bfloat16, not float64"),
        ({"B": torch.zeros(3, 4, 5, dtype=torch.float16)}, "it takes float32 and bfloat16, not float16"),
        ({"A": torch.zeros(8, 5, dtype=torch.float64)}, "it computes in float32"),
        ({"x": torch.zeros(3, 4, 8, device="meta")}, "it runs on the CPU, not on meta"),
        ({"into": torch.zeros(3, 8, 4)}, "into is (3, 8, 4), expected (3, 8, 5)"),
    ],
)
def test_what_it_cannot_do_is_named(change: dict[str, Tensor], reason: str) -> None:
    inputs = {n: t.float() for n, t in scan_inputs(4, 8, 5).items()} | change
    with pytest.raises(UserError) as error:
        selective_scan(**inputs, backend="native")
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_activation_is_named() -> None:
    inputs = {n: t.float() for n, t in conv_inputs(4, 8, 4).items()}
    with pytest.raises(UserError, match="unknown activation 'silo'"):
        causal_conv(**inputs, activation="silo")


def test_the_dispatch_takes_it_first() -> None:
    inputs = {n: t.float() for n, t in scan_inputs(4, 8, 5).items()}
    assert [line.backend for line in scan.explain(**inputs) if line.chosen] == ["native"]
