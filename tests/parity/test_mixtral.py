"""Mixtral against ``MixtralForCausalLM``."""

from pathlib import Path
from typing import Any

import pytest
import torch

import phylon
from parity.decoders import LENGTHS, VOCAB, check, close, padded, refuses, tokens_of, transformers
from parity.harness import load_reference, ours_to_reference
from parity.margins import assert_clear
from phylon.account import account
from phylon.families import family
from phylon.families.base import Config
from phylon.families.mixtral import read_config
from phylon.layers.ffn.dispatchers import Capacity
from phylon.layers.ffn.moe import MoE
from phylon.layers.ffn.routers import RenormalisedRouter
from phylon.patterns import Causal, Window
from phylon.spec.override import override

SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "num_local_experts": 4,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window, odd heads, tied": {"sliding_window": 4, "head_dim": 10, "tie_word_embeddings": True},
    "top-3 of 5, jitter": {"num_local_experts": 5, "num_experts_per_tok": 3, "router_jitter_noise": 0.1},
    "one": {"num_local_experts": 1, "num_experts_per_tok": 1, "hidden_act": "gelu"},
}


def build(**changes: Any) -> Any:
    config = transformers.MixtralConfig(**(SIZES | changes))
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize("name", CONFIGS)
def test_parity(name: str, tmp_path: Path) -> None:
    model = check(build(**CONFIGS[name]), tmp_path)
    assert_clear(model, tokens_of())
    moe = model.spec.decoder.blocks[1].op("ffn")
    assert isinstance(moe, MoE)
    assert moe.n_experts == CONFIGS[name].get("num_local_experts", 4)
    assert isinstance(model.spec.decoder.blocks[0].op("attn").pattern, Window if "window" in name else Causal)


@pytest.mark.parametrize("case", range(len(family("mixtral").cases())))
def test_cases_both_ways(case: int, tmp_path: Path) -> None:
    ours_to_reference(family("mixtral").cases()[case], tmp_path)


@torch.no_grad()
def test_balance_loss_of_one_row_is_the_reference_s(tmp_path: Path) -> None:
    """The reference pools all rows and blocks and counts each of k choices whole: k times ours, for one row."""
    model = check(build(), tmp_path)
    theirs = load_reference(tmp_path / "theirs")
    for length in LENGTHS:
        ids = tokens_of(shape=(1, length))
        wanted = theirs(ids, output_router_logits=True).router_logits
        aux = model(ids).aux
        for i, logits in enumerate(wanted):
            one = transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func((logits,), 4, 2)
            close(aux[f"decoder.blocks.{i}.ffn.balance"].mean, one / 2)
            z = torch.logsumexp(logits, -1).square().mean()
            close(aux[f"decoder.blocks.{i}.ffn.z_loss"].mean, z)


@torch.no_grad()
def test_padding_takes_no_capacity_and_no_expert(tmp_path: Path) -> None:
    """The reference sends padding to experts, without harm, because it is dropless; ours never computes it."""
    model = check(build(), tmp_path)
    segments = padded("left")
    tokens = tokens_of()
    other = tokens.clone()
    other[segments == 0] = 5
    for name, term in model(tokens, segments=segments).aux.items():
        assert int(term.count) == (len(LENGTHS) if "balance" in name else sum(LENGTHS))
        close(model(other, segments=segments).aux[name].mean, term.mean)


def test_what_the_format_cannot_say(tmp_path: Path) -> None:
    model = phylon.build(family("mixtral").cases()[0], device="cpu")
    for change, words in (
        ({"dispatch": Capacity(factor=1.0)}, "an expert capacity cannot be said"),
        ({"expert.bias": True}, "without biases"),
        ({"shared": {"kind": "glu", "d_ff": 8}}, "no family"),
    ):
        spec = override(model.spec, {f"decoder.blocks.*.ffn.{k}": v for k, v in change.items()})
        with refuses(words):
            phylon.save(phylon.build(spec, device="cpu"), tmp_path / "x", format="hf")


def test_silent_configurations_mean_the_reference_s_defaults() -> None:
    spec = read_config(Config({k: v for k, v in SIZES.items() if "local" not in k} | {"model_type": "mixtral"}))
    moe, attention = spec.decoder.blocks[0].op("ffn"), spec.decoder.blocks[0].op("attn")
    assert (moe.n_experts, moe.router) == (8, RenormalisedRouter(top_k=2))
    assert attention.rotary.theta == 1e6
    assert spec.decoder.norm_final.eps == 1e-5
    for table in ({"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}):
        found = read_config(Config(SIZES | {"rope_parameters": table}))
        assert found.decoder.blocks[0].op("attn").rotary.theta == 1e6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts_per_tok": 5}, "top_k must be from 1 to n_experts 4"),
        ({"num_local_experts": 0}, "num_local_experts"),
        ({"n_shared_experts": 1}, "not understood"),
        ({"router_jitter_noise": 2.0}, "jitter"),
    ],
)
def test_configurations_that_do_not_fit(change: dict[str, Any], words: str) -> None:
    with refuses(words):
        read_config(Config(SIZES | change))


def test_released_sizes() -> None:
    figures = account("mixtral-8x7b")
    assert figures.params_total == 46_702_792_704
    assert figures.params_active == 12_879_925_248
