"""Calls whose parts do not fit are refused in one line: kernels read and write by these shapes."""

import math

import pytest
import torch

from phylon.families import family
from phylon.model import build
from phylon.ops.attention import AttentionCall, attention
from phylon.ops.attention.bias import AlibiBias, BucketBias
from phylon.ops.experts import ExpertWeights, experts
from phylon.ops.feedforward import feedforward
from phylon.ops.linear import linears
from phylon.ops.loss import cross_entropy, linear_cross_entropy
from phylon.ops.norm import add_rms_norm, layer_norm, rms_norm
from phylon.ops.rotary.call import RotaryCall
from phylon.ops.scan import causal_conv, selective_scan, ssd_scan
from phylon.patterns import Causal, Records
from phylon.spec import UserError


def records(rows: int = 1, n: int = 6, **more: torch.Tensor) -> Records:
    return Records(torch.arange(n).expand(rows, n), **more)


@pytest.mark.parametrize("far", [2**31 - 3, -(2**31) - 3])
def test_positions_beyond_32_bits_are_refused_and_never_cut(far: int) -> None:
    given = Records(torch.arange(70)[None] + far, torch.ones(1, 70, dtype=torch.int64))
    q, k, v = (torch.randn(1, 70, 2, 8) for _ in range(3))
    with pytest.raises(UserError, match=r"positions must be below 2\^31, got "):
        attention(q, k, v, pattern=Causal(), query=given, key=given, backend="online")
    model = build(family("llama").cases()[0], device="cpu")
    with pytest.raises(UserError, match=r"positions must be below 2\^31, got "):
        model(torch.zeros(1, 70, dtype=torch.int64), positions=given.positions)


def test_an_empty_tail_lies_anyhow() -> None:
    x, tail = torch.randn(1, 3, 16), torch.randn(1, 0, 32)[..., ::2]
    y, _ = causal_conv(x, torch.ones(16, 1), tail=tail)
    assert torch.equal(y, x)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"query": records(2)}, "query records of 2 rows do not fit 4"),
        ({"key": records(5)}, "key records of 5 rows"),
        ({"query": records(segments=torch.ones(1, 3, dtype=torch.int64))}, "query records of 3 tokens do not fit 6"),
        ({"key": records(marks=torch.ones(3, 6, dtype=torch.int64))}, "key records of 3 rows"),
        ({"bias": AlibiBias(torch.rand(3))}, "the bias is for 3 heads, the call has 2"),
        ({"bias": BucketBias(torch.rand(8, 4), 20, True)}, "the bias is for 4 heads"),
        ({"softcap": 0.0}, "softcap must be above 0"),
        ({"softcap": -5.0}, "softcap must be above 0"),
    ],
)
def test_attention(given: dict, words: str) -> None:
    q, k, v = (torch.randn(4, 6, 2, 8) for _ in range(3))
    with pytest.raises(UserError, match=words):
        AttentionCall(q=q, k=k, v=v, pattern=Causal(), **given)


def test_heads_of_no_width() -> None:
    with pytest.raises(UserError, match="width of 0"):
        AttentionCall(q=torch.zeros(1, 2, 2, 0), k=torch.zeros(1, 2, 2, 0), v=torch.zeros(1, 2, 2, 3))


@pytest.mark.parametrize(
    ("cosine", "sine"),
    [((1, 5, 1, 4), (1, 5, 1, 4)), ((1, 6, 1, 5), (1, 6, 1, 5)), ((2, 6, 1, 4), (1, 6, 1, 4)), ((1, 1, 1, 4),) * 2],
)
def test_rotary_tables(cosine: tuple, sine: tuple) -> None:
    with pytest.raises(UserError, match=r"rotary tables|of one shape"):
        RotaryCall(torch.zeros(2, 6, 3, 8), torch.zeros(cosine), torch.zeros(sine))
    with pytest.raises(UserError, match="of one shape and dtype"):
        RotaryCall(torch.zeros(2, 6, 3, 8), torch.zeros(1, 6, 1, 4), torch.zeros(1, 6, 1, 4).bfloat16())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"targets": torch.full((6,), 11)}, "target id 11 is out of range: the head has 11"),
        ({"targets": torch.full((6,), -1)}, "target id -1 is out of range"),
        ({"targets": torch.zeros(5, dtype=torch.int64)}, "they must agree"),
        ({"targets": torch.zeros(6)}, "must be int64"),
        ({"bias": torch.zeros(3)}, "do not fit"),
        ({"label_smoothing": 2.0}, "label_smoothing must be"),
        ({"softcap": 0.0}, "softcap must be above 0"),
        ({"softcap": -5.0}, "softcap must be above 0"),
        ({"softcap": math.nan}, "softcap must be above 0"),
        ({"weights": torch.ones(5)}, "weights are"),
    ],
)
def test_losses(changes: dict, words: str) -> None:
    given = {"targets": torch.zeros(6, dtype=torch.int64)} | changes
    with pytest.raises(UserError, match=words):
        linear_cross_entropy(torch.randn(6, 4), torch.randn(11, 4), **given)


def test_a_masked_vocabulary_has_a_loss() -> None:
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(6, 4), torch.randn(11, 4), torch.arange(6)
    bias = torch.zeros(11)
    bias[9:] = -math.inf
    found = linear_cross_entropy(hidden, weight, targets, bias=bias).sum
    torch.testing.assert_close(found, cross_entropy(hidden @ weight.T + bias, targets).sum)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape)


