"""The C++ kernel against the reference in fp64: features, awkward sizes, any number of threads, what it refuses."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import assert_close
from phylon.ops.attention import AlibiBias, BucketBias, attention, dispatch
from phylon.ops.attention.call import AttentionCall
from phylon.ops.attention.native import _setting
from phylon.patterns import (
    BigBird,
    Causal,
    Full,
    Global,
    Pattern,
    Prefix,
    Records,
    SameBlock,
    Strided,
    SymmetricWindow,
    Window,
)
from phylon.spec import UserError

NATIVE, REFERENCE = dispatch.backends["native"], dispatch.backends["reference"]
pytestmark = pytest.mark.skipif(NATIVE.available() is not None, reason=f"native kernel: {NATIVE.available()}")

SIZES = [(1, 1), (1, 65), (7, 7), (63, 63), (64, 64), (65, 65), (100, 129), (129, 129), (129, 63)]
BANDS = [Full(), Causal(), Window(size=4), Window(size=70), SymmetricWindow(radius=3)]
PLANS = [
    Causal() | Prefix(),
    SymmetricWindow(radius=3) | Global(),
    Window(size=9) | Strided(stride=5),
    SameBlock(size=6) & Causal(),
    BigBird(block=8, n_heads=4, n_random=1),
]
FEATURES: dict[str, Any] = {
    "plain": lambda r: {},
    "scale": lambda r: {"scale": 0.3},
    "softcap": lambda r: {"softcap": 2.0},
    "sink": lambda r: {"sink": r(4)},
    "dropout": lambda r: {"dropout": 0.25, "seed": 2**32 - 5},
    "alibi": lambda r: {"bias": AlibiBias(r(4).abs() / 8)},
    "buckets": lambda r: {"bias": BucketBias(r(32, 4), 40, True)},
    "all": lambda r: {"softcap": 3.0, "sink": r(4), "dropout": 0.5, "seed": 1, "bias": BucketBias(r(16, 4), 20, False)},
}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def made(
    t: int, s: int, *, h: int = 4, k: int = 2, e: int = 12, ev: int = 20, b: int = 2, **more: Any
) -> AttentionCall:
    generator = torch.Generator().manual_seed(t * 1000 + s)
    shapes = ((b, t, h, e), (b, s, k, e), (b, s, k, ev))
    q, k_, v = (2 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return AttentionCall(q=q, k=k_, v=v, **more)


def feature(name: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    return FEATURES[name](lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64))


def as_dtype(call: AttentionCall, dtype: torch.dtype) -> tuple[AttentionCall, list[Tensor]]:
    """The call with fresh leaves, parameters of sink and bias in fp32 unless all is fp64; and the leaves."""
    leaf = lambda x, kind: x.detach().to(kind).clone().requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    changes: dict[str, Any] = {name: leaf(getattr(call, name), dtype) for name in ("q", "k", "v")}
    leaves = list(changes.values())
    if call.sink is not None:
        changes["sink"] = leaf(call.sink, wide)
        leaves.append(changes["sink"])
    if isinstance(call.bias, AlibiBias | BucketBias):
        field = "slopes" if isinstance(call.bias, AlibiBias) else "table"
        leaves.append(leaf(getattr(call.bias, field), wide))
        changes["bias"] = replace(call.bias, **{field: leaves[-1]})
    return replace(call, **changes), leaves


def both_ways(call: AttentionCall, dtype: torch.dtype, backend: Any = NATIVE) -> list[Tensor]:
    """The output and the gradient of every leaf under a fixed weighting."""
    call, leaves = as_dtype(call, dtype)
    out = backend.run(call)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


def compare(call: AttentionCall, what: str = "", tolerance: float = 1e-5) -> None:
    assert NATIVE.supports(as_dtype(call, torch.float32)[0]) is None
    exact = both_ways(call, torch.float64, REFERENCE)
    for i, (ours, theirs) in enumerate(zip(both_ways(call, torch.float32), exact, strict=True)):
        # The gradient of a bias adds up all scores, of either sign.
        limit = tolerance if i < 4 else 1e-4
        assert_close(ours, theirs.float(), limit, what=f"{what} result {i}", floor=1.0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("pattern", BANDS)
def test_sizes(size: tuple[int, int], pattern: Pattern) -> None:
    compare(made(*size, pattern=pattern))


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("size", [(7, 7), (65, 65), (100, 129), (129, 129)])
def test_features(name: str, size: tuple[int, int]) -> None:
    for pattern in (Full(), Causal(), Window(size=70)):
        compare(made(*size, pattern=pattern, **feature(name)), f"{name} {pattern}")


@pytest.mark.parametrize("pattern", PLANS)
@pytest.mark.parametrize("size", [63, 129])
def test_plans(pattern: Pattern, size: int) -> None:
    marks = torch.zeros(2, size, dtype=torch.int64)
    marks[0, :9], marks[1, [0, 40]] = 1, 1
    records = Records(torch.arange(size)[None], None, marks)
    for name in ("plain", "all"):
        compare(made(size, size, pattern=pattern, query=records, key=records, **feature(name)), f"{name}")


@pytest.mark.parametrize("name", ["plain", "alibi", "buckets", "dropout"])
def test_documents_and_padding(name: str) -> None:
    """Two packed rows, one padded on the left: masks, and biases from the positions that are given."""
    lengths = ([0] * 20 + [1] * 50 + [2] * 60, [1] * 100 + [2] * 7 + [0] * 23)
    segments = torch.tensor(lengths)
    positions = torch.stack(
        [torch.cat([torch.arange(int((row == x).sum())) for x in row.unique_consecutive()]) for row in segments]
    )
    records = Records(positions, segments)
    call = made(130, 130, pattern=Causal(), query=records, key=records, **feature(name))
    compare(call, name)
    poisoned = replace(
        call, **{n: getattr(call, n).masked_fill((segments == 0)[..., None, None], torch.nan) for n in "qkv"}
    )
    for clean, dirty in zip(both_ways(call, torch.float32), both_ways(poisoned, torch.float32), strict=True):
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize(
    "shape",
    [
        {"h": 2, "k": 2, "e": 5, "ev": 3},
        {"h": 3, "k": 1, "e": 64, "ev": 64},
        {"h": 2, "k": 1, "e": 96, "ev": 40},
        {"h": 1, "k": 1, "e": 200, "ev": 130, "b": 1},
        {"h": 4, "k": 2, "e": 32, "ev": 16, "b": 3},
    ],
)
def test_widths_and_groups(shape: dict[str, int]) -> None:
    compare(made(100, 129, pattern=Causal(), **shape))


def test_any_strides() -> None:
    """Slices of one projection, and heads before tokens: read as they lie, gradients included."""
    packed = torch.randn(2, 70, 3, 4, 16, dtype=torch.float64)
    q, k, v = packed.unbind(2)
    compare(AttentionCall(q=q, k=k, v=v, pattern=Causal()))
    swapped = [torch.randn(2, 4, 70, 16).transpose(1, 2).requires_grad_() for _ in range(3)]
    out = attention(*swapped, pattern=Causal(), backend="native")
    plain = attention(*(x.contiguous() for x in swapped), pattern=Causal(), backend="native")
    assert torch.equal(out, plain)
    for ours, theirs in zip(
        torch.autograd.grad(out.square().sum(), swapped),
        torch.autograd.grad(plain.square().sum(), swapped),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    last = torch.randn(2, 16, 4, 70).permute(0, 3, 2, 1)
    assert_close(attention(last, last, last, backend="native"), attention(last, last, last, backend="reference"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [{"h": 1, "k": 1, "b": 1}, {"h": 4, "k": 1, "b": 1}, {"h": 3, "k": 3, "b": 1}, {"b": 3}]
)
@pytest.mark.parametrize("name", ["plain", "all"])
def test_threads_and_repetition_move_no_bit(dtype: torch.dtype, shape: dict[str, int], name: str) -> None:
    """Few heads are split otherwise than many, and the sums must not notice."""
    generator = torch.Generator().manual_seed(2)
    options = feature(name) if shape.get("h", 4) == 4 else {"sink": torch.randn(shape["h"], generator=generator)}
    call = made(300, 300, e=16, ev=16, pattern=Window(size=150), **shape, **options)
    first: list[Tensor] = []
    for threads in (1, 2, 3, 2):
        torch.set_num_threads(threads)
        now = both_ways(call, dtype)
        first = first or now
        assert all(torch.equal(a, b) for a, b in zip(first, now, strict=True))


@pytest.mark.parametrize("name", FEATURES)
def test_low_precision(name: str) -> None:
    """bf16 in, bf16 out, f32 between: the error to fp64 on the same numbers is that of rounding the results."""
    call = made(100, 129, pattern=Causal(), **feature(name))
    call = replace(call, **{n: getattr(call, n).bfloat16().double() for n in "qkv"})
    exact = both_ways(call, torch.float64, REFERENCE)
    for i, (ours, theirs) in enumerate(zip(both_ways(call, torch.bfloat16), exact, strict=True)):
        error = float((ours.double() - theirs).norm() / theirs.norm())
        assert error < (3e-3 if i == 0 else 8e-3), f"{name} result {i}: {error}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in FEATURES if name not in ("dropout", "all")])
def test_few_queries_decode(name: str, dtype: torch.dtype) -> None:
    """Without a gradient a few queries take a path of their own: same answers, with masks and given positions."""
    for (t, s), shape in (((1, 700), {}), ((3, 520), {"k": 4, "e": 5, "ev": 70}), ((4, 513), {"k": 1})):
        for records in (False, True):
            segments = torch.ones(2, s, dtype=torch.int64)
            segments[0, : s // 2], segments[1, s // 3 :: 7] = 0, 0
            key = Records(torch.arange(s)[None].expand(2, s), segments)
            query = Records(key.positions[:, -t:], segments.new_ones(2, t))
            options = {"query": query, "key": key} if records else {}
            call = as_dtype(made(t, s, pattern=Window(size=600), **shape, **options, **feature(name)), dtype)[0]
            wide = as_dtype(call, torch.float64)[0]
            with torch.no_grad():
                ours, theirs = NATIVE.run(call), REFERENCE.run(wide)
                assert_close(ours.double(), theirs, 1e-5 if dtype == torch.float32 else 1e-2, what=f"{name} {records}")
                if not records:
                    continue
                hide = (segments == 0)[..., None, None]
                poisoned = replace(call, k=call.k.masked_fill(hide, torch.nan), v=call.v.masked_fill(hide, torch.nan))
                assert torch.equal(NATIVE.run(poisoned), ours)


def test_few_queries_that_see_nothing() -> None:
    key = Records(torch.arange(9)[None], torch.ones(1, 9, dtype=torch.int64))
    query = Records(torch.tensor([[9, 9]]), torch.tensor([[2, 1]]))
    for sink in (None, torch.ones(4)):
        call = as_dtype(made(2, 9, b=1, pattern=Causal(), query=query, key=key, sink=sink), torch.float32)[0]
        with torch.no_grad():
            out = NATIVE.run(call)
        assert not out[:, 0].any()
        assert bool(out[:, 1].any())


def test_large_scores_do_not_overflow() -> None:
    q, k, v = (x.float() for x in (made(70, 70).q * 300, made(70, 70).k, made(70, 70).v))
    assert_close(attention(q, k, v, backend="native"), attention(q, k, v, backend="reference"), 1e-4)


def test_a_visible_nan_is_not_hidden() -> None:
    call = as_dtype(made(70, 70, pattern=Causal()), torch.float32)[0]
    k = call.k.detach().clone()
    k[:, 30] = torch.nan
    out = NATIVE.run(replace(call, k=k))
    assert bool(out[:, 30:].isnan().all())
    assert not out[:, :30].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("t", "s"), [(70, 70), (1, 70), (2, 600)])
@pytest.mark.parametrize("which", ["q", "k"])
@pytest.mark.parametrize("sink", [None, torch.ones(4)])
def test_a_row_of_nan_scores_is_nan(dtype: torch.dtype, t: int, s: int, which: str, sink: Tensor | None) -> None:
    """Not zeros, as of a row that sees nothing: a network that has diverged must not look like one that has not."""
    call = as_dtype(made(t, s, b=1, pattern=Causal(), sink=sink), dtype)[0]
    # The NaN that GPUs write has every bit of the fraction set.
    nan = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32).to(dtype)
    x = getattr(call, which).detach().clone()
    x[:, -1 if which == "q" else slice(None), 0] = nan
    call = replace(call, **{which: x.requires_grad_()})
    out, expected = NATIVE.run(call), REFERENCE.run(call)
    assert bool(out[:, -1, 0].isnan().all())
    assert torch.equal(out.isnan(), expected.isnan())
    grad, wanted = (torch.autograd.grad(y.float().sum(), x)[0] for y in (out, expected))
    assert torch.equal(grad.isnan(), wanted.isnan())


class Slope:
    """A bias of the user's own."""

    n_heads = 1

    def scores(self, query: Records, key: Records) -> Tensor:
        return -(query.positions - key.positions).abs().float()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tap": lambda name, value: value}, "not visible"),
        ({"bias": Slope()}, "Slope is not known to depend on distances alone"),
        ({"dtype": torch.float64}, "it computes float32 and bfloat16, not float64"),
        ({"dtype": torch.float16}, "not float16"),
        ({"s": 0}, "an empty dimension"),
        ({"device": "meta"}, "it runs on CPUs, not on meta"),
    ],
)
def test_what_it_refuses(changes: dict[str, Any], reason: str) -> None:
    options = {"s": 5, "dtype": torch.float32, "device": "cpu"} | changes
    q, kv = (torch.zeros(1, n, 2, 4, dtype=options["dtype"], device=options["device"]) for n in (3, options["s"]))
    more = {name: value for name, value in changes.items() if name in ("tap", "bias")}
    with pytest.raises(UserError, match=reason):
        attention(q, kv, kv, backend="native", **more)


