"""Every attention backend against plain arithmetic, in both directions, on awkward sizes, poisoned and empty rows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from helpers import assert_close
from phylon.ops.attention import attention, dispatch, explain
from phylon.ops.random import keep_mask
from phylon.patterns import BigBird, Causal, Document, Full, Pattern, Records, SymmetricWindow, Window
from phylon.spec import UserError

BACKENDS = sorted(name for name, backend in dispatch.backends.items() if backend.available() is None)
FAST = [name for name in BACKENDS if name != "reference"]


def qkv(
    t: int, s: int, *, b: int = 2, h: int = 4, k: int = 2, e: int = 8, ev: int = 8, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(t * 1000 + s)
    shapes = ((b, t, h, e), (b, s, k, e), (b, s, k, ev))
    return [(2 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_() for shape in shapes]


def plain(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Softmax attention written for one query at a time, in the tensors' own dtype."""
    group, out = q.shape[2] // k.shape[2], torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            for t in range(q.shape[1]):
                seen = slice(None) if allowed is None else allowed[b % len(allowed), h % allowed.shape[1], t]
                scores = k[b, seen, h // group] @ q[b, t, h] / math.sqrt(q.shape[3])
                if bias is not None:
                    scores = scores + bias[b % len(bias), h, t][seen]
                if len(scores):
                    out[b, t, h] = scores.softmax(0) @ v[b, seen, h // group]
    return out


def both_ways(inputs: list[Tensor], **options: object) -> list[Tensor]:
    """The result and the gradients of q, k and v under a fixed weighting."""
    out = attention(*inputs, **options)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out, *torch.autograd.grad((out * weights).sum(), inputs)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pattern", [Full(), Causal(), Window(size=3), SymmetricWindow(radius=2)])
def test_against_one_query_at_a_time(backend: str, pattern: Pattern) -> None:
    q, k, v = (x.detach().double() for x in qkv(5, 7, ev=6))
    records = Records(torch.arange(2, 7)[None]), Records(torch.arange(7)[None])
    allowed = pattern.allowed(records[0].as_queries(), records[1].as_keys()).expand(1, 1, 5, 7)
    try:
        out = attention(q, k, v, pattern=pattern, backend=backend)
    except UserError as error:
        pytest.skip(str(error))
    assert_close(out, plain(q, k, v, allowed), 1e-12)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("size", [1, 7, 63, 100])
@pytest.mark.parametrize("pattern", [Full(), Causal(), Window(size=4), SymmetricWindow(radius=3)])
@pytest.mark.parametrize("shape", [{"k": 4}, {"k": 1, "ev": 5}])
def test_fast_equals_reference(backend: str, size: int, pattern: Pattern, shape: dict[str, int]) -> None:
    for queries in {size, max(1, size - 5)}:
        inputs = qkv(queries, size, **shape)
        ours = both_ways(inputs, pattern=pattern, backend=backend)
        for mine, theirs in zip(ours, both_ways(inputs, pattern=pattern, backend="reference"), strict=True):
            assert_close(mine, theirs, what=f"{queries} x {size}", floor=1.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [7, 63, 100])
@pytest.mark.parametrize("pattern", [Full(), Causal(), Window(size=5)])
def test_low_precision_is_as_good_as_plain_pytorch(backend: str, size: int, pattern: Pattern) -> None:
    """Error to the fp32 reference at most twice plain bf16 PyTorch's, three times for gradients (design, section 3)."""
    inputs = qkv(size, size, k=4, dtype=torch.bfloat16)
    wide = [x.detach().float().requires_grad_() for x in inputs]
    exact = both_ways(wide, pattern=pattern, backend="reference")
    records = Records(torch.arange(size)[None])
    mask = pattern.allowed(records.as_queries(), records.as_keys())

    def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bthe,bshe->bhts", q, k) / math.sqrt(8)
        return torch.einsum("bhts,bshe->bthe", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)

    out = written(*inputs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    naive = [out, *torch.autograd.grad((out * weights).sum(), inputs)]
    for i, (ours, theirs, truth) in enumerate(
        zip(both_ways(inputs, pattern=pattern, backend=backend), naive, exact, strict=True)
    ):
        assert ours.dtype == torch.bfloat16
        error, limit = (float((x.detach().float() - truth.detach()).norm()) for x in (ours, theirs))
        assert error <= (2 if i == 0 else 3) * limit


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("empty", ["segments", "positions"])
def test_a_query_that_sees_nothing(backend: str, empty: str) -> None:
    """Case 18: 2 queries, 3 keys, the second row sees nothing: zero, with zero gradient, whatever the keys hold."""
    inputs = qkv(2, 3, b=1)
    if empty == "segments":
        query = Records(torch.tensor([[2, 0]]), torch.tensor([[1, 4]]))
        key = Records(torch.arange(3)[None], torch.tensor([[1, 1, 1]]))
    else:
        query, key = Records(torch.tensor([[2, -1]])), Records(torch.arange(3)[None])
    out, dq, dk, dv = both_ways(inputs, pattern=Causal(), query=query, key=key, backend=backend)
    assert not out[:, 1].any()
    assert not dq[:, 1].any()
    first = [inputs[0][:, :1].detach().requires_grad_(), *inputs[1:]]
    only = both_ways(first, backend=backend)
    weights = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(1))
    only[1:] = torch.autograd.grad((attention(*first, backend=backend) * weights[:, :1]).sum(), first)
    for ours, expected in ((out[:, :1], only[0]), (dq[:, :1], only[1]), (dk, only[2]), (dv, only[3])):
        assert_close(ours, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_queries_than_keys(backend: str) -> None:
    """Aligned bottom-right, the first queries stand before every key."""
    out, dq, _, _ = both_ways(qkv(5, 3), pattern=Causal(), backend=backend)
    assert not out[:, :2].any()
    assert not dq[:, :2].any()
    assert bool((out[:, 2:].abs().amax((0, 2, 3)) > 0).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_window_is_the_token_and_the_three_before(backend: str) -> None:
    """Case 19: at w = 4, three back matters and four back does not."""
    q, k, v = (x.detach() for x in qkv(9, 9, b=1))
    base = attention(q, k, v, pattern=Window(size=4), backend=backend)
    for back, matters in ((0, True), (3, True), (4, False), (8, False)):
        moved_k, moved_v = k.clone(), v.clone()
        moved_k[:, 8 - back] += 1
        moved_v[:, 8 - back] += 1
        moved = attention(q, moved_k, moved_v, pattern=Window(size=4), backend=backend)
        assert bool((moved[:, 8] != base[:, 8]).any()) is matters, back


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pattern", [Full(), Causal(), Window(size=3)])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_padding_may_hold_anything(backend: str, pattern: Pattern, poison: float) -> None:
    """Keys and values nobody may look at reach neither the output nor a gradient, NaN included."""
    inputs = qkv(7, 7)
    segments = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 2, 2, 0, 0]])
    positions = torch.tensor([[0, 0, 0, 1, 2, 3, 4], [0, 1, 2, 0, 1, 0, 0]])
    records = Records(positions, segments)
    options = {"pattern": pattern, "query": records, "key": records, "backend": backend}
    clean = both_ways(inputs, **options)
    assert not clean[0][segments == 0].any()
    poisoned = [inputs[0]] + [
        x.detach().masked_fill((segments == 0)[..., None, None], poison).requires_grad_() for x in inputs[1:]
    ]
    for ours, expected in zip(both_ways(poisoned, **options), clean, strict=True):
        assert_close(ours, expected)


class Slope:
    """A score bias with a parameter: minus the distance times a slope per head, ALiBi's form."""

    n_heads = 1

    def __init__(self) -> None:
        self.slope = torch.tensor([0.5, 0.25, 0.1, 0.0], requires_grad=True)

    def scores(self, query: Records, key: Records) -> Tensor:
        return -(query.positions - key.positions).abs() * self.slope[:, None, None]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pattern", [Full(), Causal()])
def test_score_bias(backend: str, pattern: Pattern) -> None:
    inputs, bias = qkv(5, 7), Slope()
    queries, keys = torch.arange(2, 7), torch.arange(7)
    added = -(queries[:, None] - keys).abs() * bias.slope[:, None, None]
    seen = keys <= queries[:, None] if isinstance(pattern, Causal) else torch.ones(5, 7, dtype=torch.bool)
    expected = plain(*inputs, seen[None, None], added[None])
    try:
        out = attention(*inputs, pattern=pattern, bias=bias, backend=backend)
    except UserError as error:
        pytest.skip(str(error))
    assert_close(out, expected)
    ours, theirs = (torch.autograd.grad(x.square().sum(), bias.slope, retain_graph=True)[0] for x in (out, expected))
    assert_close(ours, theirs, 1e-4)


def test_softcap_sink_and_dropout_on_the_reference() -> None:
    q, k, v = (x.detach().double() for x in qkv(3, 4, k=4))
    scores = torch.einsum("bthe,bshe->bhts", q, k) / math.sqrt(8)
    mix = lambda weights: torch.einsum("bhts,bshe->bthe", weights, v)
    assert_close(attention(q, k, v, softcap=2.0), mix((2 * torch.tanh(scores / 2)).softmax(-1)), 1e-12)
    sink = torch.tensor([0.3, -1.0, 4.0, 0.0], dtype=torch.float64)
    weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sink.exp()[:, None, None])
    assert_close(attention(q, k, v, sink=sink), mix(weights), 1e-12)
    keep = keep_mask(5, (2, 4, 3, 4), 0.25, q.device)
    assert_close(attention(q, k, v, dropout=0.25, seed=5), mix(scores.softmax(-1) * keep / 0.75), 1e-12)
    assert_close(attention(q, k, v, scale=0.1), mix((scores * math.sqrt(8) * 0.1).softmax(-1)), 1e-12)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"softcap": 2.0}, "softcap"),
        ({"sink": torch.zeros(4)}, "sink"),
        ({"dropout": 0.1}, "counter-based"),
        ({"tap": lambda name, value: value}, "not visible"),
    ],
)
def test_a_refusal_has_a_reason(options: dict[str, object], reason: str) -> None:
    inputs = qkv(3, 3)
    with pytest.raises(UserError, match=f"attention backend 'sdpa' cannot run this call: .*{reason}"):
        attention(*inputs, backend="sdpa", **options)
    lines = {line.backend: line for line in explain(*inputs, **options)}
    assert reason in (lines["sdpa"].reason or "")
    chosen = next(line.backend for line in lines.values() if line.chosen)
    assert chosen == next(line.backend for line in lines.values() if line.reason is None) != "sdpa"
    assert (chosen == "reference") is ("tap" in options)
    assert torch.isfinite(attention(*inputs, **options)).all()


