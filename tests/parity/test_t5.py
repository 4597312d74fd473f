"""T5 of both versions against the reference; case 7 (float16) and case 31 (the bias and the state)."""

from pathlib import Path

import pytest
import torch
import transformers as hf

from phylon.families import family, preset
from phylon.families.t5 import t5_spec
from phylon.hub import load, save
from phylon.model import Model, build_meta
from phylon.spec import UserError

from .encoders import refuses
from .harness import REMOVED, assert_close, draw, drawn, load_reference, random_tokens
from .seq2seq import check, logits, ours_saved

SIZES = {"vocab_size": 41, "d_model": 24, "d_kv": 10, "d_ff": 35, "num_layers": 2, "num_heads": 3}
SIZES |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
V11 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
CONFIGS = {
    "v1.0": {},
    "v1.1": V11,
    "one decoder block": {"num_decoder_layers": 1, "d_kv": 5},
    "buckets": {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 11, "num_heads": 4},
    "gelu": {"feed_forward_proj": "gelu", "layer_norm_epsilon": 1e-3},
    "gated silu": {"feed_forward_proj": "gated-silu"},
}


def calm(model: torch.nn.Module) -> torch.nn.Module:
    """Queries as small as released ones: T5 does not scale its scores, and a softmax of size 12 amplifies rounding."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".q.weight", "q_proj.weight")):
                parameter *= 10**-0.5
    return model


def own_head(reference) -> None:
    """Version 1.1's head, which this reference ties unless it holds numbers of its own."""
    calm(reference)
    if not reference.config.scale_decoder_outputs:
        weight = torch.randn(reference.lm_head.weight.shape, generator=torch.Generator().manual_seed(5))
        reference.lm_head.weight = torch.nn.Parameter(weight / 5)


TINY = t5_spec(d_model=24, n_layers=2, n_heads=3, head_dim=10, d_ff=40, vocab_size=37, head_scale=24**-0.5)


@pytest.mark.parametrize("name", CONFIGS)
def test_reference_to_ours(name: str, tmp_path: Path) -> None:
    changes = CONFIGS[name]
    model = check(hf.T5ForConditionalGeneration, hf.T5Config(**(SIZES | changes)), tmp_path, prepare=own_head)
    assert model.generation.decoder_start_id == 0
    assert (len(model.spec.ties), model.spec.heads["lm"].scale) == ((1, None) if name == "v1.1" else (2, 24**-0.5))


@pytest.mark.parametrize("number", [0, 1])
def test_ours_to_reference(number: int, tmp_path: Path) -> None:
    ours_saved(family("t5").cases()[number], hf.T5ForConditionalGeneration, tmp_path, calm)


@pytest.mark.parametrize("cls", [hf.T5Model, hf.T5EncoderModel])
def test_without_head(cls: type, tmp_path: Path) -> None:
    reference = cls(hf.T5Config(**SIZES)).eval()
    draw(reference)
    calm(reference)
    reference.save_pretrained(tmp_path / "a")
    model = load(tmp_path / "a", device="cpu")
    save(model, tmp_path / "b", format="hf")
    again = load_reference(tmp_path / "b", cls)
    source, tokens = random_tokens(41, 2, 30), random_tokens(41, 2, 9, seed=3)
    with torch.no_grad():
        if cls is hf.T5EncoderModel:
            ours, theirs = model(source).hidden, again(input_ids=source)
        else:
            ours, theirs = model(tokens, source=source).hidden, again(input_ids=source, decoder_input_ids=tokens)
    assert_close(ours, theirs.last_hidden_state)
    assert load(tmp_path / "b", device="cpu").spec == model.spec


def test_golden_counts() -> None:
    """The five sizes of each version; all agree with the reference built from the same configuration."""
    found = family("t5")
    assert set(found.golden) == set(found.presets)
    for name, count in found.golden.items():
        assert sum(p.numel() for p in build_meta(preset(name)).parameters()) == count, name
    for name in ("t5-small", "t5-v1.1-small"):
        assert reference_count(name) == found.golden[name]


def reference_count(name: str) -> int:
    """Parameters of the reference, built on the meta device; its head counts where the version has its own."""
    config = hf.T5Config(**family("t5").hf.write(preset(name)))
    with torch.device("meta"):
        model = hf.T5ForConditionalGeneration(config)
    own = 0 if config.scale_decoder_outputs else model.lm_head.weight.numel()
    return sum(p.numel() for p in model.parameters()) + own


@pytest.fixture(scope="module")
def model() -> Model:
    return calm(drawn(TINY))


def test_bias_stands_at_the_query(model: Model) -> None:
    """Case 31: 30 tokens, then 10 onto the state."""
    source, tokens = random_tokens(37, 2, 50), random_tokens(37, 2, 40, seed=1)
    whole, state = logits(model, tokens, source=source), model.new_state(2)
    first = logits(model, tokens[:, :30], source=source, state=state)
    rest = logits(model, tokens[:, 30:], state=state)
    assert_close(torch.cat([first, rest], dim=1), whole)


@pytest.mark.parametrize("gain", [1.0, 3e4])
def test_float16(gain: float) -> None:
    """Case 7: near fp32 where the numbers fit; refused where they do not, never clamped."""
    model, half = calm(drawn(TINY)), drawn(TINY).half()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ffn.down_proj" in name:
                parameter *= gain
    source, tokens = random_tokens(37, 2, 9), random_tokens(37, 2, 7, seed=1)
    expected = logits(model, tokens, source=source)
    assert bool(expected.isfinite().all())
    half.load_state_dict({name: t.half() for name, t in model.state_dict().items()})
    if gain > 1:
        with pytest.raises(UserError, match="overflow float16; load the model with dtype='bfloat16'"):
            logits(half, tokens, source=source)
        wide = half.to(torch.bfloat16)
        wide.load_state_dict({name: t.bfloat16() for name, t in model.state_dict().items()})
        assert bool(logits(wide, tokens, source=source).isfinite().all())
    else:
        assert_close(logits(half, tokens, source=source).float(), expected, 2e-2)


def test_refusals(tmp_path: Path) -> None:
    config = hf.T5Config(**SIZES, architectures=["T5ForConditionalGeneration"])
    refuses(tmp_path / "a", config, {"architectures": ["T5ForTokenClasification"]}, "is not supported.*")
    refuses(tmp_path / "b", config, {"is_decoder": True}, "'is_decoder' is True")
    refuses(tmp_path / "c", config, {"dense_act_fn": "sin"}, "unknown dense_act_fn")
    refuses(tmp_path / "d", config, {"d_kv": REMOVED}, "lacks 'd_kv'")
    refuses(tmp_path / "e", config, {"surprise": 1}, "not understood")
    exact = t5_spec(d_model=8, n_layers=1, n_heads=1, head_dim=4, activation="gelu", gated=True, tied=False)
    with pytest.raises(UserError, match="approximation by tanh"):
        family("t5").hf.write(exact)