def scanned(**changes: torch.Tensor) -> object:
    tokens, maps = ones(2, 9, 8), ones(2, 9, 4)
    return selective_scan(
        **({"x": tokens, "dt": tokens, "A": -ones(8, 4), "B": maps, "C": maps, "D": ones(8)} | changes)
    )


def routed(chosen: torch.Tensor | None = None, **changes: torch.Tensor | None) -> object:
    weights = {"up": ones(4, 50, 300), "down": ones(4, 300, 50), "gate": ones(4, 50, 300)} | changes
    chosen = torch.zeros(64, 2, dtype=torch.int64) if chosen is None else chosen
    return experts(X, chosen, ones(64, 2), ExpertWeights(**weights))  # type: ignore[arg-type]


def whole(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.int64)


X, UP, DOWN = ones(64, 300), (ones(50, 300), None), (ones(300, 50), None)
SSD = (whole(2, 9, 4, 3), ones(2, 9, 4), -ones(4), ones(2, 9, 2, 5), ones(2, 9, 2, 5), ones(4))
UNFIT = {
    "norm, width": (lambda: rms_norm(X, ones(299), 1e-5), r"weight is \(299,\), expected \(300,\)"),
    "norm, weight that would spread": (lambda: rms_norm(X.bfloat16(), ones(64, 1), 1e-5), r"weight is \(64, 1\)"),
    "norm, bias": (lambda: layer_norm(X, ones(300), ones(1), 1e-5), r"bias is \(1,\)"),
    "norm, sum": (lambda: add_rms_norm(X, ones(1, 300), None, 1e-5), r"added is \(1, 300\)"),
    "norm, whole numbers": (lambda: rms_norm(whole(64, 300), None, 1e-5), "x is int64"),
    "norm, a scalar": (lambda: rms_norm(torch.tensor(1.0), None, 1e-5), "with D at least 1"),
    "norm, no width": (lambda: rms_norm(ones(3, 0), None, 1e-5), "with D at least 1"),
    "feedforward, up": (lambda: feedforward(X, (ones(50, 299), None), DOWN, activation="relu"), "up is"),
    "feedforward, down": (lambda: feedforward(X, UP, (ones(300, 51), None), activation="relu"), "down is"),
    "feedforward, gate": (lambda: feedforward(X, UP, DOWN, (ones(1, 300), None), activation="silu"), "gate is"),
    "feedforward, short bias": (lambda: feedforward(X, (UP[0], ones(49)), DOWN, activation="relu"), "bias of up"),
    "feedforward, one bias": (lambda: feedforward(X, UP, (DOWN[0], ones(1)), activation="relu"), "bias of down"),
    "feedforward, its gate": (lambda: feedforward(X, UP, DOWN, (UP[0], ones(3)), activation="silu"), "bias of gate"),
    "feedforward, whole numbers": (lambda: feedforward(whole(64, 300), UP, DOWN, activation="relu"), "int64"),
    "linear, weight": (lambda: linears(X, (ones(5, 29),), (None,)), "weight 0 is"),
    "linear, bias": (lambda: linears(X, (UP[0], ones(5, 300)), (None, ones(1))), "bias of weight 1"),
    "linear, a bias too few": (lambda: linears(X, (UP[0], UP[0]), (None,)), "1 for 2"),
    "scan, A of no rank": (lambda: scanned(A=torch.tensor(-1.0)), r"A \(D, N\)"),
    "scan, complex A": (lambda: scanned(A=ones(8, 4).to(torch.complex64)), "A is complex64"),
    "scan, whole numbers": (lambda: scanned(x=whole(2, 9, 8)), "x is int64"),
    "scan, a state of whole numbers": (lambda: scanned(into=whole(2, 8, 4)), "into is int64"),
    "ssd, whole numbers": (lambda: ssd_scan(*SSD), "x is int64"),
    "conv, no reach": (lambda: causal_conv(ones(2, 9, 8), ones(8, 0)), r"weight \(D, W\)"),
    "conv, whole numbers": (lambda: causal_conv(ones(2, 9, 8), whole(8, 4)), "weight is int64"),
    "conv, weight": (lambda: causal_conv(ones(2, 9, 8), ones(7, 4)), "convolution shapes do not fit: weight"),
    "rotary": (lambda: RotaryCall(ones(2, 9, 8), ones(1, 9, 1, 2), ones(1, 9, 1, 2)), r"takes \(B, T, H, E\)"),
    "loss, no vocabulary": (lambda: linear_cross_entropy(ones(5, 4), ones(0, 4), -100 * whole(5)), "at least one"),
    "loss, whole numbers": (lambda: cross_entropy(whole(64, 300), whole(64)), "int64"),
    "loss, smoothing": (lambda: cross_entropy(X, whole(64), label_smoothing=2.0), "label_smoothing"),
    "experts, too high": (lambda: routed(4 * whole(64, 2)), "expert 4 was chosen; there are 4"),
    "experts, too low": (lambda: routed(-2 * whole(64, 2)), "expert -2 was chosen"),
    "experts, biases of five": (lambda: routed(up_bias=ones(5, 50)), r"up_bias is \(5, 50\)"),
    "experts, a bias that would spread": (lambda: routed(down_bias=ones(4, 1)), r"down_bias is \(4, 1\)"),
    "experts, a gate's bias alone": (lambda: routed(gate=None, gate_bias=ones(4, 50)), "take no gate_bias"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_every_other_op(name: str) -> None:
    call, words = UNFIT[name]
    with pytest.raises(UserError, match=words) as refused:
        call()
    assert "\n" not in str(refused.value)