def test_explain_takes_what_attention_takes() -> None:
    inputs = qkv(3, 3)
    assert explain(*inputs, pattern=None) == explain(*inputs)
    assert [line.backend for line in explain(*inputs, backend="online") if line.chosen] == ["online"]
    with pytest.raises(UserError, match="unknown attention backend 'onlin'"):
        explain(*inputs, backend="onlin")


def test_explain_and_force() -> None:
    inputs = qkv(3, 3)
    lines = {line.backend: line for line in explain(*inputs, pattern=Causal())}
    assert list(lines) == list(dispatch.backends)
    first = next(name for name, line in lines.items() if line.reason is None)
    assert [name for name, line in lines.items() if line.chosen] == [first]
    assert lines["online"].reason is lines["reference"].reason is None
    if not torch.cuda.is_available():
        assert "no backward pass on CPUs" in (lines["flex"].reason or "")
    with dispatch.force("reference"):
        assert [line.backend for line in explain(*inputs) if line.chosen] == ["reference"]
    assert dispatch.forced is None
    with pytest.raises(UserError, match=r"unknown attention backend 'sdp' \(did you mean 'sdpa'\?\)"):
        attention(*inputs, backend="sdp")
    with pytest.raises(UserError, match="unknown attention backend"), dispatch.force("flash"):
        pass


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[0], k, v), "takes (B, T, H, E) tensors, got 3, 4 and 4 dimensions"),
        (lambda q, k, v: (q[:1], k, v), "shapes do not fit"),
        (lambda q, k, v: (q, k, v[:, :2]), "shapes do not fit"),
        (lambda q, k, v: (q[..., :4], k, v), "shapes do not fit"),
        (lambda q, k, v: (q[:, :, :3], k, v), "3 query heads are no multiple of 2 key heads"),
        (lambda q, k, v: (q, k, v.double()), "dtypes differ"),
        (lambda q, k, v: tuple(x.detach().long() for x in (q, k, v)), "floating point numbers, got torch.int64"),
        (lambda q, k, v: (q.detach().to("meta"), k, v), "on different devices"),
    ],
)
def test_wrong_tensors_are_refused_in_one_line(change: object, message: str) -> None:
    with pytest.raises(UserError) as caught:
        attention(*change(*qkv(3, 3)))  # type: ignore[operator]
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    for options, message in (
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
        ({"sink": torch.zeros(3)}, r"sink must be \(4,\), one a head, got \(3,\)"),
        ({"key": Records(torch.arange(4)[None])}, "key records of 4 tokens do not fit 3 of the tensor"),
        ({"pattern": BigBird(block=2, n_heads=3)}, "the pattern is for 3 heads, the call has 4"),
    ):
        with pytest.raises(UserError, match=message):
            attention(*qkv(3, 3), **options)


