"""Gemma 3's text model against ``Gemma3ForCausalLM``."""

from pathlib import Path

import pytest
import torch

import phylon
from parity.decoders import VOCAB, check, drawn, refuses, transformers
from phylon.families.base import Config
from phylon.families.gemma3 import gemma3_spec, read_config, write_config
from phylon.patterns import Causal, Window

SCALED = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
CONFIGS = {
    "local, then wide": {},
    "stretched, capped, untied": {
        "rope_parameters": {
            "full_attention": SCALED,
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": False,
    },
    "both stretched": {
        "rope_parameters": {
            "full_attention": SCALED,
            "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},
        },
    },
    "all local, biases": {"layer_types": ["sliding_attention"] * 2, "attention_bias": True, "intermediate_size": 41},
    "all wide": {"layer_types": ["full_attention"] * 2, "num_key_value_heads": 4, "query_pre_attn_scalar": 10},
}


def build(**changes: object):
    sizes = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10}
    more = {"num_hidden_layers": 2, "intermediate_size": 40, "vocab_size": VOCAB, "max_position_embeddings": 64}
    rest = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 7}
    config = transformers.Gemma3TextConfig(**(sizes | more | rest | changes), attn_implementation="eager")
    return transformers.Gemma3ForCausalLM(config)


@pytest.mark.parametrize("name", CONFIGS)
def test_parity(name: str, tmp_path: Path) -> None:
    check(build(**CONFIGS[name]), tmp_path)


def test_six_blocks_five_local(tmp_path: Path) -> None:
    """The published alternation, from ``sliding_window_pattern`` where ``layer_types`` is absent."""
    config = build(num_hidden_layers=6, layer_types=None).config.to_dict()
    spec = read_config(Config(config))
    del config["layer_types"]
    assert read_config(Config(config)) == spec
    assert [type(block.op("attn").pattern) for block in spec.decoder.blocks] == [Window] * 5 + [Causal]
    assert [block.op("attn").rotary.theta for block in spec.decoder.blocks] == [1e4] * 5 + [1e6]


def test_old_rope_keys() -> None:
    """The keys of the released 4B text configuration."""
    old = {
        "head_dim": 256, "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_attention_heads": 8, "num_hidden_layers": 34, "num_key_value_heads": 4, "query_pre_attn_scalar": 256,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "rope_theta": 1000000, "rope_local_base_freq": 10000,
        "sliding_window": 1024, "sliding_window_pattern": 6, "vocab_size": 262208, "cache_implementation": "hybrid",
    }  # fmt: skip
    assert read_config(Config(old)) == phylon.preset("gemma3-4b")


def test_norm_weights_come_back_bit_for_bit_in_bfloat16(tmp_path: Path) -> None:
    """A gain of 1 + weight, folded in bfloat16, would lose the small weights."""
    reference = drawn(build()).to(torch.bfloat16)
    with torch.no_grad():
        reference.model.norm.weight.mul_(1e-3)
    reference.save_pretrained(tmp_path / "theirs")
    phylon.save(phylon.load(tmp_path / "theirs", device="cpu"), tmp_path / "ours", format="hf")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert torch.equal(again.model.norm.weight, reference.model.norm.weight)


@pytest.mark.parametrize("number", [7.5, 0.3, 168, 256, 1e-3, 3.14159265358979])
def test_query_scales_come_back(number: float) -> None:
    spec = gemma3_spec(d_model=24, n_layers=1, n_heads=3, head_dim=8, vocab_size=VOCAB, query_scale=number)
    config = write_config(spec)
    assert read_config(Config(config)).decoder == spec.decoder
    written = config["query_pre_attn_scalar"]
    assert written == number
    assert isinstance(written, type(number))


def test_refused() -> None:
    config = build().config.to_dict()
    for key, value in (("attn_logit_softcapping", 50.0), ("use_bidirectional_attention", True)):
        with refuses(key):
            read_config(Config(config | {key: value}))
    with refuses("rope_parameters"):
        read_config(Config(config | {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}))
