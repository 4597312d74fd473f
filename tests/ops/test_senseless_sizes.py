"""Score biases, rotary scalings and targets of sizes that make no sense are refused in one line."""

from collections.abc import Callable

import pytest
import torch

from phylon.layers.positions.rotary import DynamicNTKScaling, FrequencyFactors, LinearScaling
from phylon.layers.positions.score_bias import T5Bias, alibi_slopes
from phylon.ops.attention import AlibiBias, BucketBias
from phylon.ops.loss import cross_entropy, linear_cross_entropy
from phylon.spec import UserError


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: BucketBias(torch.zeros(0, 4), 20, False), "2 or more buckets"),
        (lambda: BucketBias(torch.zeros(1, 4), 20, False), "2 or more buckets"),
        (lambda: BucketBias(torch.zeros(3, 4), 20, True), "4 or more buckets"),
        (lambda: BucketBias(torch.zeros(8), 20, True), "4 or more buckets"),
        (lambda: BucketBias(torch.zeros(32, 4), 16, False), "above the 16 exact distances"),
        (lambda: AlibiBias(torch.zeros(2, 4)), "slopes are (heads,)"),
        (lambda: alibi_slopes(0), "n_heads must be at least 1"),
        (lambda: T5Bias(n_heads=0), "n_heads must be at least 1"),
        (lambda: DynamicNTKScaling(factor=2.0, original_max_seq_len=8, seq_len=0), "seq_len must be at least 1"),
        (lambda: FrequencyFactors(factors=(1.0, 0.0)), "above 0, got 0.0"),
        (lambda: LinearScaling(factor=float("inf")), "above 0, got inf"),
    ],
)
def test_positions(make: Callable[[], object], words: str) -> None:
    with pytest.raises(UserError) as error:
        make()
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("wrong", [-1, -99, 5, 10**6])
def test_targets_out_of_range_are_refused_by_every_form(wrong: int) -> None:
    hidden, weight = torch.randn(2, 3, 4), torch.randn(5, 4)
    targets = torch.tensor([[0, 1, -100], [2, wrong, 4]])
    for run in (
        lambda: cross_entropy(hidden @ weight.T, targets),
        lambda: linear_cross_entropy(hidden, weight, targets),
    ):
        with pytest.raises(UserError, match=f"target id {wrong} is out of range"):
            run()


def test_the_smallest_tables_that_make_sense() -> None:
    for table, both in ((torch.zeros(2, 1), False), (torch.zeros(4, 1), True)):
        found = BucketBias(table, 5, both).buckets(torch.arange(-9, 10))
        assert int(found.min()) >= 0
        assert int(found.max()) == len(table) - 1