@given(st.integers(1, 12), st.integers(0, 10_000))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_without_positions_order_is_nothing(size: int, seed: int) -> None:
    q, k, v = (x.detach().double() for x in qkv(size, size))
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    assert_close(attention(q[:, order], k[:, order], v[:, order]), attention(q, k, v)[:, order], 1e-12)


@given(st.integers(1, 12), st.integers(0, 3))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_a_wide_window_is_causal_and_groups_of_one_are_heads(size: int, extra: int) -> None:
    q, k, v = (x.detach() for x in qkv(size, size))
    causal = attention(q, k, v, pattern=Causal())
    assert_close(attention(q, k, v, pattern=Window(size=size + extra)), causal)
    if size > 1:
        narrow = [attention(q, k, v, pattern=Window(size=size - 1), backend=name) for name in BACKENDS]
        assert all(bool((out[:, -1] != causal[:, -1]).any()) for out in narrow)
        assert_close(narrow[0], narrow[-1])
    repeated = (x.repeat_interleave(2, 2) for x in (k, v))
    assert_close(attention(q, *repeated, pattern=Causal()), causal)


@pytest.mark.parametrize("backend", BACKENDS)
@given(data=st.data())
@settings(max_examples=10, deadline=None, derandomize=True)
def test_any_records(backend: str, data: st.DataObject) -> None:
    """Any positions and segments, in any order: keys are found by record, not by place."""
    row = lambda n, low, high: data.draw(st.lists(st.integers(low, high), min_size=n, max_size=n))
    t, s = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    sides = [Records(torch.tensor([row(n, 0, 5)]), torch.tensor([row(n, 0, 2)])) for n in (t, s)]
    pattern = data.draw(st.sampled_from([Full(), Causal(), Window(size=2), Causal() & SymmetricWindow(radius=1)]))
    q, k, v = (x.detach() for x in qkv(t, s, b=1))
    allowed = (pattern & Document()).allowed(sides[0].as_queries(), sides[1].as_keys()).expand(1, 1, t, s)
    ours = attention(q, k, v, pattern=pattern, query=sides[0], key=sides[1], backend=backend)
    assert_close(ours, plain(q, k, v, allowed))


