"""Masked-LM heads and encoder-decoders whose matrices are not shared, against the reference, both ways."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import phylon
from phylon.families import family

from .decoders import transformers
from .harness import assert_close, differs, draw, edit_config

HEADS: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    "bert": ("BertForPreTraining", ("cls.predictions.bias",), {"cls.predictions.decoder.bias": "cls.predictions.bias"}),
    "roberta": ("RobertaForMaskedLM", ("lm_head.bias",), {"lm_head.decoder.bias": "lm_head.bias"}),
    "distilbert": ("DistilBertForMaskedLM", (), {}),
    "roformer": (
        "RoFormerForMaskedLM",
        ("cls.predictions.bias",),
        {"cls.predictions.decoder.bias": "cls.predictions.bias"},
    ),
    "transformer2017": ("MarianMTModel", ("model.shared.weight",), {}),
    "switch": ("SwitchTransformersForConditionalGeneration", ("shared.weight",), {}),
    "marian, bare": ("MarianModel", ("shared.weight",), {}),
    "switch, bare": ("SwitchTransformersModel", ("shared.weight",), {}),
}
"""By family: the class, what it keeps and does not read, and how its older releases named what it reads."""
FAMILIES = {"marian, bare": "transformer2017", "switch, bare": "switch"}


def made(name: str, folder: Path) -> Any:
    """A random reference, saved; what it does not read is random too."""
    found = family(FAMILIES.get(name, name))
    assert found.hf is not None
    cls = getattr(transformers, HEADS[name][0])
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "decoder_start_token_id": 0}
    said = ids | found.hf.write(found.cases()[0]) | {"tie_word_embeddings": False}
    said = {key: value for key, value in said.items() if key not in ("architectures", "model_type")}
    reference = cls(cls.config_class(**said)).eval()
    draw(reference)
    reference.save_pretrained(folder)
    return reference


def inputs(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Theirs and ours."""
    tokens, source = torch.randint(2, 37, (2, 2, 11), generator=torch.Generator().manual_seed(3))
    if HEADS[name][0].startswith(("Marian", "Switch")):
        return {"input_ids": source, "decoder_input_ids": tokens}, {"tokens": tokens, "source": source}
    return {"input_ids": tokens}, {"tokens": tokens}


@torch.no_grad()
def values(model: Any, given: dict[str, Tensor]) -> Tensor:
    out = model(**given)
    for key in ("prediction_logits", "logits", "last_hidden_state", "hidden"):
        if getattr(out, key, None) is not None:
            return getattr(out, key)
    raise AssertionError


@pytest.mark.parametrize("name", HEADS)
def test_both_ways(name: str, tmp_path: Path) -> None:
    theirs, ours = inputs(name)
    reference, dead = made(name, tmp_path / "a"), HEADS[name][1]
    model = phylon.load(tmp_path / "a", device="cpu")
    expected = values(reference, theirs)
    assert_close(values(model, ours), expected, 3e-5 if name.startswith("switch") else 1e-5)
    phylon.save(model, tmp_path / "b", format="hf")
    said = json.loads((tmp_path / "b/config.json").read_text())
    assert said["tie_word_embeddings"] is False
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in "ab")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert set(dead) <= model.unread.keys()
    again, info = type(reference).from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert torch.equal(values(again.eval(), theirs), expected)
    back = phylon.load(tmp_path / "b", device="cpu")
    assert back.spec == model.spec


