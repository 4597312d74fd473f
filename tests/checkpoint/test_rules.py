"""Every rule: the layout it stands for, and back bit for bit."""

from collections.abc import Mapping, Sequence

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from phylon.checkpoint import (
    Concat,
    Fused,
    Layout,
    MemorySource,
    PermuteRotary,
    Rename,
    Reshaped,
    Stack,
    Tied,
    Transpose,
    interleaved,
    rotary_rows,
)

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
small = st.integers(1, 5)
quick = settings(max_examples=25, deadline=None)


def any_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bit patterns whatever, NaNs among them."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).view(shape)


def bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple]:
    return {
        n: (t.dtype, tuple(t.shape), t.contiguous().view(-1).view(torch.uint8).tolist()) for n, t in tensors.items()
    }


def both_ways(rules: Sequence, ours: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Ours to theirs, to ours, to theirs: nothing changes. Returns theirs."""
    layout = Layout(rules)
    theirs = dict(layout.unmap(ours))
    source = MemorySource(theirs)
    plan = layout.plan(source.tensors, {n: tuple(t.shape) for n, t in ours.items()})
    loaded = {n: torch.full_like(t, 3) for n, t in ours.items()}
    layout.load(plan, source, loaded)
    assert bits(loaded) == bits(ours)
    assert bits(dict(layout.unmap(loaded))) == bits(theirs)
    return theirs


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bits({"x": a}) == bits({"x": b})


@quick
@given(dtype=DTYPES, rows=small, columns=small)
def test_rename_transpose_tied(dtype, rows, columns):
    x, y, b = any_bits(dtype, rows, columns), any_bits(dtype, rows, columns), any_bits(dtype, columns)
    theirs = both_ways(
        [Rename("e", "x"), Transpose("h.{i}.c.{p}", "up.{i}.{p}"), Tied("wte", "emb", "head")],
        {"x": x, "up.7.weight": y, "up.7.bias": b, "emb": x},
    )
    assert theirs.keys() == {"e", "h.7.c.weight", "h.7.c.bias", "wte"}
    assert same(theirs["h.7.c.weight"], y.T)
    assert same(theirs["h.7.c.bias"], b)


@quick
@given(dtype=DTYPES, sizes=st.lists(small, min_size=1, max_size=4), width=small, transpose=st.booleans())
def test_concat(dtype, sizes, width, transpose):
    parts = {f"p{k}.0.{p}": any_bits(dtype, n, *w) for k, n in enumerate(sizes) for p, w in PARTS(width)}
    rule = Concat("h.{i}.all.{p}", tuple(f"p{k}.{{i}}.{{p}}" for k in range(len(sizes))), sizes, transpose=transpose)
    theirs = both_ways([rule], parts)
    whole = torch.cat([parts[f"p{k}.0.weight"] for k in range(len(sizes))])
    assert same(theirs["h.0.all.weight"], whole.T if transpose else whole)
    assert same(theirs["h.0.all.bias"], torch.cat([parts[f"p{k}.0.bias"] for k in range(len(sizes))]))


def PARTS(width: int) -> tuple:
    return ("weight", (width,)), ("bias", ())


@quick
@given(dtype=DTYPES, heads=small, groups=small, head_dim=small, width=small)
def test_interleaved_heads(dtype, heads, groups, head_dim, width):
    """NeoX and Bloom, (H, 3, E); Falcon, (K, H / K + 2, E)."""
    E, K, H = head_dim, heads, heads * groups
    q, k, v = (any_bits(dtype, n * E, width) for n in (H, K, K))
    names = ("q", "k", "v")
    falcon = Fused("qkv", names, interleaved(K, (groups * E, E, E)))
    x = both_ways([falcon], dict(zip(names, (q, k, v), strict=True)))["qkv"].view(K, groups + 2, E, width)
    assert same(x[:, :-2].reshape(H * E, width), q)
    assert same(x[:, -2].reshape(K * E, width), k)
    assert same(x[:, -1].reshape(K * E, width), v)
    neox = Fused("qkv", names, interleaved(K, (E, E, E)))
    q = q[: K * E].clone()
    x = both_ways([neox], dict(zip(names, (q, k, v), strict=True)))["qkv"].view(K, 3, E, width)
    assert same(x[:, 0].reshape(K * E, width), q)
    assert same(x[:, 2].reshape(K * E, width), v)


@quick
@given(dtype=DTYPES, experts=small, rows=small, width=small, transpose=st.booleans())
def test_stack(dtype, experts, rows, width, transpose):
    x = any_bits(dtype, experts, rows, width)
    theirs = both_ways([Stack("l.{i}.experts.{e}.w1.weight", "b.{i}.up.weight", transpose)], {"b.2.up.weight": x})
    assert list(theirs) == [f"l.2.experts.{e}.w1.weight" for e in range(experts)]
    for e in range(experts):
        assert same(theirs[f"l.2.experts.{e}.w1.weight"], x[e].T if transpose else x[e])


def test_fused_experts_along_the_second_dimension():
    """Stacked gate and up in turn, stored (X, D, 2F): transposed, then row by row."""
    gate, up = torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    rule = Fused("gu", ("gate", "up"), interleaved(4, (1, 1)), dim=1, transpose=True)
    x = both_ways([rule], {"gate": gate, "up": up})["gu"]
    assert x.shape == (3, 5, 8)
    assert same(x[:, :, ::2], gate.transpose(1, 2))
    assert same(x[:, :, 1::2], up.transpose(1, 2))


def test_reshaped():
    """ViT's patch convolution as a matrix; DBRX's experts, (X F, D); two parts of one vector."""
    rules = [
        Reshaped("conv.weight", "patch.weight", lambda t: t.flatten(1), lambda t: t.view(-1, 3, 2, 2)),
        Reshaped("w1", "up", lambda t: t.view(4, -1, 6), lambda t: t.flatten(0, 1)),
        Reshaped("both", ("a", "b"), lambda t: (t[0], t[1]), lambda a, b: torch.stack((a, b))),
    ]
    ours = {"patch.weight": (5, 12), "up": (4, 2, 6), "a": (3,), "b": (3,)}
    theirs = both_ways(rules, {n: any_bits(torch.bfloat16, *shape) for n, shape in ours.items()})
    assert {n: tuple(t.shape) for n, t in theirs.items()} == {"conv.weight": (5, 3, 2, 2), "w1": (8, 6), "both": (2, 3)}


def rotate(x_THE: torch.Tensor, rotary_dim: int, pairs: str) -> torch.Tensor:
    """Rotary positions 0, 1, … on the first ``rotary_dim`` of each head, written from the paper's 2 x 2 rotations."""
    T, half = x_THE.shape[0], rotary_dim // 2
    angle = torch.arange(T)[:, None] / 100 ** (torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    out = x_THE.clone()
    for j in range(half):
        a, b = (2 * j, 2 * j + 1) if pairs == "interleaved" else (j, j + half)
        out[..., a] = x_THE[..., a] * cos[..., j] - x_THE[..., b] * sin[..., j]
        out[..., b] = x_THE[..., a] * sin[..., j] + x_THE[..., b] * cos[..., j]
    return out


@pytest.mark.parametrize("share", [0.25, 1.0])
@pytest.mark.parametrize("start", [0, 2])
def test_case_21_equal_scores_in_both_layouts(share, start):
    H, E, D, T = 3, 8 + start, 12, 5
    R = int(share * 8)
    torch.manual_seed(0)
    x = torch.randn(T, D, dtype=torch.float64)
    ours = {f"{n}.{p}": torch.randn(H * E, *w, dtype=torch.float64) for n in "qk" for p, w in PARTS(D)}
    if start:
        rules = [Fused(f"{n}.{{p}}", (f"{n}.{{p}}",), (rotary_rows(H, E, R, start),)) for n in "qk"]
    else:
        rules = [PermuteRotary(f"{n}.{{p}}", f"{n}.{{p}}", H, E, R) for n in "qk"]
    theirs = both_ways(rules, ours)

    def scores(weights: Mapping[str, torch.Tensor], pairs: str) -> torch.Tensor:
        made = []
        for n in "qk":
            y = (x @ weights[f"{n}.weight"].T + weights[f"{n}.bias"]).view(T, H, E)
            made.append(torch.cat((y[..., :start], rotate(y[..., start:], R, pairs)), -1))
        return torch.einsum("the,she->hts", *made)

    ref = scores(theirs, "interleaved")
    assert torch.allclose(scores(ours, "half"), ref, rtol=1e-12, atol=1e-12)
    assert (scores(theirs, "half") - ref).abs().max() > 0.1 or R == 2


def test_composed_rows():
    """A fused qkv, per head, whose q is also stored for interleaved pairs."""
    H, E = 3, 4
    q, k = interleaved(H, (E, E))
    rule = Fused("qk", ("q", "k"), (q[rotary_rows(H, E)], k[rotary_rows(H, E)]))
    ours = {n: torch.arange(H * E) + 100 * s for s, n in enumerate("qk")}
    x = both_ways([rule], ours)["qk"].view(H, 2, E)
    assert x[1].tolist() == [[4, 6, 5, 7], [104, 106, 105, 107]]


def test_rows_must_be_used_once():
    with pytest.raises(AssertionError, match="not used once"):
        Fused("x", ("a", "b"), (torch.tensor([0, 1]), torch.tensor([1, 2])))
    with pytest.raises(AssertionError, match="2 rows"):
        Fused("x", ("a",), (torch.tensor([1, 0]),)).their_shape([(3, 4)])


def test_gathering_in_many_chunks(monkeypatch):
    monkeypatch.setattr("phylon.checkpoint.rules.SERIAL", 30)
    both_ways([PermuteRotary("q", "q", 3, 8)], {"q": any_bits(torch.float32, 24, 7)})
    both_ways([Fused("g", ("a", "b"), interleaved(5, (1, 1)), dim=1)], {n: torch.randn(3, 5, 6) for n in "ab"})
