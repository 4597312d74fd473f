"""LLaMA 1 to 3 and Mistral against `LlamaForCausalLM` and `MistralForCausalLM`."""

from typing import Any

import pytest
import torch

from phylon.families import family
from phylon.families.decoder import llama_spec
from phylon.hub import load, save
from phylon.layers.mixers.attention import Attention
from phylon.layers.positions.rotary import LinearScaling, Llama3Scaling, Rotary, YarnScaling, rotate
from phylon.patterns import Window
from phylon.spec.errors import UserError

from .harness import (
    REMOVED,
    assert_close,
    differs,
    drawn,
    edit_config,
    our_logits,
    ours_to_reference,
    padded,
    random_tokens,
    reference_logits,
    reference_to_ours,
    transformers,
)

LlamaConfig, MistralConfig = transformers.LlamaConfig, transformers.MistralConfig

ODD: dict[str, Any] = {"d_model": 42, "n_layers": 2, "vocab_size": 53, "d_ff": 29, "max_seq_len": 48}
SPECS = {
    **{f"llama case {i}": spec for i, spec in enumerate(family("llama").cases())},
    **{f"mistral case {i}": spec for i, spec in enumerate(family("mistral").cases())},
    "odd sizes, K < H": llama_spec(**ODD, n_heads=6, n_kv_heads=3, head_dim=14),
    "one key head": llama_spec(**ODD, n_heads=7, n_kv_heads=1, head_dim=6, tied=True),
    "biases": llama_spec(**ODD, n_heads=3, attention_bias=True, ffn_bias=True, eps=1e-3),
    "only attention's biases": llama_spec(**ODD, n_heads=3, attention_bias=True),
    "gelu": llama_spec(**ODD, n_heads=3, activation="gelu"),
    "gelu_tanh": llama_spec(**ODD, n_heads=3, activation="gelu_tanh"),
    "relu": llama_spec(**ODD, n_heads=3, activation="relu"),
    "window 1": llama_spec(**ODD, n_heads=3, pattern=Window(size=1)),
    "window 5": llama_spec(**ODD, n_heads=6, n_kv_heads=2, head_dim=4, pattern=Window(size=5), tied=True),
    "window 100": llama_spec(**ODD, n_heads=3, pattern=Window(size=100)),
    "linear": llama_spec(**ODD, n_heads=3, rotary=Rotary(theta=500.0, scaling=LinearScaling(factor=3.0))),
    "yarn": llama_spec(
        **ODD,
        n_heads=3,
        rotary=Rotary(
            theta=5e5,
            scaling=YarnScaling(
                factor=4.0,
                original_max_seq_len=12,
                beta_fast=4.0,
                beta_slow=0.5,
                attention_factor=1.3,
                round_ramp=False,
            ),
        ),
    ),
    "llama3": llama_spec(
        **ODD,
        n_heads=3,
        rotary=Rotary(
            theta=5e5,
            scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=3.0, original_max_seq_len=20),
        ),
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_ours_to_reference(name, tmp_path):
    ours_to_reference(SPECS[name], tmp_path / "a")


TINY: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 41,
    "max_position_embeddings": 64,
}
LLAMA = {
    "llama": {"num_key_value_heads": 4, "rms_norm_eps": 1e-6},
    "llama 2": {"rms_norm_eps": 1e-5},
    "head_dim": {"head_dim": 10},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "one key head": {"num_key_value_heads": 1},
    **{f"{name} activation": {"hidden_act": name} for name in ("relu", "gelu", "gelu_pytorch_tanh", "silu", "swish")},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "yarn mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn mscale alone": YARN | {"mscale": 0.7},
    "yarn attention_factor": YARN | {"attention_factor": 0.9},
    "yarn not truncated": YARN | {"truncate": False, "beta_fast": 8.0, "beta_slow": 0.7},
    "yarn of one pair": YARN | {"original_max_position_embeddings": 6, "beta_fast": 1.001, "beta_slow": 1.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
    },
}


@pytest.mark.parametrize("name", LLAMA)
def test_reference_to_ours(name, tmp_path):
    reference_to_ours(LlamaConfig(**(TINY | LLAMA[name])), tmp_path / "a")


@pytest.mark.parametrize("name", SCALINGS)
def test_every_scaling_in_both_spellings(name, tmp_path):
    """`rope_parameters` as version 5 writes it, and `rope_theta` beside `rope_scaling` as version 4 did."""
    table = SCALINGS[name]
    newer, _ = reference_to_ours(
        LlamaConfig(**TINY, rope_parameters=table | {"rope_theta": 3e4}), tmp_path / "new", length=40
    )
    attention = newer.spec.last_stack.blocks[0].op("attn")
    assert isinstance(attention, Attention)
    assert isinstance(attention.rotary, Rotary)
    assert attention.rotary.theta == 3e4
    for key in ("rope_type", "type"):
        older = {key if k == "rope_type" else k: v for k, v in table.items()}
        edit = {"rope_parameters": REMOVED, "rope_theta": 3e4, "rope_scaling": None if name == "default" else older}
        model, _ = reference_to_ours(LlamaConfig(**TINY), tmp_path / key, edit, length=40)
        assert model.spec == newer.spec
    plain, _ = reference_to_ours(LlamaConfig(**TINY, rope_parameters={"rope_type": "default"}), tmp_path / "plain")
    tokens = random_tokens(41, length=40)
    assert differs(our_logits(newer, tokens), our_logits(plain, tokens)), "the scaling was not seen"


