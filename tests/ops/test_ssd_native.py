"""Mamba-2's scan in C++ against the written-out recurrence: shapes, groups, documents, padding, threads, memory."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import Made
from phylon.ops import scan
from phylon.ops.scan import ssd_scan
from phylon.ops.scan.ssd import native
from phylon.spec import UserError

LENGTHS = [1, 2, 64, 135]
# Heads, groups, width, size: one head; more heads a group than a thread takes at once, no whole vectors; whole ones.
SHAPES = [(1, 1, 5, 3), (10, 2, 19, 37), (4, 4, 16, 32)]
BY_TIME = ("x", "dt", "B", "C")
BATCH = 3

pytestmark = pytest.mark.skipif(native.LIBRARY.reason() is not None, reason=f"native: {native.LIBRARY.reason()}")


def inputs(length: int, shape: tuple[int, int, int, int], batch: int = BATCH) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(length)
    heads, groups, width, size = shape

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    return {
        "x": draw(batch, length, heads, width),
        "dt": torch.nn.functional.softplus(draw(batch, length, heads) - 1),
        "A": -torch.exp(draw(heads)),
        "B": draw(batch, length, groups, size),
        "C": draw(batch, length, groups, size),
        "D": draw(heads),
        "state": draw(batch, heads, width, size),
    }


def masks(length: int, kind: str) -> dict[str, Tensor | None]:
    """Documents, and padding on the left, in the middle, on the right, everywhere in the last row."""
    if kind == "plain":
        return {"resets": None, "real": None}
    g = torch.Generator().manual_seed(length)
    real = torch.ones(BATCH, length, dtype=torch.bool)
    real[0, : length // 3] = real[1, length // 3 : length // 2] = real[1, length - length // 5 :] = real[2] = False
    return {"resets": (torch.rand(BATCH, length, generator=g) > 0.9) & real, "real": real}


def like(mask: Tensor, x: Tensor) -> Tensor:
    return mask.reshape(*mask.shape, *[1] * (x.ndim - 2))


def everything(
    given: dict[str, Tensor], dtype: torch.dtype, backend: str, low: torch.dtype = torch.float32, **options: Any
) -> dict[str, Tensor]:
    """Outputs and gradients, from gradients rounded to ``low``; for the kernel, NaN comes back to padding."""
    leaves = {n: t.to(dtype, copy=True).requires_grad_() for n, t in given.items()}
    y, last = ssd_scan(**leaves, **options, backend=backend)
    g = torch.Generator().manual_seed(1)
    grad, of_last = (torch.randn(t.shape, generator=g, dtype=torch.float64) for t in (y, last))
    real, bad = options.get("real"), 0 if backend == "reference" else math.nan
    grad = grad if real is None else grad.masked_fill(~like(real, grad), bad)
    torch.autograd.backward([y, last], [grad.to(low).to(y.dtype), of_last.to(last.dtype)])
    return {"y": y.detach(), "last": last.detach(), **{n: t.grad for n, t in leaves.items()}}


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor], bound: float) -> None:
    """To ``bound`` of the largest; the gradient of A, a sum over all steps that can cancel, to ten times that."""
    bounds = {"A": 10 * bound}
    for name, value in got.items():
        assert value.isfinite().all(), name
        error, scale = (value.double() - wanted[name]).abs().max(), wanted[name].abs().max()
        assert error <= bounds.get(name, bound) * max(float(scale), 1e-3), f"{name}: {float(error / scale)}"


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", ["plain", "broken"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_equals_the_recurrence(length: int, kind: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        options, given = masks(length, kind), inputs(length, shape)
        given = {n: t.to(dtype).double() for n, t in given.items()}
        real = options["real"]
        if real is not None:  # padding may hold anything
            given |= {n: given[n].masked_fill(~like(real, given[n]), math.nan) for n in BY_TIME}
        wanted = everything(given, torch.float64, "reference", dtype, **options)
        got = everything(given, dtype, "native", dtype, **options)
        assert {n: got[n].dtype for n in given} == dict.fromkeys(given, dtype)
        assert_close(got, wanted, 3e-6 if dtype is torch.float32 else 2**-7)
        if real is not None:
            assert all(not got[n][~real].any() for n in ("y", *BY_TIME))
            assert torch.equal(got["last"][2], given["state"][2].float()), "an all-padding row is left as it is"


@pytest.mark.parametrize("length", [1, 100])
def test_without_a_state_before_it_begins_with_nothing(length: int) -> None:
    given = inputs(length, SHAPES[1])
    given["state"].zero_()
    wanted = everything(given, torch.float64, "reference")
    del given["state"]
    assert_close(everything(given, torch.float32, "native"), wanted, 3e-6)
    with torch.no_grad():
        y, last = ssd_scan(**{n: t.float() for n, t in given.items()}, backend="native")
    assert_close({"y": y, "last": last}, wanted, 3e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_another_document_holds_is_never_seen(value: float) -> None:
    """Inputs, gradients of outputs and of the last state: long documents of several chunks, one of a single step."""
    given, resets = inputs(300, SHAPES[1]), torch.zeros(BATCH, 300, dtype=torch.bool)
    resets[:, [0, 90, 91, 230]] = True
    documents = resets.cumsum(1)
    options = {"resets": resets}
    clean = everything(given, torch.float32, "native", **options)
    for document in (1, 2, 3, 4):
        other = documents != document
        leaves = {n: t.float().clone() for n, t in given.items()}
        leaves |= {n: leaves[n].masked_fill(~like(other, leaves[n]), value) for n in BY_TIME}
        leaves["state"].fill_(value)
        leaves = {n: t.requires_grad_() for n, t in leaves.items()}
        y, last = ssd_scan(**leaves, **options, backend="native")
        g = torch.Generator().manual_seed(1)
        grad, of_last = (torch.randn(t.shape, generator=g, dtype=torch.float64).float() for t in (y, last))
        grad = grad.masked_fill(~like(other, grad), value)
        of_last = of_last.fill_(value) if document == 4 else of_last
        torch.autograd.backward([y, last], [grad, of_last])
        assert torch.equal(y[other], clean["y"][other])
        for name in BY_TIME:
            assert torch.equal(leaves[name].grad[other], clean[name][other]), name
        assert not leaves["state"].grad.any()
        assert document == 4 or torch.equal(last, clean["last"])


def test_the_number_of_threads_changes_no_bit() -> None:
    threads, found = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            found.append(everything(inputs(150, (10, 1, 16, 16)), torch.float32, "native", **masks(150, "broken")))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0][n], other[n]) for other in found[1:] for n in other)


def test_slices_of_a_wider_tensor_are_read_where_they_are() -> None:
    given = {n: t.float() for n, t in inputs(70, (4, 2, 8, 6)).items()}
    joined = torch.cat([given[n].flatten(2) for n in ("x", "B", "C")], -1)
    x, B, C = joined.split([32, 12, 12], -1)
    split = {"x": x.unflatten(-1, (4, 8)), "B": B.unflatten(-1, (2, 6)), "C": C.unflatten(-1, (2, 6))}
    turned = {"dt": given["dt"].mT.contiguous().mT, "x": given["x"].mT.contiguous().mT}
    wanted = ssd_scan(**given, backend="native")
    for other in (split, turned):
        got = ssd_scan(**given | other, backend="native")
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("rate", [1e-4, 0.1, 3.0, 40.0])
def test_exponentials_are_good_to_their_last_bits(rate: float) -> None:
    """One step from a state of one, without an input, is the exponential itself; a step of zero keeps all bits."""
    dt, one = torch.linspace(0, 1, 4096)[None, None], torch.ones(1, 1, 1, 1)
    A, none = torch.full((4096,), -rate), torch.zeros(1, 1, 4096, 1)
    for x in (none, none.clone().requires_grad_()):  # a step, and a chunk
        state = ssd_scan(x, dt, A, one, one, A, state=torch.ones(1, 4096, 1, 1), backend="native")[1].flatten()
        wanted = torch.exp(dt.double() * A.double()).flatten()
        assert ((state / wanted - 1).abs() <= 2e-7 + 1.3e-7 * rate * dt.flatten()).all()
        assert state[0] == 1
        for large, left in ((1e30, 0.0), (-1e30, math.inf), (math.nan, math.nan)):
            state = ssd_scan(x, dt * large, A, one, one, A, state=torch.ones(1, 4096, 1, 1), backend="native")[1]
            torch.testing.assert_close(state[0, 1:], torch.full((4095, 1, 1), left), equal_nan=True)


@pytest.mark.parametrize("length", [256, 1024])
def test_no_tensor_of_all_states_nor_of_all_pairs(length: int) -> None:
    """Outputs, gradients, those of B and C by four heads, and of every 64th step the state."""
    given = {n: t.float().requires_grad_() for n, t in inputs(length, (8, 1, 16, 32), batch=4).items()}
    with Made() as made:
        y, _ = ssd_scan(**given, backend="native")
        y.backward(torch.ones_like(y))
    x, maps = (given[n].numel() * 4 for n in ("x", "B"))
    starts = given["state"].numel() * 4 * (length // 64)
    assert max(made.sizes) == max(starts, x, 2 * maps)
    small = 6 * given["state"].numel() * 4 + 2 * given["dt"].numel() * 4
    assert sum(made.sizes) <= 3 * x + 6 * maps + starts + small  # y, its gradient and that of x; B's and C's


def test_what_starts_a_document_keeps_no_state() -> None:
    given = {n: t.float().requires_grad_() for n, t in inputs(130, (8, 1, 16, 32), batch=2).items()}
    resets = torch.ones(2, 130, dtype=torch.bool)
    with Made() as made:
        ssd_scan(**given, resets=resets, backend="native")
    assert sum(made.sizes) == (given["x"].numel() + given["state"].numel()) * 4


def test_a_step_makes_its_output_and_nothing_else() -> None:
    given = {n: t.float() for n, t in inputs(1, (4, 1, 16, 64), batch=1).items()}
    into = torch.empty_like(given["state"])
    with Made() as made:
        _, last = ssd_scan(**given, into=into, backend="native")
    assert last is into
    assert made.sizes == [4 * 16 * 4]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"x": torch.zeros(3, 4, 2, 8, dtype=torch.float64)}, "it takes float32 and bfloat16, not float64"),
        ({"B": torch.zeros(3, 4, 1, 5, dtype=torch.float16)}, "it takes float32 and bfloat16, not float16"),
        ({"A": torch.zeros(2, dtype=torch.float64)}, "it computes in float32"),
        ({"x": torch.zeros(3, 4, 2, 8, device="meta")}, "it runs on the CPU, not on meta"),
        ({"into": torch.zeros(3, 2, 8, 4)}, "into is (3, 2, 8, 4), expected (3, 2, 8, 5)"),
    ],
)
def test_what_it_cannot_do_is_named(change: dict[str, Tensor], reason: str) -> None:
    given = {n: t.float() for n, t in inputs(4, (2, 1, 8, 5)).items()} | change
    with pytest.raises(UserError) as error:
        ssd_scan(**given, backend="native")
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_the_dispatch_takes_it_first() -> None:
    given = {n: t.float() for n, t in inputs(4, (2, 1, 8, 5)).items()}
    lines = scan.ssd_dispatch.explain(scan.SSDCall(**given, breaks=scan.Breaks()))
    assert [line.backend for line in lines if line.chosen] == ["native"]
