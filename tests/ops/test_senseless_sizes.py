"""Score biases, rotary scalings and targets of sizes that make no sense are refused in one line."""

import math
from collections.abc import Callable

import pytest
import torch

from phylon.layers.heads.lm import LMHead
from phylon.layers.mixers.attention import Attention
from phylon.layers.mixers.cross import CrossAttention
from phylon.layers.mixers.mla import MLA
from phylon.layers.positions.rotary import DynamicNTKScaling, FrequencyFactors, LinearScaling, Rotary, YarnScaling
from phylon.layers.positions.score_bias import Alibi, T5Bias, alibi_slopes
from phylon.model import Branch
from phylon.ops.attention import AlibiBias, BucketBias, attention
from phylon.ops.loss import cross_entropy, linear_cross_entropy
from phylon.patterns import BigBird
from phylon.spec import UserError
from phylon.spec.registry import entries

LATENT = MLA(n_heads=2, kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4)


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
        (
            lambda: YarnScaling(factor=2.0, original_max_seq_len=8, attention_factor=math.nan),
            "attention_factor must be",
        ),
        (lambda: Branch(op=LATENT, gain=math.inf), "gain must be a finite number"),
        (lambda: Rotary(theta=math.inf), "theta must be a finite number, got inf"),
        (lambda: Alibi(slopes=(0.5, math.nan)), "a slope must be a finite number, got nan"),
        (lambda: Attention(n_heads=1, n_kv_heads=1, head_dim=4, scale=math.nan), "scale must be a finite number"),
        (lambda: Attention(n_heads=1, n_kv_heads=1, head_dim=4, softcap=math.inf), "softcap must be a finite number"),
        (lambda: CrossAttention(n_heads=1, head_dim=4, scale=math.inf), "scale must be a finite number"),
        (lambda: LMHead(vocab_size=4, softcap=math.inf), "softcap must be a finite number"),
        (lambda: attention(*torch.ones(3, 1, 2, 1, 4), scale=math.inf), "scale must be a finite number"),
        (lambda: attention(*torch.ones(3, 1, 2, 1, 4), softcap=math.inf), "softcap must be a finite number"),
        (lambda: LATENT.replace(scale=math.nan), "scale must be a finite number"),
        (lambda: LATENT.replace(pattern=BigBird(block=2, n_heads=3)), "the pattern is for 3 heads, the mixer has 2"),
    ],
)
def test_positions(make: Callable[[], object], words: str) -> None:
    with pytest.raises(UserError) as error:
        make()
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_every_number_of_a_mechanism_is_finite() -> None:
    found = 0
    for entry in entries():
        if not entry.spec.__module__.startswith("phylon.layers"):
            continue  # a recipe's numbers are looked at as a whole
        for spec in entry.cases():
            for name in spec.__struct_fields__:  # type: ignore[attr-defined]
                if not isinstance(getattr(spec, name), float):
                    continue
                limit = name in ("qkv_clip", "dt_high")  # infinite ones limit nothing
                for junk in (math.nan, -math.inf) if limit else (math.nan, math.inf, -math.inf):
                    with pytest.raises(UserError, match=r"must be|need") as error:
                        spec.replace(**{name: junk})  # type: ignore[attr-defined]
                    assert "\n" not in str(error.value)
                    found += 1
    assert found > 100


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
