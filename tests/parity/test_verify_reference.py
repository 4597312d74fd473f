"""`verify` against `transformers`: sound models agree in every component, and the first that diverges is named."""

import pytest
import torch

from phylon.checkpoint.verify import verify
from phylon.families import family

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
