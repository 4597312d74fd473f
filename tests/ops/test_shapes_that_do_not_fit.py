"""Calls whose parts do not fit are refused in one line: kernels read and write by these shapes."""

import math

import pytest
import torch

from phylon.ops.attention import AttentionCall
from phylon.ops.attention.bias import AlibiBias, BucketBias
from phylon.ops.loss import cross_entropy, linear_cross_entropy
from phylon.ops.rotary.call import RotaryCall
from phylon.patterns import Causal, Records
from phylon.spec import UserError


def records(rows: int = 1, n: int = 6, **more: torch.Tensor) -> Records:
    return Records(torch.arange(n).expand(rows, n), **more)


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
