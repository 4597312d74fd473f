"""StarCoder against ``GPTBigCodeForCausalLM``."""

from pathlib import Path

import pytest
import torch

import phylon
from parity.decoders import VOCAB, check, refuses, tokens_of, transformers
from phylon.families.base import Config
from phylon.families.starcoder import read_config

CONFIGS = {
    "multi-query": {},
    "odd feed-forward, untied": {"n_inner": 41, "activation_function": "relu", "tie_word_embeddings": False},
    "no scale": {"scale_attn_weights": False},
}


def build(**changes: object):
    sizes = {"n_embd": 24, "n_head": 3, "n_layer": 2, "vocab_size": VOCAB, "n_positions": 64}
    config = transformers.GPTBigCodeConfig(**(sizes | changes), attn_implementation="eager")
    return transformers.GPTBigCodeForCausalLM(config)


@pytest.mark.parametrize("name", CONFIGS)
def test_parity(name: str, tmp_path: Path) -> None:
    check(build(**CONFIGS[name]), tmp_path)


def test_heads_of_their_own(tmp_path: Path) -> None:
    """GPT-2 in another layout, q, k and v of each head in turn; a model that forgot where it is from becomes GPT-2."""
    ours = check(build(multi_query=False), tmp_path)
    ours.family = None
    phylon.save(ours, tmp_path / "gpt2", format="hf")
    again = phylon.load(tmp_path / "gpt2", device="cpu")
    assert (again.family, again.spec.replace(init=ours.spec.init)) == ("gpt2", ours.spec)
    with torch.no_grad():
        assert torch.equal(again(tokens_of()).logits, ours(tokens_of()).logits)


def test_refused() -> None:
    config = build().config.to_dict()
    with refuses("add_cross_attention"):
        read_config(Config(config | {"add_cross_attention": True}))
