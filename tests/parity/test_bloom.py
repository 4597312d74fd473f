"""BLOOM against ``BloomForCausalLM``: ALiBi for any number of heads."""

from pathlib import Path

import pytest
import torch

import phylon
from parity.decoders import VOCAB, check, close, drawn, reference_logits, refuses, tokens_of, transformers
from phylon.families.base import Config
from phylon.families.bloom import read_config

CONFIGS = {
    "four heads": {"n_head": 4},
    "three heads, untied": {"n_head": 3, "tie_word_embeddings": False},
    "six": {"n_head": 6},
}


def build(**changes: object):
    sizes = {"hidden_size": 24, "n_layer": 2, "vocab_size": VOCAB}
    return transformers.BloomForCausalLM(transformers.BloomConfig(**(sizes | changes), attn_implementation="eager"))


@pytest.mark.parametrize("name", CONFIGS)
def test_parity(name: str, tmp_path: Path) -> None:
    check(build(**CONFIGS[name]), tmp_path, positions=False)


def test_published_keys() -> None:
    """The keys of the released 560M configuration."""
    config = {
        "n_embed": 1024,
        "n_inner": None,
        "n_layer": 24,
        "num_attention_heads": 16,
        "offset_alibi": 100,
        "seq_length": 2048,
        "skip_bias_add": True,
        "skip_bias_add_qkv": False,
        "slow_but_exact": False,
        "unk_token_id": 0,
        "vocab_size": 250880,
        "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True,
        "masked_softmax_fusion": True,
        "pretraining_tp": 2,
        "layer_norm_epsilon": 1e-05,
        "apply_residual_connection_post_layernorm": False,
    }
    assert read_config(Config(config)).max_seq_len == 2048
    with refuses("apply_residual_connection_post_layernorm", "two norms in a row"):
        read_config(Config(config | {"apply_residual_connection_post_layernorm": True}))
    with refuses("n_inner"):
        read_config(Config(config | {"n_inner": 1000}))


def test_case_32_alibi_is_not_lost_on_a_state(tmp_path: Path) -> None:
    """12 tokens split at 5: the bias counts from where the chunk stands; without it the logits are others."""
    reference = drawn(build(n_head=3))
    reference.save_pretrained(tmp_path)
    ours = phylon.load(tmp_path, device="cpu")
    without = phylon.build(phylon.override(ours.spec, {"decoder.blocks.*.attn.score_bias": None}), device="cpu").eval()
    without.load_state_dict(ours.state_dict())
    tokens = tokens_of(shape=(2, 12))
    with torch.no_grad():
        whole, state = reference_logits(reference, tokens, positions=False), ours.new_state(2)
        close(torch.cat([ours(part, state=state).logits for part in tokens.split([5, 7], dim=1)], dim=1), whole)
        assert float((without(tokens).logits - whole).abs().max()) > 1e-2 * float(whole.abs().max())
