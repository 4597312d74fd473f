"""RoFormer against the reference; rotated values and a narrower embedding are refused. Case 21, interleaved pairs."""

from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import phylon
from phylon.families import family

from .encoders import check, golden, ours_saved, refuses

LOGITS = lambda out: out.logits
SPAN = {"span": lambda out: torch.stack([out.start_logits, out.end_logits], dim=-1)}
SIZES = {"vocab_size": 41, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
SIZES |= {"intermediate_size": 35, "max_position_embeddings": 40}
TASKS = {
    "bare": (hf.RoFormerModel, {}, {}),
    "mlm": (hf.RoFormerForMaskedLM, {"mlm": LOGITS}, {"hidden_act": "gelu_new"}),
    "class": (hf.RoFormerForSequenceClassification, {"class": LOGITS}, {"num_labels": 5, "num_attention_heads": 2}),
    "token": (hf.RoFormerForTokenClassification, {"token": LOGITS}, {"num_labels": 3}),
    "span": (hf.RoFormerForQuestionAnswering, SPAN, {"hidden_act": "relu"}),
}


@pytest.mark.parametrize("name", TASKS)
def test_roformer(name: str, tmp_path: Path) -> None:
    cls, outputs, changes = TASKS[name]
    check(cls, hf.RoFormerConfig(**(SIZES | changes)), tmp_path, outputs)


@pytest.mark.parametrize("number", [0, 1])
def test_ours_to_reference(number: int, tmp_path: Path) -> None:
    cls = (hf.RoFormerForMaskedLM, hf.RoFormerForSequenceClassification)[number]
    spec = family("roformer").cases()[number]
    ours_saved(spec, cls, tmp_path, dict.fromkeys(spec.heads, LOGITS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_stored_table_must_be_the_computed_one(dtype: torch.dtype, tmp_path: Path) -> None:
    """The reference computes with the table that it reads."""
    hf.RoFormerForMaskedLM(hf.RoFormerConfig(**SIZES)).to(dtype).save_pretrained(tmp_path)
    phylon.load(tmp_path, device="cpu")
    path, name = tmp_path / "model.safetensors", "roformer.encoder.embed_positions.weight"
    tensors = load_file(path)
    for wrong in (tensors[name] * 1.1, tensors[name].roll(1, 0), tensors[name][:-1].clone()):
        save_file(tensors | {name: wrong}, path, metadata={"format": "pt"})
        with pytest.raises(phylon.UserError, match=r"embed_positions\.weight' is not what the configuration gives"):
            phylon.load(tmp_path, device="cpu")


def test_golden_counts() -> None:
    golden("roformer")


def test_refusals(tmp_path: Path) -> None:
    config = hf.RoFormerConfig(**SIZES, architectures=["RoFormerForMaskedLM"])
    refuses(tmp_path / "a", config, {"rotary_value": True}, "'rotary_value' is True.*absolute positions")
    refuses(tmp_path / "b", config, {"embedding_size": 16}, "'embedding_size' is 16.*another width")
    refuses(tmp_path / "c", config, {"architectures": ["RoFormerForCausalLM"]}, "is not supported")
    refuses(tmp_path / "d", config, {"num_attention_heads": 8}, "rotary dim 3 does not fit")
