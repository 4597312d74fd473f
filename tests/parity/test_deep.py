"""Deep models: our error to an fp64 run is at most twice the reference implementation's."""

import copy

import pytest
import torch

from phylon.families.decoder import llama_spec
from phylon.families.gpt2 import gpt2_spec
from phylon.hub import save
from phylon.layers.positions.rotary import Llama3Scaling, Rotary
from phylon.model import ModelSpec, build
from phylon.patterns import Window

from .harness import draw, load_reference, our_logits, random_tokens, reference_logits, vocabulary

_SCALED = Rotary(
    theta=5e5, scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=64)
)
DEEP: dict[str, ModelSpec] = {
    "gpt2": gpt2_spec(d_model=96, n_layers=24, n_heads=6, vocab_size=101, max_seq_len=128),
    "llama": llama_spec(
        d_model=96, n_layers=24, n_heads=6, n_kv_heads=2, d_ff=200, vocab_size=101, max_seq_len=128, rotary=_SCALED
    ),
    "mistral": llama_spec(
        d_model=96, n_layers=24, n_heads=6, d_ff=200, vocab_size=101, max_seq_len=128, pattern=Window(size=17)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEEP)
def test_deep(name, tmp_path):
    spec = DEEP[name]
    model = build(spec, device="cpu").eval()
    draw(model)
    save(model, tmp_path / "a", format="hf")
    reference = load_reference(tmp_path / "a")
    tokens = random_tokens(vocabulary(spec), batch=4, length=100)
    truth = our_logits(copy.deepcopy(model).double(), tokens)
    ours = (our_logits(model, tokens).double() - truth).abs()
    theirs = (reference_logits(reference, tokens).double() - truth).abs()
    assert truth.abs().max() > 1
    assert ours.pow(2).mean().sqrt() <= 2 * theirs.pow(2).mean().sqrt()
    assert ours.max() <= 2 * theirs.max()
    # The fp64 run is itself the reference's, up to what fp32 frequencies cost the reference.
    assert theirs.max() <= 1e-2 * truth.abs().max(), (theirs.max(), truth.abs().max())
    assert torch.isfinite(truth).all()
