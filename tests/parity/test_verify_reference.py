"""`verify` against `transformers`: sound models agree in every component, and the first that diverges is named."""

import json

import pytest
import torch

from phylon.checkpoint.verify import verify
from phylon.families import family
from phylon.spec.errors import UserError

from .harness import ours_to_reference
from .reference import reference


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
def test_every_component_agrees(name, tmp_path):
    model, _ = ours_to_reference(family(name).cases()[0], tmp_path / "a")
    report = verify(model, reference=reference(tmp_path / "a"))
    assert report.passed, report.failed
    compared = [cell.name for cell in report.cells if cell.name.startswith("reference:") and cell.passed]
    assert compared == [
        "reference:decoder.embed.out",
        "reference:decoder.blocks.0.resid_post",
        "reference:decoder.out",
        "reference:heads.lm.logits",
    ]
    with torch.no_grad():
        model.decoder.blocks[0].ffn.down_proj.weight[0, 0] += 1
    first = next(cell for cell in verify(model, reference=reference(tmp_path / "a")).cells if cell.name == "reference")
    assert first.reason == "the first component that diverges is decoder.blocks.0.resid_post"


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_hidden_states_without_an_embedding(name, tmp_path):
    """What `transformers` gives of the Mambas starts after the first block."""
    model, _ = ours_to_reference(family(name).cases()[0], tmp_path / "a")
    report = verify(model, reference=reference(tmp_path / "a"))
    assert report.passed, report.failed
    compared = [cell.name for cell in report.cells if cell.name.startswith("reference:") and cell.passed]
    n = len(model.spec.decoder.blocks)
    blocks = [f"reference:decoder.blocks.{i}.resid_post" for i in range(n)]
    assert compared == ["reference:decoder.embed.out", *blocks, "reference:decoder.out", "reference:heads.lm.logits"]


@pytest.mark.parametrize("architecture", ["ViTForImageClassification", "BertForMaskedLM", "T5ForConditionalGeneration"])
def test_what_is_no_causal_language_model_is_refused(architecture, tmp_path):
    kind = {"V": "vit", "B": "bert", "T": "t5"}[architecture[0]]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "architectures": [architecture]}))
    with pytest.raises(UserError, match=f"runs causal language models, and .* holds {architecture}"):
        reference(tmp_path)
