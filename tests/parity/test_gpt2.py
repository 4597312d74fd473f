"""GPT-2 against `GPT2LMHeadModel`."""

import pytest
import torch

from phylon.families import family
from phylon.families.gpt2 import gpt2_spec

from .harness import (
    differs,
    our_logits,
    ours_to_reference,
    padded,
    random_tokens,
    reference_logits,
    reference_to_ours,
    transformers,
)

GPT2Config = transformers.GPT2Config

SPECS = [
    *family("gpt2").cases(),
    gpt2_spec(d_model=35, n_layers=2, n_heads=5, d_ff=23, vocab_size=41, max_seq_len=29, activation="gelu"),
    gpt2_spec(d_model=24, n_layers=1, n_heads=1, vocab_size=11, max_seq_len=40, activation="silu", eps=1e-3),
    gpt2_spec(d_model=24, n_layers=2, n_heads=3, vocab_size=37, max_seq_len=64, attention_scales=(1.0, 1.0)),
    gpt2_spec(d_model=24, n_layers=2, n_heads=3, vocab_size=37, max_seq_len=64, attention_scales=(1.0, 0.5)),
]


@pytest.mark.parametrize("number", range(len(SPECS)))
def test_ours_to_reference(number, tmp_path):
    ours_to_reference(SPECS[number], tmp_path / "a")


TINY = {"n_embd": 30, "n_head": 3, "n_layer": 2, "n_positions": 32, "vocab_size": 43}
CONFIGS = {
    "plain": {},
    "untied": {"tie_word_embeddings": False},
    "inner": {"n_inner": 17},
    "by depth": {"scale_attn_by_inverse_layer_idx": True},
    "not scaled": {"scale_attn_weights": False},
    "by depth, not scaled": {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False},
    "upcast": {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True},
    "eps": {"layer_norm_epsilon": 1e-3},
    **{name: {"activation_function": name} for name in ("relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "silu")},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_reference_to_ours(name, tmp_path):
    reference_to_ours(GPT2Config(**(TINY | CONFIGS[name])), tmp_path / "a")


def test_padding(tmp_path):
    """Case 17: the reference needs `position_ids` for left padding; ours sees them from the segments."""
    model, reference = reference_to_ours(GPT2Config(**TINY), tmp_path / "a")
    padded(model, reference, left=False)
    padded(model, reference, left=True, positions=True)
    alone = random_tokens(43, 1, 3)
    row = torch.cat([torch.zeros(1, 2, dtype=torch.int64), alone], 1)
    segments = torch.tensor([[0, 0, 1, 1, 1]])
    theirs = reference_logits(reference, row, attention_mask=segments)[:, 2:]
    assert differs(theirs, our_logits(model, alone)), "the reference obeys the law of left padding now"
    assert not differs(our_logits(model, row, segments=segments)[:, 2:], our_logits(model, alone))
