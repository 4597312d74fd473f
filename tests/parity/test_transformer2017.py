"""The Transformer of 2017 against the reference's Marian; the paper's interleaved sinusoids by hand."""

from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from phylon.families import family, preset
from phylon.families.transformer2017 import transformer2017_spec
from phylon.hub import load, save
from phylon.spec import UserError

from .encoders import golden, refuses
from .harness import assert_close, differs, drawn, random_tokens
from .seq2seq import check, logits, ours_saved

SIZES = {"vocab_size": 41, "d_model": 24, "max_position_embeddings": 40, "pad_token_id": 0, "eos_token_id": 1}
SIZES |= {f"{stack}_{name}": n for stack in ("encoder", "decoder") for name, n in (("layers", 2), ("ffn_dim", 35))}
SIZES |= {"encoder_attention_heads": 3, "decoder_attention_heads": 3, "decoder_start_token_id": 0}
SIZES |= {"forced_eos_token_id": None, "dropout": 0.1}
CONFIGS = {
    "plain": {"activation_function": "relu"},
    "scaled, swish": {"scale_embedding": True, "activation_function": "swish"},
    "other decoder": {"decoder_layers": 1, "decoder_ffn_dim": 17, "decoder_attention_heads": 2},
}

OPUS = {
    "_num_labels": 3,
    "add_bias_logits": False,
    "add_final_layer_norm": False,
    "bad_words_ids": [[40]],
    "classif_dropout": 0.0,
    "extra_pos_embeddings": 41,
    "normalize_before": False,
    "normalize_embedding": False,
    "num_beams": 6,
    "num_hidden_layers": 2,
    "static_position_embeddings": True,
}
"""What the released translation models say beside."""


def biased(reference) -> None:
    noise = torch.randn(reference.final_logits_bias.shape, generator=torch.Generator().manual_seed(7))
    reference.final_logits_bias.copy_(noise)


@pytest.mark.parametrize("name", CONFIGS)
def test_reference_to_ours(name: str, tmp_path: Path) -> None:
    config = hf.MarianConfig(**(SIZES | CONFIGS[name]))
    model = check(hf.MarianMTModel, config, tmp_path, prepare=biased, edit=OPUS)
    assert float(model.heads.lm.proj.bias.detach().abs().max()) > 1
    assert model.generation.decoder_start_id == 0


@pytest.mark.parametrize("number", [0, 1])
def test_ours_to_reference(number: int, tmp_path: Path) -> None:
    ours_saved(family("transformer2017").cases()[number], hf.MarianMTModel, tmp_path)


def test_stored_sinusoids_must_be_the_computed_ones(tmp_path: Path) -> None:
    """Older files hold them, and the reference computes with what it reads; they come back where they were."""
    reference = hf.MarianMTModel(hf.MarianConfig(**SIZES))
    reference.save_pretrained(tmp_path / "a")
    path = tmp_path / "a/model.safetensors"
    tables = {
        f"model.{stack}.embed_positions.weight": reference.get_parameter(f"model.{stack}.embed_positions.weight").data
        for stack in ("encoder", "decoder")
    }
    tensors = load_file(path)
    assert not tables.keys() & tensors.keys()
    save(load(tmp_path / "a", device="cpu"), tmp_path / "without", format="hf")
    assert load_file(tmp_path / "without/model.safetensors").keys() == tensors.keys()
    save_file(tensors | {name: table.clone() for name, table in tables.items()}, path)
    save(load(tmp_path / "a", device="cpu"), tmp_path / "with", format="hf")
    again = load_file(tmp_path / "with/model.safetensors")
    assert_close(torch.stack([again[name] for name in tables]), torch.stack(list(tables.values())))
    for name, table in tables.items():
        for wrong in (table * 1.1, table.roll(1, 0), table[:-1].clone()):
            save_file(tensors | {name: wrong}, path)
            with pytest.raises(UserError, match=r"embed_positions\.weight' is not what the configuration gives"):
                load(tmp_path / "a", device="cpu")


def test_golden_counts() -> None:
    """The paper's table 3 says 65 and 213 million; Marian of the same sizes has as many as ours."""
    for name, width, heads in (("transformer-base", 512, 8), ("transformer-big", 1024, 16)):
        sizes = {"vocab_size": 37_000, "d_model": width, "pad_token_id": 0, "eos_token_id": 0}
        for stack in ("encoder", "decoder"):
            sizes |= {f"{stack}_layers": 6, f"{stack}_ffn_dim": 4 * width, f"{stack}_attention_heads": heads}
        with torch.device("meta"):
            reference = hf.MarianMTModel(hf.MarianConfig(**sizes))
        counted = sum(p.numel() for p in reference.parameters() if p.requires_grad)
        assert counted == family("transformer2017").golden[name], (name, counted)
    golden("transformer2017")
    assert preset("transformer-big").decoder.blocks[0].op("cross_attn").head_dim == 64


def test_layouts_of_the_sinusoids_are_a_permutation() -> None:
    """The paper's model is Marian's with the columns of everything on the residual stream put in another order."""
    spec = transformer2017_spec(d_model=24, n_layers=1, n_heads=3, vocab_size=37)
    model = drawn(spec)
    encoder = spec.encoder.embed.positions
    halves = encoder.replace(layout="halves")
    changed = spec.replace(
        encoder=spec.encoder.replace(embed=spec.encoder.embed.replace(positions=halves)),
        decoder=spec.decoder.replace(embed=spec.decoder.embed.replace(positions=halves)),
    )
    other = drawn(changed)
    source, tokens = random_tokens(37, 2, 9), random_tokens(37, 2, 7, seed=1)
    ours = logits(model, tokens, source=source)
    assert differs(logits(other, tokens, source=source), ours)
    order = torch.cat([torch.arange(0, 24, 2), torch.arange(1, 24, 2)])
    reads = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "up_proj.weight", "tokens.weight", "lm.proj.weight")
    writes = ("o_proj.weight", "down_proj.weight", "o_proj.bias", "down_proj.bias", "norm_out.weight", "norm_out.bias")
    state = {}
    for name, tensor in model.state_dict().items():
        state[name] = tensor[:, order] if name.endswith(reads) else tensor[order] if name.endswith(writes) else tensor
    other.load_state_dict(state)
    assert_close(logits(other, tokens, source=source), ours)


def test_refusals(tmp_path: Path) -> None:
    config = hf.MarianConfig(**SIZES, architectures=["MarianMTModel"])
    refuses(tmp_path / "a", config, {"share_encoder_decoder_embeddings": False}, "separate source and target")
    refuses(tmp_path / "b", config, {"decoder_vocab_size": 40}, "'decoder_vocab_size' is 40")
    refuses(tmp_path / "c", config, {"normalize_before": True}, "behind the sum")
    refuses(tmp_path / "d", config, {"architectures": ["MarianForCausalLM"]}, "not supported")
    refuses(tmp_path / "e", config, {"activation_function": "swis"}, "did you mean 'swish'")
    paper = family("transformer2017").cases()[2]
    with pytest.raises(UserError, match="no family's hf format"):
        save(drawn(paper), tmp_path / "f", format="hf")
    with pytest.raises(UserError, match="stand in halves"):
        family("transformer2017").hf.write(paper)
