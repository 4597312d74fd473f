"""StarCoder against ``GPTBigCodeForCausalLM``."""

from pathlib import Path

import pytest
import torch
from decoders import VOCAB, check, close, drawn, reference_logits, refuses, tokens_of, transformers
from safetensors.torch import load_file

import phylon
from phylon.families.base import Config
from phylon.families.starcoder import hf_layout, read_config
from phylon.hub.load import stored_tensors

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
    """This is GPT-2 exactly, and saved as such; the layout with q, k, v of each head in turn goes back bit for bit."""
    reference = drawn(build(multi_query=False))
    reference.save_pretrained(tmp_path / "theirs")
    ours = phylon.load(tmp_path / "theirs", device="cpu")
    tokens = tokens_of()
    with torch.no_grad():
        close(ours(tokens).logits, reference_logits(reference, tokens, positions=True))
    back = dict(hf_layout(ours.spec).unmap(stored_tensors(ours)))
    theirs = load_file(tmp_path / "theirs/model.safetensors")
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], theirs[name]) for name in theirs)
    phylon.save(ours, tmp_path / "ours", format="hf")
    assert phylon.load(tmp_path / "ours", device="cpu").spec == ours.spec


def test_refused() -> None:
    config = build().config.to_dict()
    with refuses("add_cross_attention"):
        read_config(Config(config | {"add_cross_attention": True}))
