"""Every attention backend against the reference: every feature, both passes, awkward sizes, poisoned memory.

A backend is covered by standing in the dispatch. What it refuses is skipped with its reason, so that the matrix of
``phylon list backends`` and this file speak of the same calls.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import assert_close
from phylon.ops.attention import AlibiBias, AttentionCall, BucketBias, dispatch
from phylon.ops.attention.flex import Flex, block_mask
from phylon.ops.attention.online import Online
from phylon.ops.attention.plan import tile_plan
from phylon.ops.attention.reference import Reference
from phylon.ops.dispatch import Backend
from phylon.ops.random import keep_mask
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
    Summary,
    SymmetricWindow,
    Window,
)

BACKENDS: dict[str, Backend[AttentionCall]] = {n: b for n, b in dispatch.backends.items() if n != "reference"}
BACKENDS["online, small tiles"] = Online(blocks=((32, 40),), scores=32 * 40 * 2)
SIZES = [(1, 1), (7, 7), (63, 63), (100, 100), (129, 129), (5, 40), (40, 33)]
FEW_SIZES = {"online, small tiles": SIZES[3:], "triton": [SIZES[1], *SIZES[5:]]}
"""Small tiles need some length; Triton's interpreter takes a second for twenty tiles."""


@dataclass
class Setting:
    """Inputs of a call, its options, and the tensors in the options that take gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    extra: list[Tensor] = field(default_factory=list)

    @property
    def inputs(self) -> list[Tensor]:
        return [self.q, self.k, self.v, *self.extra]

    def call(self) -> AttentionCall:
        return AttentionCall(q=self.q, k=self.k, v=self.v, **self.options)


def made(
    t: int, s: int, dtype: torch.dtype, *, h: int = 4, kv: int = 4, e: int = 16, ev: int = 16, **options: Any
) -> Setting:
    generator = torch.Generator().manual_seed(1000 * t + s)
    shapes = ((2, t, h, e), (2, s, kv, e), (2, s, kv, ev))
    q, k, v = ((1.5 * torch.randn(x, generator=generator)).to(dtype).requires_grad_() for x in shapes)
    return Setting(q, k, v, options)


def plain(**options: Any) -> Callable[[int, int, torch.dtype], Setting]:
    return lambda t, s, dtype: made(t, s, dtype, **options)


def with_parameter(name: str, make: Callable[[torch.dtype], Tensor], wrap: Callable[[Tensor], Any]) -> Any:
    def build(t: int, s: int, dtype: torch.dtype) -> Setting:
        parameter = make(dtype).requires_grad_()
        setting = made(t, s, dtype, pattern=Causal(), **{name: wrap(parameter)})
        setting.extra = [parameter]
        return setting

    return build


def rows(kind: str, n: int) -> Records:
    """Two rows of ``n`` tokens: padded, packed, cut and marked in the way of ``kind``."""
    index = torch.arange(n)
    third = max(1, n // 3)
    segments, marks = torch.ones(2, n, dtype=torch.int64), None
    if kind == "left":
        segments[0, : n - third] = 0
        segments[1, : n // 2] = 0
    elif kind == "right":
        segments[0, third:] = 0
    elif kind == "packed":
        segments[0] = index // third + 1
        segments[1] = (index // 5 % 3) * (index // 5 + 1)
    elif kind == "gaps":
        segments[:, 1::2] = 0
    elif kind == "padding row":
        segments[1] = 0
    elif kind == "marks":
        marks = ((index % 7 == 0) | (index < 2)).int().expand(2, -1) * torch.tensor([[1], [2]])
        return Records(index[None], None, marks)
    real = segments != 0
    starts = torch.ones_like(real)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    begun = torch.where(starts, index, 0).cummax(1).values
    return Records(torch.where(real, index - begun, 0), segments, marks)


def packed(kind: str, **options: Any) -> Callable[[int, int, torch.dtype], Setting]:
    """Records on both sides; where there are fewer queries than keys, they are the last of them, as after a state."""

    def build(t: int, s: int, dtype: torch.dtype) -> Setting:
        key = rows(kind, max(t, s))
        last = lambda n: key.map(lambda x: x[:, max(t, s) - n :])
        return made(t, s, dtype, query=key if t == s else last(t), key=key if t == s else last(s), **options)

    return build


ALIBI = torch.tensor([0.5, 0.25, 0.1, 0.0])
FEATURES: dict[str, Callable[[int, int, torch.dtype], Setting]] = {
    "full": plain(pattern=Full()),
    "causal": plain(pattern=Causal()),
    "scale": plain(pattern=Causal(), scale=0.4),
    "window": plain(pattern=Window(size=9)),
    "symmetric": plain(pattern=SymmetricWindow(radius=4)),
    "banded": plain(pattern=Window(size=6) | Strided(stride=5)),
    "fixed": plain(pattern=(SameBlock(size=8) | Summary(size=8, count=2)) & Causal()),
    "bigbird": plain(pattern=BigBird(block=8, n_heads=4, n_random=1)),
    "longformer": packed("marks", pattern=SymmetricWindow(radius=3) | Global()),
    "causal longformer": packed("marks", pattern=Window(size=4) | (Global() & Causal())),
    "prefix": packed("marks", pattern=Causal() | Prefix(mark=2)),
    "grouped": plain(pattern=Causal(), kv=2),
    "one key head": plain(pattern=Window(size=20), kv=1),
    "latent widths": plain(pattern=Causal(), e=24, ev=8),
    "odd widths": plain(pattern=Full(), e=7, ev=5),
    "left padding": packed("left", pattern=Causal()),
    "right padding": packed("right", pattern=Full()),
    "packed": packed("packed", pattern=Causal(), kv=2),
    "packed window": packed("packed", pattern=Window(size=7)),
    "packed bigbird": packed("packed", pattern=BigBird(block=4, n_heads=4, n_random=1)),
    "padding between": packed("gaps", pattern=Causal()),
    "a row of padding": packed("padding row", pattern=Causal()),
    "alibi": with_parameter("bias", lambda dtype: ALIBI.to(dtype), AlibiBias),
    "buckets": with_parameter(
        "bias", lambda dtype: torch.linspace(-1, 1, 32).view(8, 4).to(dtype), lambda table: BucketBias(table, 20, True)
    ),
    "alibi of one head": with_parameter("bias", lambda dtype: ALIBI[:1].to(dtype), AlibiBias),
    "buckets of one head": with_parameter(
        "bias", lambda dtype: torch.linspace(-1, 1, 8).view(8, 1).to(dtype), lambda table: BucketBias(table, 20, True)
    ),
    "packed alibi of one head": packed("packed", pattern=Causal(), bias=AlibiBias(ALIBI[:1])),
    "packed alibi": packed("packed", pattern=Causal(), bias=AlibiBias(ALIBI)),
    "softcap": plain(pattern=Causal(), softcap=1.5),
    "sink": with_parameter("sink", lambda dtype: torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=dtype), lambda sink: sink),
    "dropout": plain(pattern=Causal(), dropout=0.3, seed=7, kv=2),
    "all at once": packed(
        "packed", pattern=Window(size=30), kv=2, bias=AlibiBias(ALIBI), softcap=3.0, sink=torch.ones(4), dropout=0.2
    ),
}


def results(backend: Backend[AttentionCall], setting: Setting) -> list[Tensor]:
    """The output and every gradient under a fixed weighting."""
    out = backend.run(setting.call())
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), setting.inputs)]


def usable(name: str, call: AttentionCall) -> Backend[AttentionCall]:
    backend = BACKENDS[name]
    reason = backend.available() or backend.supports(call)
    if reason:
        pytest.skip(reason)
    return backend


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", BACKENDS)
def test_equals_the_reference(name: str, feature: str) -> None:
    """fp32 at every size; keys that nobody sees hold NaN."""
    for t, s in FEW_SIZES.get(name, SIZES):
        setting = FEATURES[feature](t, s, torch.float32)
        backend = usable(name, setting.call())
        mask = setting.call().mask()
        if mask is not None:
            unseen = ~mask.any(2).any(1).expand(2, s)
            with torch.no_grad():
                for x in (setting.k, setting.v):
                    x.masked_fill_(unseen[..., None, None], math.nan)
        expected = results(Reference(), setting)
        for what, ours, exact in zip(
            ("out", "dq", "dk", "dv", "more"), results(backend, setting), expected, strict=False
        ):
            assert_close(ours, exact, what=f"{t} x {s}: {what}", floor=1.0)
        if mask is not None:
            empty = ~mask.any(-1)
            blind = empty.expand(2, 4, t).transpose(1, 2)
            got = results(backend, setting)
            assert not got[0][blind].any(), "a query that sees nothing gives zero"
            assert not got[1][blind].any(), "and takes no gradient"


INVISIBLE = {
    **{
        n: FEATURES[n] for n in ("left padding", "padding between", "a row of padding", "packed bigbird", "all at once")
    },
    "grouped bigbird": lambda t, s, dtype: made(
        *(t, s, dtype),
        kv=2,
        pattern=BigBird(block=4, n_heads=4, n_random=1),
        query=Records(torch.arange(s // 2, s // 2 + t)[None], None, None),  # in the middle: heads differ in keys
        key=Records(torch.arange(s)[None], None, None),
    ),
    "capped padding": packed("left", pattern=Causal(), softcap=2.0, bias=AlibiBias(ALIBI)),
}


@pytest.mark.parametrize("feature", INVISIBLE)
@pytest.mark.parametrize("name", [*BACKENDS, "reference"])
def test_what_is_invisible_reaches_nothing(name: str, feature: str) -> None:
    """NaN in queries that see nothing, in the gradients of their outputs, and in keys that no query of a head sees."""
    for t, s in ((5, 40), (63, 63)) if feature != "grouped bigbird" else ((5, 40),):
        clean, setting = (INVISIBLE[feature](t, s, torch.float32) for _ in range(2))
        backend = Reference() if name == "reference" else usable(name, setting.call())
        mask = setting.call().mask()
        assert mask is not None
        mask, n_kv = mask.expand(2, 4, t, s), setting.k.shape[2]
        blind = ~mask.any(-1).transpose(1, 2)
        unseen = ~mask.any(2).unflatten(1, (n_kv, 4 // n_kv)).any(2).transpose(1, 2)
        hidden = [blind, unseen, unseen]
        assert any(bool(x.any()) for x in hidden), "the feature hides something"
        with torch.no_grad():
            for x, nowhere in zip((setting.q, setting.k, setting.v), hidden, strict=True):
                x.masked_fill_(nowhere[..., None], math.nan)
        draw = torch.randn(2, t, 4, setting.v.shape[3], generator=torch.Generator().manual_seed(1))
        out, exact = backend.run(setting.call()), Reference().run(clean.call())
        assert_close(out, exact, what="out", floor=1.0)
        ours = torch.autograd.grad(out, setting.inputs, draw.masked_fill(blind[..., None], math.nan))
        exact_grads = torch.autograd.grad(exact, clean.inputs, draw)
        for what, got, wanted, nowhere in zip("qkv", ours, exact_grads, hidden, strict=False):
            assert_close(got, wanted, what=f"{t} x {s}: d{what}", floor=1.0)
            assert not got[nowhere].any(), f"d{what} of what is invisible"


def as_written(call: AttentionCall) -> Tensor:
    """Attention in plain PyTorch, every step in the tensors' own dtype."""
    group = call.q.shape[2] // call.k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (call.k, call.v))
    scores = torch.einsum("bthe,bshe->bhts", call.q, k) * call.factor
    bias, mask = call.bias_scores(), call.mask()
    scores = scores if bias is None else scores + bias.to(scores.dtype)
    scores = scores if call.softcap is None else call.softcap * torch.tanh(scores / call.softcap)
    empty = torch.zeros((), dtype=torch.bool)
    if mask is not None:
        empty = ~mask.any(-1, keepdim=True)
        scores = scores.masked_fill(~(mask | empty), -math.inf)
    if call.sink is not None:
        scores = torch.cat([call.sink.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1), scores], -1)
    weights = scores.softmax(-1)[..., -call.k.shape[1] :].masked_fill(empty, 0)
    if call.dropout:
        weights = weights * keep_mask(call.seed, weights.shape, call.dropout, weights.device) / (1 - call.dropout)
    return torch.einsum("bhts,bshe->bthe", weights, v)


