"""MPT against ``MptForCausalLM``: its own order of slopes, its own maximum, clipped projections."""

from pathlib import Path

import pytest
import torch

import phylon
from parity.decoders import VOCAB, check, close, drawn, reference_logits, refuses, tokens_of, transformers
from phylon.families.base import Config
from phylon.families.mpt import mpt_slopes, mpt_spec, read_config
from phylon.layers.positions.score_bias import alibi_slopes

CONFIGS = {
    "four heads": {"n_heads": 4},
    "three heads, untied, clipped": {"n_heads": 3, "tie_word_embeddings": False, "attn_config": {"clip_qkv": 0.5}},
    "six heads, scale": {"n_heads": 6, "attn_config": {"softmax_scale": 0.2}},
}


def build(**changes: object):
    sizes = {"d_model": 24, "n_layers": 2, "vocab_size": VOCAB, "max_seq_len": 64}
    return transformers.MptForCausalLM(transformers.MptConfig(**(sizes | changes), attn_implementation="eager"))


@pytest.mark.parametrize("name", CONFIGS)
def test_parity(name: str, tmp_path: Path) -> None:
    check(build(**CONFIGS[name]), tmp_path, positions=False)


def test_bias_max_which_the_reference_ignores(tmp_path: Path) -> None:
    """The reference builds its bias with the default maximum whatever the configuration says; ours follows it."""
    reference = drawn(build(n_heads=4, attn_config={"alibi_bias_max": 16}))
    reference.save_pretrained(tmp_path)
    ours = phylon.load(tmp_path, device="cpu")
    tokens = tokens_of()
    with torch.no_grad():
        assert float((ours(tokens).logits - reference_logits(reference, tokens, positions=False)).abs().max()) > 1e-2
        build_alibi = type(reference.transformer).build_mpt_alibi_tensor
        told = lambda heads, length, device=None: build_alibi(reference.transformer, heads, length, 16, device)
        reference.transformer.build_mpt_alibi_tensor = told
        close(ours(tokens).logits, reference_logits(reference, tokens, positions=False))


def test_order_of_slopes() -> None:
    assert mpt_slopes(8) == alibi_slopes(8)
    assert mpt_slopes(6) == tuple(2.0**-e for e in (2, 4, 6, 8, 1, 3))
    assert alibi_slopes(6) == tuple(2.0**-e for e in (2, 4, 6, 8, 1, 3))
    assert mpt_slopes(5) == tuple(2.0**-e for e in (2, 4, 6, 8, 1))
    assert mpt_slopes(1) == (2.0**-8,)


@pytest.mark.parametrize("key", ["softmax_scale", "alibi_bias_max", "clip_qkv"])
def test_refused_numbers(key: str) -> None:
    config = build(n_heads=4).config.to_dict()
    for value in (float("nan"), -1.0, 10**4000):
        with refuses(f"'{key}'"):
            read_config(Config(config | {"attn_config": {key: value}}))


@pytest.mark.parametrize(
    ("key", "value"),
    [("qk_ln", True), ("prefix_lm", True), ("alibi", False), ("attn_type", "multiquery_attention"), ("rope", True)],
)
def test_refused_attention(key: str, value: object) -> None:
    config = build(n_heads=4).config.to_dict()
    with refuses(key):
        read_config(Config(config | {"attn_config": {"alibi": True} | {key: value}}))


def test_refused(tmp_path: Path) -> None:
    config = build(n_heads=4).config.to_dict()
    with refuses("4 x d_model"):
        phylon.save(phylon.build(mpt_spec(d_model=24, n_heads=3, d_ff=48), device="cpu"), tmp_path / "a", format="hf")
    for key, value in (
        ("expansion_ratio", 2),
        ("no_bias", False),
        ("logit_scale", "inv_sqrt_d_model"),
        ("norm_type", "rmsnorm"),
        ("ffn_config", {"ffn_type": "mptglu", "ffn_act_fn": {"name": "silu"}}),
    ):
        with refuses(key):
            read_config(Config(config | {key: value}))