def test_reference_agrees_with_pytorch() -> None:
    q, k, v = qkv(6, 6, k=4)
    theirs = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
    assert_close(attention(q, k, v, pattern=Causal(), backend="reference"), theirs)


@pytest.mark.parametrize("backend", ["reference", "online"])
@pytest.mark.parametrize("with_sink", [False, True])
def test_large_scores_cost_no_accuracy(backend: str, with_sink: bool) -> None:
    """Near ties at scores of ten thousand: from a rounded log-sum-exp the weights would be off by 5e-4."""
    generator = torch.Generator().manual_seed(0)
    q, k = ((2 * torch.randn(1, 200, 2, 16, generator=generator)).round().double() for _ in range(2))
    v, sink = torch.randn(1, 200, 2, 16, generator=generator).double(), torch.tensor([3e4, -5.0]).double()
    leaves = (5000 * q, k, v, sink)
    exact, single = (
        [x.detach().to(dtype).requires_grad_() for x in leaves] for dtype in (torch.float64, torch.float32)
    )
    for inputs, name in ((exact, "reference"), (single, backend)):
        out = attention(*inputs[:3], pattern=Causal(), backend=name, sink=inputs[3] if with_sink else None)
        out.square().sum().backward()
        inputs.append(out)
    for mine, right in zip(single, exact, strict=True):
        mine, right = (x.grad if x.is_leaf else x.detach() for x in (mine, right))
        if right is not None and float(right.norm()):
            assert float((mine - right).norm() / right.norm()) < 1e-5  # type: ignore[operator]