class AsWritten:
    name = "as written"

    def available(self) -> str | None:
        return None

    def supports(self, call: AttentionCall) -> str | None:
        return None

    def run(self, call: AttentionCall) -> Tensor:
        return as_written(call)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", BACKENDS)
def test_low_precision(name: str, feature: str) -> None:
    """Error to the fp32 reference at most twice that of plain bf16 PyTorch, three times for gradients."""
    for t, s in ((63, 63), (129, 129), (5, 40)) if name != "triton" else FEW_SIZES[name]:
        setting = FEATURES[feature](t, s, torch.bfloat16)
        backend = usable(name, setting.call())
        wide = FEATURES[feature](t, s, torch.float32)
        with torch.no_grad():
            for mine, theirs in zip(wide.inputs, setting.inputs, strict=True):
                mine.copy_(theirs)
        exact = results(Reference(), wide)
        naive = results(AsWritten(), setting)
        for i, (ours, theirs, truth) in enumerate(zip(results(backend, setting), naive, exact, strict=True)):
            assert ours.dtype == torch.bfloat16
            error, limit = (float((x.float() - truth).norm()) for x in (ours, theirs))
            # One rounding of the result is always allowed: a naive form may be exact by luck.
            floor = float(truth.norm()) * 2**-9
            assert error <= (2 if i == 0 else 3) * max(limit, floor), f"{t} x {s}: tensor {i}"