MISTRAL = {
    "window 4": {"sliding_window": 4},
    "window 1": {"sliding_window": 1},
    "window 1000": {"sliding_window": 1000},
    "no window": {"sliding_window": None},
    "window, head_dim, tied": {"sliding_window": 7, "head_dim": 10, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("name", MISTRAL)
def test_mistral(name, tmp_path):
    model, reference = reference_to_ours(MistralConfig(**(TINY | MISTRAL[name])), tmp_path / "a")
    padded(model, reference, left=False)
    padded(model, reference, left=True)


@pytest.mark.parametrize("name", ["llama 2", "head_dim"])
def test_padding(name, tmp_path):
    model, reference = reference_to_ours(LlamaConfig(**(TINY | LLAMA[name])), tmp_path / "a")
    padded(model, reference, left=False)
    padded(model, reference, left=True)
    padded(model, reference, left=True, positions=True)


def test_what_a_config_leaves_out_has_the_reference_defaults(tmp_path):
    config = {key: value for key, value in TINY.items() if key != "num_key_value_heads"}
    config |= {"hidden_size": 64, "num_attention_heads": 16}
    keys = ("sliding_window", "num_key_value_heads", "rms_norm_eps", "hidden_act", "tie_word_embeddings")
    edit = dict.fromkeys((*keys, "rope_parameters", "attention_dropout", "head_dim"), REMOVED)
    model, _ = reference_to_ours(MistralConfig(**config), tmp_path / "mistral", edit)
    attention = model.spec.last_stack.blocks[0].op("attn")
    assert isinstance(attention, Attention)
    assert (attention.n_kv_heads, attention.pattern) == (8, Window(size=4096))
    llama = LlamaConfig(**config)
    reference_to_ours(llama, tmp_path / "llama", edit | {"attention_bias": REMOVED, "mlp_bias": REMOVED})


def test_dynamic_ntk_is_static(tmp_path):
    """The reference breaks the law of chunks: its frequencies change with the longest text so far.

    Ours are resolved at load. Below the original length both agree (the sweep above); beyond it the reference's
    first tokens depend on how many tokens follow, and ours do not.
    """
    config = LlamaConfig(
        **(TINY | {"max_position_embeddings": 16}), rope_parameters={"rope_type": "dynamic", "factor": 2.0}
    )
    model, reference = reference_to_ours(config, tmp_path / "a", length=16)
    tokens = random_tokens(41, length=40)
    short, long = reference_logits(reference, tokens[:, :16]), reference_logits(reference, tokens)
    assert differs(long[:, :16], short), "the reference obeys the law of chunks now"
    ours = our_logits(model, tokens)
    assert_close(ours[:, :16], our_logits(model, tokens[:, :16]))
    state = model.new_state(2)
    parts = [our_logits(model, part, state=state) for part in tokens.split([7, 1, 20, 12], dim=1)]
    assert_close(torch.cat(parts, 1), ours)


def test_partial_rotary_is_refused_where_the_reference_ignores_it(tmp_path):
    """`LlamaForCausalLM` turns whole heads whatever `partial_rotary_factor` says: neither side may guess."""
    reference_to_ours(LlamaConfig(**TINY), tmp_path / "a")
    table = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.67}
    for edit in ({"partial_rotary_factor": 0.67}, {"partial_rotary_factor": REMOVED, "rope_parameters": table}):
        edit_config(tmp_path / "a", edit)
        with pytest.raises(UserError, match="partial"):
            load(tmp_path / "a")
    with pytest.raises(UserError, match="partial"):
        save(drawn(llama_spec(**ODD, n_heads=3, rotary=Rotary(dim=4))), tmp_path / "b", format="hf")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("share", [4, 8])
def test_partial_rotary(share):
    """The rotation itself against the reference's, which Phi applies to the leading features only."""
    from transformers.models.phi.modeling_phi import apply_rotary_pos_emb

    x = torch.randn(2, 9, 3, 8, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(9)[None] + 5
    angles = positions[..., None] * 10_000.0 ** (-torch.arange(0, share, 2) / share)
    cos, sin = (torch.cat([t, t], -1) for t in (angles.cos(), angles.sin()))
    theirs, _ = apply_rotary_pos_emb(x[..., :share], x[..., :share], cos, sin, unsqueeze_dim=2)
    ours = rotate(x, Rotary(dim=share).tables(positions, 8))
    assert_close(ours, torch.cat([theirs, x[..., share:]], -1))
