"""Falcon against ``FalconForCausalLM``: all three arrangements."""

from pathlib import Path

import pytest
import torch

import phylon
from parity.decoders import VOCAB, check, close, drawn, reference_logits, refuses, tokens_of, transformers
from phylon.families.base import Config
from phylon.families.falcon import read_config
from phylon.hub.reference import transformers_reference

NEW = {"new_decoder_architecture": True, "num_attention_heads": 4, "num_kv_heads": 2}
RW = {"multi_query": False, "parallel_attn": False, "alibi": True, "bias": True, "num_attention_heads": 4}
CONFIGS = {
    "7b": {},
    "7b, sequential": {"parallel_attn": False, "bias": True},
    "7b, heads of their own": {"multi_query": False, "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    "40b": NEW | {"tie_word_embeddings": False},
    "40b, odd feed-forward, biases": NEW | {"ffn_hidden_size": 41, "bias": True},
    "40b with one norm": NEW | {"num_ln_in_parallel_attn": 1},
    "rw": RW,
    "multi-query alibi": {"alibi": True, "num_attention_heads": 4},
}


def build(**changes: object):
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "vocab_size": VOCAB}
    # With ALiBi only the reference's SDPA path is right: the eager one adds the bias twice.
    more = {"max_position_embeddings": 64, "attn_implementation": "sdpa" if changes.get("alibi") else "eager"}
    return transformers.FalconForCausalLM(transformers.FalconConfig(**(sizes | more | changes)))


@pytest.mark.parametrize("name", CONFIGS)
def test_parity(name: str, tmp_path: Path) -> None:
    check(build(**CONFIGS[name]), tmp_path, attn="sdpa" if CONFIGS[name].get("alibi") else "eager")


@pytest.mark.parametrize("n_heads", [3, 4])
def test_reference_adds_alibi_twice_when_eager(n_heads: int, tmp_path: Path) -> None:
    """The law the reference breaks: its backends differ. Its eager logits are those of slopes twice as steep."""
    reference = drawn(build(**(RW | {"num_attention_heads": n_heads}), attn_implementation="eager"))
    reference.save_pretrained(tmp_path)
    ours = phylon.load(tmp_path, device="cpu")
    alibi = ours.spec.decoder.blocks[0].op("attn").score_bias
    doubled = phylon.override(
        ours.spec, {"decoder.blocks.*.attn.score_bias.slopes": [2 * slope for slope in alibi.slopes]}
    )
    steep = phylon.build(doubled, device="cpu").eval()
    steep.load_state_dict(ours.state_dict())
    with torch.no_grad():
        theirs = reference_logits(reference, tokens_of(), positions=True)
        close(steep(tokens_of()).logits, theirs)
        # The control: it is not what the configuration says, nor what its other backend computes.
        assert float((ours(tokens_of()).logits - theirs).abs().max()) > 0.01 * float(theirs.abs().max())
    assert "attention 'sdpa'" in transformers_reference(tmp_path).about


def test_alibi_is_not_rounded(tmp_path: Path) -> None:
    """The law the reference breaks: it rounds the bias to bfloat16 by position, so a shift moves the logits."""
    reference = drawn(build(**RW))
    reference.config.max_position_embeddings = 2048
    reference.save_pretrained(tmp_path)
    ours = phylon.load(tmp_path, device="cpu")
    tokens = tokens_of(shape=(1, 320))
    with torch.no_grad():
        whole, theirs = ours(tokens).logits, reference_logits(reference, tokens, positions=False)
        moved = ours(tokens, positions=torch.arange(1000, 1320)[None]).logits
    scale = float(whole.abs().max())
    assert float((moved - whole).abs().max()) < 1e-5 * scale
    assert float((theirs - whole)[:, 257:].abs().max()) > 1e-3 * scale


def test_refused() -> None:
    config = build().config.to_dict()
    with refuses("new_decoder_architecture"):
        read_config(Config(config | {"multi_query": False, "num_kv_heads": 1}))
    with refuses("apply_residual_connection_post_layernorm"):
        read_config(Config(config | {"apply_residual_connection_post_layernorm": True}))
    with refuses("partial rotary"):
        read_config(Config(config | {"partial_rotary_factor": 0.5}))
    with refuses("num_ln_in_parallel_attn"):
        read_config(Config(config | {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 3}))
    with refuses("'parallel_attn' is False beside 'new_decoder_architecture'"):
        read_config(Config(config | NEW | {"parallel_attn": False}))
    with refuses("'num_ln_in_parallel_attn' is 2", "new_decoder_architecture"):
        read_config(Config(config | {"num_ln_in_parallel_attn": 2}))
    with refuses("'num_kv_heads' is 2"):
        read_config(Config(config | {"multi_query": False, "num_attention_heads": 4, "num_kv_heads": 2}))
    with refuses("'ff_factor' is 3", "the feed-forward width is"):
        read_config(Config(config | {"ff_factor": 3}))
    assert read_config(Config(config | {"ff_factor": config["ffn_hidden_size"] // config["hidden_size"]}))