@pytest.mark.parametrize("name", BACKENDS)
def test_double(name: str) -> None:
    for feature in ("causal", "packed", "alibi", "sink", "dropout"):
        setting = FEATURES[feature](63, 63, torch.float64)
        backend = BACKENDS[name]
        if backend.available() or backend.supports(setting.call()):
            continue
        for ours, exact in zip(results(backend, setting), results(Reference(), setting), strict=True):
            assert_close(ours, exact, 1e-12, floor=1.0)


@pytest.mark.parametrize("name", BACKENDS)
def test_any_strides(name: str) -> None:
    """Views into a fused projection, as mixers may hand them in."""
    fused = torch.randn(2, 50, 3, 4, 16, generator=torch.Generator().manual_seed(0))
    q, k, v = (x.requires_grad_() for x in fused.unbind(2))
    setting = Setting(q, k, v, {"pattern": Causal()})
    dense = Setting(*(x.detach().contiguous().requires_grad_() for x in (q, k, v)), {"pattern": Causal()})
    backend = usable(name, setting.call())
    for ours, exact in zip(results(backend, setting), results(Reference(), dense), strict=True):
        assert_close(ours, exact, floor=1.0)


@pytest.mark.parametrize("name", BACKENDS)
def test_overlapping_keys(name: str) -> None:
    """Views that share memory, and whose tokens are no rows: the gradient has room of its own."""
    shared = [torch.randn(2, 60, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    grads = []
    for backend in (BACKENDS[name], Reference()):
        keys, queries = (x.clone().requires_grad_() for x in shared)
        k, q = keys.unfold(1, 16, 1)[:, :9, None], queries.unfold(1, 16, 2)[:, :9, None]
        call = AttentionCall(q=q.expand(2, 9, 2, 16), k=k, v=k, pattern=Causal())
        if backend is BACKENDS[name]:
            usable(name, call)
        grads.append(torch.autograd.grad(backend.run(call).square().sum(), (keys, queries)))
    for ours, exact in zip(*grads, strict=True):
        assert_close(ours, exact, floor=1.0)


@pytest.mark.parametrize("name", BACKENDS)
def test_only_what_is_asked_for_gets_a_gradient(name: str) -> None:
    q, k, v = (torch.randn(1, 20, 2, 8, requires_grad=i == 1) for i in range(3))
    backend = usable(name, AttentionCall(q=q, k=k, v=v))
    backend.run(AttentionCall(q=q, k=k, v=v, pattern=Causal())).sum().backward()
    assert k.grad is not None
    assert bool(k.grad.any())
    assert q.grad is None
    assert v.grad is None


@pytest.mark.parametrize("pattern", [Causal(), Window(size=9), BigBird(block=8, n_heads=4, n_random=1)], ids=repr)
def test_dropout_is_the_same_on_every_backend(pattern: Pattern) -> None:
    """One mask, a function of seed and index alone, whatever the tiles are."""
    setting = made(100, 100, torch.float32, pattern=pattern, dropout=0.5, seed=3)
    zeros = [Reference().run(setting.call())]
    for backend in BACKENDS.values():
        if not (backend.available() or backend.supports(setting.call())):
            zeros.append(backend.run(setting.call()))
    assert len(zeros) >= 3
    for out in zeros[1:]:
        assert_close(out, zeros[0])


@pytest.mark.parametrize("feature", FEATURES)
def test_flex_block_maps(feature: str) -> None:
    """FlexAttention's own form of the block map: its lists, and the rule for the elements of partial tiles."""
    for t, s in ((63, 63), (5, 40), (200, 200)):
        call = FEATURES[feature](t, s, torch.float32).call()
        if Flex().supports(replace(call, bias=None, q=call.q.to("meta"), k=call.k.to("meta"), v=call.v.to("meta"))):
            pytest.skip("refused")
        made = block_mask(call)
        index = [torch.arange(n).view([-1 if i == d else 1 for i in range(4)]) for d, n in enumerate((2, 4, t, s))]
        seen = call.mask()
        assert torch.equal(
            made.mask_mod(*index).expand(2, 4, t, s),
            torch.ones(2, 4, t, s, dtype=torch.bool) if seen is None else seen.expand(2, 4, t, s),
        )
        plan = tile_plan(call, 128, 128)
        kept = made.to_dense().flatten()
        place = plan.row_of * plan.n_key_tiles + plan.key_tiles
        assert kept.nonzero()[:, 0].tolist() == sorted(place.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("feature", ["softcap", "packed alibi", "left padding", "causal longformer", "grouped"])
def test_flex_forward(feature: str) -> None:
    """FlexAttention's unfused form, which runs anywhere; it compiles for seconds."""
    setting = FEATURES[feature](40, 40, torch.float32)
    with torch.no_grad():
        assert_close(Flex().run(setting.call()), Reference().run(setting.call()), floor=1.0)
