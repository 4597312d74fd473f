"""What a model has no use for goes back as it came: dropped tensors, ids and settings of generation, unknown words."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from phylon.checkpoint import open_safetensors, write_safetensors
from phylon.families import family
from phylon.families.bert import bert_spec
from phylon.families.llama import llama_spec
from phylon.hub import load, save
from phylon.model import ModelSpec

from .hub_data import TINY, hf_folder

BERT = {"d_model": 24, "n_layers": 2, "n_heads": 3, "vocab_size": 37, "max_seq_len": 16}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    source = open_safetensors(folder)
    return {name: source.read(name).clone() for name in source.tensors}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and torch.equal(a[k], b[k]) for k in a
    )


def mask(n: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    return torch.ones(1, 1, n, n).tril().to(dtype)


DROPPED: dict[str, tuple[ModelSpec, dict[str, torch.Tensor]]] = {
    "gpt2": (
        family("gpt2").cases()[0],
        {"transformer.h.0.attn.bias": mask(8, torch.uint8), "transformer.h.1.attn.masked_bias": torch.tensor(-1e4)},
    ),
    "gpt_neox": (
        family("gpt_neox").cases()[0],
        {
            "gpt_neox.layers.0.attention.bias": mask(8),
            "gpt_neox.layers.1.attention.masked_bias": torch.tensor(-1e9),
            "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.rand(3).half(),
        },
    ),
    "llama": (
        llama_spec(d_model=24, n_layers=2, n_heads=3, vocab_size=37, max_seq_len=16),
        {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.rand(4)},
    ),
    "bert": (
        bert_spec(**BERT, heads=("mlm",)),
        {
            "bert.embeddings.position_ids": torch.arange(16)[None],
            "bert.pooler.dense.weight": torch.randn(24, 24),
            "bert.pooler.dense.bias": torch.randn(24).half(),
        },
    ),
    "vit": (family("vit").cases()[0], {"vit.embeddings.mask_token": torch.randn(1, 1, 24)}),
}


@pytest.mark.parametrize("name", DROPPED)
def test_dropped_tensors_come_back(name: str, tmp_path: Path) -> None:
    """Through a native folder too; and the model is the same without them."""
    spec, more = DROPPED[name]
    folder = hf_folder(tmp_path / "a", spec)
    plain = tensors_of(folder)
    write_safetensors(folder / "model.safetensors", plain | more, {"format": "pt"})
    model = load(folder, device="cpu")
    assert same(model.unread, more)
    assert same(tensors_of(save(model, tmp_path / "b", format="hf")), plain | more)
    native = load(save(model, tmp_path / "n"), device="cpu")
    assert same(tensors_of(save(native, tmp_path / "c", format="hf")), plain | more)
    again = load(tmp_path / "c", device="cpu")
    assert same(dict(again.state_dict()), dict(model.state_dict()))
    native.unread = {}
    assert same(tensors_of(save(native, tmp_path / "d", format="hf")), plain)


def test_a_bare_file_gives_them_back_under_the_written_names(tmp_path: Path) -> None:
    spec, more = DROPPED["gpt2"]
    folder = hf_folder(tmp_path / "a", spec)
    plain = tensors_of(folder)
    short = {name.removeprefix("transformer."): tensor for name, tensor in (plain | more).items()}
    write_safetensors(folder / "model.safetensors", short, {"format": "pt"})
    assert same(tensors_of(save(load(folder, device="cpu"), tmp_path / "b", format="hf")), plain | more)


def test_the_decoder_of_a_t5_read_as_an_encoder_stays_in_its_file(tmp_path: Path) -> None:
    """It is another model, and may be larger than the encoder; the reference's encoder leaves it there too."""
    folder = hf_folder(tmp_path / "a", family("t5").cases()[0], architectures=["T5EncoderModel"])
    tensors = tensors_of(folder)
    assert any(name.startswith("decoder.block.1.") for name in tensors)
    model = load(folder, device="cpu")
    assert model.decoder is None
    assert not model.unread
    written = tensors_of(save(model, tmp_path / "b", format="hf"))
    assert same(written, {name: x for name, x in tensors.items() if name in written})
    assert not [name for name in tensors.keys() - written.keys() if not name.startswith(("decoder.", "lm_head."))]


