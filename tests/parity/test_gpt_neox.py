"""GPT-NeoX and Pythia against ``GPTNeoXForCausalLM``."""

from pathlib import Path

import pytest

from parity.decoders import VOCAB, check, refuses, transformers
from phylon.families.base import Config
from phylon.families.gpt_neox import gpt_neox_spec, read_config, write_config
from phylon.layers.positions.rotary import Rotary

CONFIGS = {
    "parallel": {},
    "sequential": {"use_parallel_residual": False, "hidden_act": "gelu_fast"},
    "tied, no biases, all of the head turns": {
        "tie_word_embeddings": True,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 1.0},
    },
    "linear scaling": {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    },
}


def build(**changes: object):
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 41}
    more = {"vocab_size": VOCAB, "max_position_embeddings": 64, "attn_implementation": "eager"}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**(sizes | more | changes)))


@pytest.mark.parametrize("name", CONFIGS)
def test_parity(name: str, tmp_path: Path) -> None:
    ours = check(build(**CONFIGS[name]), tmp_path)
    assert len(ours.spec.decoder.blocks[0].sublayers) == (2 if name == "sequential" else 1)


def test_old_keys() -> None:
    old = {"rotary_pct": 0.5, "rotary_emb_base": 500, "hidden_size": 32, "num_attention_heads": 4}
    rest = {"num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 11}
    rotary = read_config(Config(old | rest)).decoder.blocks[0].op("attn").rotary
    assert (rotary.theta, rotary.dim) == (500.0, 4)


def test_any_share_comes_back() -> None:
    """30 of 44 features: the nearest share, times 44 and rounded down, would be 29."""
    spec = gpt_neox_spec(d_model=88, n_heads=2, rotary=Rotary(dim=30))
    assert read_config(Config(write_config(spec))) == spec
    assert int(44 * (30 / 44)) == 29


def test_unknown_key_is_refused() -> None:
    config = transformers.GPTNeoXConfig(hidden_size=24, num_attention_heads=3).to_dict()
    with refuses("residual_scale"):
        read_config(Config(config | {"residual_scale": 2.0}))
    with refuses("gelo"):
        read_config(Config(config | {"hidden_act": "gelo"}))
