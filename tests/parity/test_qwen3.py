"""Qwen3 against ``Qwen3ForCausalLM``."""

from pathlib import Path

import pytest

from parity.decoders import VOCAB, check, refuses, transformers
from phylon.families.base import Config
from phylon.families.qwen3 import read_config
from phylon.patterns import Causal, Window

WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
CONFIGS = {
    "tied": {"tie_word_embeddings": True},
    "one key head, biases": {"num_key_value_heads": 1, "attention_bias": True, "intermediate_size": 41},
    "windows": WINDOWS,
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0
        }
    },
}  # fmt: skip


def build(**changes: object):
    sizes = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10}
    more = {"num_hidden_layers": 2, "intermediate_size": 40, "vocab_size": VOCAB, "max_position_embeddings": 64}
    config = transformers.Qwen3Config(**(sizes | more | changes), attn_implementation="eager")
    return transformers.Qwen3ForCausalLM(config)


@pytest.mark.parametrize("name", CONFIGS)
def test_parity(name: str, tmp_path: Path) -> None:
    ours = check(build(**CONFIGS[name]), tmp_path)
    patterns = [block.op("attn").pattern for block in ours.spec.decoder.blocks]
    assert patterns == [Causal(), Window(size=4) if name == "windows" else Causal()]


def test_refused() -> None:
    config = build().config.to_dict()
    with refuses("use_sliding_window"):
        read_config(Config(config | {"layer_types": ["full_attention", "sliding_attention"]}))
    with refuses("layer_types"):
        read_config(Config(config | {"layer_types": ["full_attention"]}))


def test_windows_without_layer_types() -> None:
    config = build(**WINDOWS).config.to_dict() | WINDOWS
    named = read_config(Config(config))
    del config["layer_types"]
    assert read_config(Config(config)) == named
