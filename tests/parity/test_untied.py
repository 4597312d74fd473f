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
    assert all(torch.equal(before[key], after[key]) for key in before if key not in dead)
    again, info = type(reference).from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert torch.equal(values(again.eval(), theirs), expected)
    back = phylon.load(tmp_path / "b", device="cpu")
    assert back.spec == model.spec


@pytest.mark.parametrize("name", [n for n in HEADS if HEADS[n][1]])
def test_files_of_older_releases(name: str, tmp_path: Path) -> None:
    """They tied the two biases, and both stacks to the shared table, whatever was said, and stored them once."""
    reference = made(name, tmp_path / "a")
    theirs, ours = inputs(name)
    (dead,) = HEADS[name][1]
    read = list(HEADS[name][2]) or [dead.replace("shared", f"{stack}.embed_tokens") for stack in ("encoder", "decoder")]
    with torch.no_grad():
        for key in read:
            reference.get_parameter(key).copy_(reference.get_parameter(dead))
    tensors = load_file(tmp_path / "a/model.safetensors")
    save_file({key: tensors[key] for key in tensors.keys() - read}, tmp_path / "a/model.safetensors")
    model = phylon.load(tmp_path / "a", device="cpu")
    assert_close(values(model, ours), values(reference, theirs), 3e-5 if name.startswith("switch") else 1e-5)


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
