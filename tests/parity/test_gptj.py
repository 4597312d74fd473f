"""GPT-J against ``GPTJForCausalLM``: neighbouring rotary pairs become half-split on load."""

from pathlib import Path

import pytest

from parity.decoders import VOCAB, check, refuses, transformers
from phylon.families.base import Config
from phylon.families.gptj import read_config

CONFIGS = {
    "partial": {"rotary_dim": 4},
    "whole head": {"rotary_dim": 8, "n_inner": 41, "activation_function": "relu"},
    "tied": {"rotary_dim": 2, "tie_word_embeddings": True},
}


def build(**changes: object):
    sizes = {"n_embd": 24, "n_head": 3, "n_layer": 2, "vocab_size": VOCAB, "n_positions": 64}
    return transformers.GPTJForCausalLM(transformers.GPTJConfig(**(sizes | changes), attn_implementation="eager"))


@pytest.mark.parametrize("name", CONFIGS)
def test_parity(name: str, tmp_path: Path) -> None:
    ours = check(build(**CONFIGS[name]), tmp_path)
    assert ours.heads.lm.proj.bias is not None
    assert "decoder.blocks.0.attn_norm_shared.weight" in dict(ours.named_parameters())


def test_rotary_dim_must_fit() -> None:
    config = build(rotary_dim=4).config.to_dict()
    for key in ("scale_attn_weights", "rotary"):
        with refuses(key):
            read_config(Config(config | {key: False}))
    with refuses("rotary dim 10"):
        read_config(Config(config | {"rotary_dim": 10}))