def test_a_head_that_reads_the_pooler_writes_its_own(tmp_path: Path) -> None:
    """What a format now makes of the model comes before what the file held."""
    spec, more = DROPPED["bert"]
    folder = hf_folder(tmp_path / "a", spec)
    write_safetensors(folder / "model.safetensors", tensors_of(folder) | more, {"format": "pt"})
    other = load(hf_folder(tmp_path / "c", bert_spec(**BERT, heads=("class",))), device="cpu")
    other.unread = load(folder, device="cpu").unread
    written = tensors_of(save(other, tmp_path / "d", format="hf"))
    assert torch.equal(written["bert.pooler.dense.weight"], other.heads["class"].dense.weight)
    assert torch.equal(written["bert.embeddings.position_ids"], more["bert.embeddings.position_ids"])


WORDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "unknown words": (
        {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        {"_from_model_config": True, "max_new_tokens": 77, "cache_implementation": "static", "my_own": {"a": [1]},
         "bos_token_id": 1, "eos_token_id": 2, "transformers_version": "4.1"},
    ),
    "a setting that is not in use": ({"eos_token_id": 2}, {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [2]}),
    "settings in use": ({"eos_token_id": 2}, {"do_sample": True, "temperature": 1, "top_k": 0, "top_p": 0.9}),
    "another end": ({"eos_token_id": 2}, {"eos_token_id": [5, 7], "bos_token_id": 1}),
    "an end that is none": ({"eos_token_id": 2}, {"eos_token_id": 7}),
    "a padding beyond the vocabulary": ({"pad_token_id": 300, "eos_token_id": 2}, {"pad_token_id": 4000}),
    "a padding below": ({"pad_token_id": -1}, {"pad_token_id": None}),
    "nothing": ({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("through", ["hf", "native"])
def test_both_files_come_back_in_their_words(name: str, through: str, tmp_path: Path) -> None:
    ids, beside = WORDS[name]
    silent = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), ...)
    folder = hf_folder(tmp_path / "a", TINY, **silent | ids)
    (folder / "generation_config.json").write_text(json.dumps(beside))
    model = load(folder, device="cpu")
    if through == "native":
        model = load(save(model, tmp_path / "n"), device="cpu")
    again = save(model, tmp_path / "b", format="hf")
    for file in ("config.json", "generation_config.json"):
        assert json.loads((again / file).read_text()) == json.loads((folder / file).read_text()), file
    assert load(again, device="cpu").generation == model.generation


def test_what_has_changed_is_said_and_the_rest_kept(tmp_path: Path) -> None:
    beside = {"max_new_tokens": 77, "bos_token_id": 1, "eos_token_id": [5, 7], "temperature": 0.6, "top_p": 0.5}
    folder = hf_folder(tmp_path / "a", TINY, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    (folder / "generation_config.json").write_text(json.dumps(beside))
    model = load(folder, device="cpu")
    assert model.generation.temperature is None
    for changes in (
        {"eos_ids": (9,)},
        {"eos_ids": ()},
        {"bos_id": None, "pad_id": None},
        {"temperature": 0.3},
        {"temperature": 0.3, "eos_ids": (9, 2)},
        {"repetition_penalty": 1.5},
    ):
        model.generation = load(folder, device="cpu").generation.replace(**changes)
        again = save(model, tmp_path / "b", format="hf", replace=True)
        assert load(again, device="cpu").generation == model.generation
        assert json.loads((again / "generation_config.json").read_text())["max_new_tokens"] == 77
    model.generation = load(folder, device="cpu").generation.replace(pad_id=3)
    save(model, tmp_path / "b", format="hf", replace=True)
    said, told = (json.loads((tmp_path / "b" / f"{n}.json").read_text()) for n in ("config", "generation_config"))
    assert (said["bos_token_id"], said["eos_token_id"], said["pad_token_id"]) == (1, 2, 3)
    assert told == beside | {"pad_token_id": 3}


def test_a_sampler_that_is_turned_off_stays_off(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "a", TINY, temperature=0.2, do_sample=True)
    asked = {"do_sample": True, "temperature": 0.2, "top_p": 0.5, "num_beams": 1}
    (folder / "generation_config.json").write_text(json.dumps(asked))
    model = load(folder, device="cpu")
    assert (model.generation.temperature, model.generation.top_p) == (0.2, 0.5)
    for changes in ({"temperature": None}, {"temperature": None, "top_p": None}, {"top_k": 7}):
        model.generation = load(folder, device="cpu").generation.replace(**changes)
        again = save(model, tmp_path / "b", format="hf", replace=True)
        assert load(again, device="cpu").generation == model.generation
        assert json.loads((again / "generation_config.json").read_text())["num_beams"] == 1
