"""BLOOM against ``BloomForCausalLM``: ALiBi for any number of heads."""

from pathlib import Path

import pytest

from parity.decoders import VOCAB, check, refuses, transformers
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
