"""Jamba against ``JambaForCausalLM``: attention, Mamba and experts in one stack."""

from pathlib import Path
from typing import Any

import pytest
import torch

from parity.decoders import VOCAB, check, refuses, tokens_of, transformers
from parity.harness import ours_to_reference
from parity.margins import assert_clear
from phylon.account import account
from phylon.families import family, preset
from phylon.families.base import Config
from phylon.families.jamba import read_config, write_config
from phylon.layers.ffn.moe import MoE
from phylon.layers.mixers.attention import Attention
from phylon.layers.mixers.mamba import Mamba
from phylon.model import build_meta

SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "num_experts": 4,
    "mamba_d_state": 5,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "mamba first": {},
    "attention first, all sparse, tied": {
        "attn_layer_offset": 0,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "tie_word_embeddings": True,
    },
    "heads of another width": {"head_dim": 10},
    "one expert": {"num_experts": 1, "num_experts_per_tok": 1},
    "attention in every block": {"attn_layer_period": 1, "attn_layer_offset": 0},
    "neither": {"attn_layer_period": 1, "attn_layer_offset": 0, "num_experts": 1, "num_experts_per_tok": 1},
    "other sizes": {
        "num_key_value_heads": 1,
        "num_experts": 3,
        "num_experts_per_tok": 1,
        "mamba_d_conv": 3,
        "mamba_expand": 3,
        "mamba_dt_rank": 3,
        "mamba_conv_bias": False,
        "rms_norm_eps": 1e-4,
    },
}


def build(**changes: Any) -> Any:
    config = transformers.JambaConfig(**(SIZES | changes))
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize("name", CONFIGS)
def test_parity(name: str, tmp_path: Path) -> None:
    model = check(build(**CONFIGS[name]), tmp_path)
    if CONFIGS[name].get("num_experts") != 1:
        assert_clear(model, tokens_of())


@pytest.mark.parametrize("case", range(len(family("jamba").cases())))
def test_cases_both_ways(case: int, tmp_path: Path) -> None:
    ours_to_reference(family("jamba").cases()[case], tmp_path)


def test_which_blocks_are_what() -> None:
    """Section 3.1: one attention block in eight, experts in every other block; and the count of the reference's."""
    blocks = preset("jamba-v0.1").decoder.blocks
    assert [i for i, b in enumerate(blocks) if "attn" in b.ops()] == [4, 12, 20, 28]
    assert [i for i, b in enumerate(blocks) if isinstance(b.op("ffn"), MoE)] == list(range(1, 32, 2))
    assert all(isinstance(b.op("mixer"), Mamba) for b in blocks if "mixer" in b.ops())
    assert blocks[4].op("attn") == Attention(n_heads=32, n_kv_heads=8, head_dim=128)
    with torch.device("meta"):
        reference = transformers.JambaForCausalLM(transformers.JambaConfig())
    count = sum(p.numel() for p in reference.parameters())
    assert (
        count
        == family("jamba").golden["jamba-v0.1"]
        == sum(p.numel() for p in build_meta(preset("jamba-v0.1")).parameters())
    )
    assert account("jamba-v0.1", seq_len=1024).params_active == 12_110_311_296


def test_the_released_configuration_is_the_preset() -> None:
    released = {
        "architectures": ["JambaForCausalLM"],
        "attention_dropout": 0.0,
        "attn_layer_offset": 4,
        "attn_layer_period": 8,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_dt_rank": 256,
        "mamba_expand": 2,
        "mamba_proj_bias": False,
        "max_position_embeddings": 262144,
        "model_type": "jamba",
        "num_attention_heads": 32,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_logits_to_keep": 1,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_mamba_kernels": True,
        "vocab_size": 65536,
    }
    spec = read_config(Config(released))
    assert spec == preset("jamba-v0.1")
    assert read_config(Config(write_config(spec))) == spec


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attn_layer_offset": 2}, "attention_offset 2"),
        ({"expert_layer_offset": -1}, "expert_offset must be at least 0, got -1"),
        ({"num_experts_per_tok": 9}, "top_k"),
        ({"mamba_inner_layernorms": False}, "norms on dt, B and C"),
        ({"sliding_window": 16}, "sliding_window"),
        ({"n_group": 2}, "not understood"),
        ({"num_attention_heads": 5}, "no multiple"),
    ],
)
def test_configurations_that_do_not_fit(change: dict[str, Any], words: str) -> None:
    with refuses(words):
        read_config(Config(SIZES | change))
