"""Exact parameter counts of every named decoder, and the reference's count for the configuration that we write."""

import pytest
import torch

from parity.decoders import transformers
from phylon.families import family
from phylon.model import build_meta

NAMES = ("gpt3", "gpt_neo", "gpt_neox", "gptj", "bloom", "mpt", "falcon", "starcoder", "qwen3", "gemma3")
SPARSE = ("switch", "mixtral", "deepseek")
PRESETS = [(name, preset) for name in ("gpt2", "llama", "mistral", *NAMES) for preset in family(name).presets]
# Their class makes a module of every expert.
PRESETS += [pytest.param(n, p, marks=pytest.mark.slow) for n in SPARSE for p in family(n).presets]


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
        cls = getattr(transformers, config["architectures"][0])
        reference = cls._from_config(transformers.AutoConfig.for_model(**config))
    theirs = sum(p.numel() for p in reference.parameters())
    if "mtp" in spec.heads:
        # The reference leaves that head out: a block like the last one, three norms and the map of two vectors to one.
        blocks, width = build_meta(spec).decoder.blocks, spec.last_stack.d_model  # type: ignore[union-attr]
        theirs += sum(p.numel() for p in blocks[-1].parameters()) + 3 * width + 2 * width**2
    assert theirs == count