def test_no_second_derivative() -> None:
    q, k, v = as_dtype(made(20, 20), torch.float32)[1]
    out = attention(q, k, v, backend="native")
    with pytest.raises(UserError, match="no second derivative"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def test_positions_of_either_width() -> None:
    """A state keeps its keys' positions in int32, queries come in int64."""
    made = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, n, h, 8, generator=made) for n, h in ((5, 4), (9, 1), (9, 1)))
    query = Records(torch.tensor([[4, 5, 6, 7, 8], [0, 0, 0, 1, 2]]), torch.tensor([[1] * 5, [0, 0, 1, 1, 1]]))
    key = Records(torch.arange(9, dtype=torch.int32).expand(2, 9), torch.ones(2, 9, dtype=torch.int32))
    bias = AlibiBias(torch.tensor([0.5, 0.25, 0.125, 0.0625]))
    found = [
        attention(q, k, v, pattern=Causal(), query=query, key=key, bias=bias, backend=backend)
        for backend in ("native", "reference")
    ]
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


def far_apart() -> Records:
    """Two rows whose documents go on far away, in either order."""
    near = torch.arange(70)
    return Records(torch.stack([torch.where(near < 40, near, near + 10_000_000), 3_000_000 - 50_000 * near]))


@pytest.mark.parametrize("both_sides", [True, False])
@pytest.mark.parametrize("pattern", [Full(), Causal()])
def test_positions_far_apart_take_no_more_memory(pattern: Pattern, both_sides: bool) -> None:
    """A table of buckets ends where the last bucket begins, whatever fp32 rounds its edge to."""
    for furthest in (20, 128, 3_210):
        bias = BucketBias(feature("buckets")["bias"].table, furthest, both_sides)
        records = far_apart()
        call = made(70, 70, pattern=pattern, query=records, key=records, bias=bias)
        compare(call, f"{bias}")
        table = _setting(as_dtype(call, torch.float32)[0])[0]
        assert table is not None
        assert table.shape[1] <= 4 * furthest + 1
        ends, far = torch.tensor([bias.reach, -bias.reach]), torch.tensor([2**40, -(2**40)])
        assert torch.equal(bias.by_distance(ends), bias.by_distance(far))


def test_slopes_far_apart_are_left_to_tiles() -> None:
    records = far_apart()
    call = made(70, 70, pattern=Causal(), query=records, key=records, **feature("alibi"))
    call = as_dtype(call, torch.float32)[0]
    reason = "positions are up to 10,000,069 apart, too far for a table of AlibiBias"
    assert NATIVE.supports(call) == reason
    chosen = dispatch.pick(call)
    assert chosen.name not in ("native", "reference")
    for ours, theirs in zip(
        both_ways(call, torch.float32, chosen), both_ways(call, torch.float32, REFERENCE), strict=True
    ):
        assert_close(ours, theirs, floor=1.0)
    with torch.no_grad():
        few = replace(call, q=call.q[:, -2:], query=records.map(lambda field: field[:, -2:]))
        assert NATIVE.supports(few) is None, "a few queries have a bias of every pair"
        assert_close(NATIVE.run(few), REFERENCE.run(few), floor=1.0)
