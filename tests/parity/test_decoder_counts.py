"""Exact parameter counts of every named decoder, and the reference's count for the configuration that we write."""

import pytest
import torch

from parity.decoders import transformers
from phylon.families import family
from phylon.model import build_meta

NAMES = ("gpt3", "gpt_neo", "gpt_neox", "gptj", "bloom", "mpt", "falcon", "starcoder", "qwen3", "gemma3")
PRESETS = [(name, preset) for name in NAMES for preset in family(name).presets]


@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_golden(name: str, preset: str) -> None:
    chosen = family(name)
    spec = chosen.presets[preset]()
    count = sum(p.numel() for p in build_meta(spec).parameters())
    assert count == chosen.golden[preset], f'"{preset}": {count:_},'
    if chosen.hf is None:
        return
    config = chosen.hf.write(spec)
    with torch.device("meta"):
        reference = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    assert sum(p.numel() for p in reference.parameters()) == count