@pytest.mark.parametrize("name", [n for n in HEADS if HEADS[n][1]])
def test_what_is_not_read_goes_back_as_it_was(name: str, tmp_path: Path) -> None:
    """Through a native folder, after training, in another dtype; a copy of what is read is no more than that."""
    made(name, tmp_path / "a")
    (dead,) = HEADS[name][1]
    tensors = load_file(tmp_path / "a/model.safetensors")
    tensors[dead] = tensors[dead].half()  # another dtype than the rest
    save_file(tensors, tmp_path / "a/model.safetensors", metadata={"format": "pt"})
    native = phylon.save(phylon.load(tmp_path / "a", device="cpu"), tmp_path / "native")
    phylon.save(phylon.load(native, device="cpu"), tmp_path / "b", format="hf")
    after = load_file(tmp_path / "b/model.safetensors")
    assert after.keys() == tensors.keys()
    assert all(after[key].dtype == tensors[key].dtype and torch.equal(after[key], tensors[key]) for key in tensors)

    model = phylon.load(tmp_path / "a", device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    phylon.save(model, tmp_path / "trained", format="hf")
    trained = load_file(tmp_path / "trained/model.safetensors")
    same = {key for key in tensors if torch.equal(trained[key], tensors[key])}
    assert same == {key for key in tensors if key == dead or "embed_positions" in key}
    cast = phylon.load(tmp_path / "a", device="cpu", dtype="bfloat16")
    assert cast.unread[dead].dtype == torch.bfloat16

    read = next(iter(HEADS[name][2]), dead.replace("shared", "encoder.embed_tokens"))
    save_file(tensors | {dead: tensors[read].clone()}, tmp_path / "a/model.safetensors", metadata={"format": "pt"})
    model = phylon.load(tmp_path / "a", device="cpu")
    assert dead not in model.unread
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    copied = load_file(phylon.save(model, tmp_path / "copied", format="hf") / "model.safetensors")
    assert torch.equal(copied[dead], tensors[read] + 1)
    save_file(tensors | {dead: torch.zeros(3)}, tmp_path / "a/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(phylon.UserError, match=rf"'{dead}' is \(3,\), the model needs"):
        phylon.load(tmp_path / "a", device="cpu")


@pytest.mark.parametrize("name", [n for n in HEADS if HEADS[n][1]])
def test_files_of_older_releases(name: str, tmp_path: Path) -> None:
    """They tied the two biases, and both stacks to the shared table, whatever was said, and stored them once.

    The reference draws anew what it then lacks, tables at random and biases as zeros, which ours refuses by name.
    """
    reference = made(name, tmp_path / "a")
    (dead,) = HEADS[name][1]
    read = list(HEADS[name][2]) or [dead.replace("shared", f"{stack}.embed_tokens") for stack in ("encoder", "decoder")]
    tensors = load_file(tmp_path / "a/model.safetensors")
    stored = {key: tensors[key] for key in tensors.keys() - read}
    save_file(stored, tmp_path / "a/model.safetensors", metadata={"format": "pt"})
    again, info = type(reference).from_pretrained(tmp_path / "a", output_loading_info=True)
    assert set(info["missing_keys"]) == set(read)
    assert not any(torch.equal(again.get_parameter(key), tensors[dead]) for key in read)
    names = ", ".join(f"'{key}'" for key in read)
    said = f"{len(read)} missing \\({names}, in whose place '{dead}' is not read: store a copy of it under that name"
    with pytest.raises(phylon.UserError, match=said):
        phylon.load(tmp_path / "a", device="cpu")


@pytest.mark.parametrize("name", ["transformer2017", "switch", "t5"])
def test_an_untied_head_that_the_file_lacks(name: str, tmp_path: Path) -> None:
    """Named as missing; where the configuration ties it, the shared table is what is meant."""
    found = family(name)
    phylon.save(phylon.build(found.cases()[0], device="cpu"), tmp_path / "a", format="hf")
    tied = phylon.load(tmp_path / "a", device="cpu")
    assert "heads.lm.proj.weight" in {tie.name for tie in tied.spec.ties}
    assert "lm_head.weight" not in load_file(tmp_path / "a/model.safetensors")
    edit_config(tmp_path / "a", {"tie_word_embeddings": False})
    with pytest.raises(phylon.UserError, match=r"missing \(.*'lm_head.weight'"):
        phylon.load(tmp_path / "a", device="cpu")


def test_tied_is_another_model(tmp_path: Path) -> None:
    """The control: the same file read as tied is refused, and the head counts."""
    made("bert", tmp_path / "a")
    model = phylon.load(tmp_path / "a", device="cpu")
    _, ours = inputs("bert")
    before = values(model, ours)
    assert "heads.mlm.proj.weight" in model.state_dict()
    with torch.no_grad():
        model.heads.mlm.proj.weight.copy_(model.encoder.embed.tokens.weight)
    assert differs(values(model, ours), before)
    edit_config(tmp_path / "a", {"tie_word_embeddings": True})
    with pytest.raises(phylon.UserError, match=f"{tmp_path.name}.*differ, but the model ties them"):
        phylon.load(tmp_path / "a", device="cpu")


def test_tied_in_part_is_not_said(tmp_path: Path) -> None:
    spec = family("transformer2017").cases()[0]
    model = phylon.build(spec.replace(ties=spec.ties[:1]), device="cpu")
    model.family = "transformer2017"
    with pytest.raises(phylon.UserError, match="all together or not at all"):
        phylon.save(model, tmp_path / "a", format="hf")
