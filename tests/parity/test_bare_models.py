"""Bare encoders without a pooler, written from the spec alone: as the reference writes them, and read by it exactly."""

import json

import pytest
import transformers as hf

from phylon.families import family
from phylon.families.base import Config
from phylon.hub import load, save
from phylon.model import build

SIZES = {"d_model": 24, "n_layers": 1, "n_heads": 3, "heads": ()}
CLASSES = {"bert": hf.BertModel, "roberta": hf.RobertaModel, "vit": hf.ViTModel, "deit": hf.DeiTModel}


@pytest.mark.parametrize("name", CLASSES)
def test_no_pooler_is_said_by_the_tensors(name, tmp_path):
    model = build(family(name).builder(**SIZES), device="cpu")
    model.family = name
    folder = save(model, tmp_path / "a", format="hf")
    assert "add_pooling_layer" not in json.loads((folder / "config.json").read_text())
    theirs, info = CLASSES[name].from_pretrained(folder, add_pooling_layer=False, output_loading_info=True)
    assert theirs.pooler is None
    assert not info["missing_keys"]
    assert load(folder, device="cpu").spec.replace(init=model.spec.init) == model.spec


@pytest.mark.parametrize("name", CLASSES)
def test_files_that_still_say_it(name, tmp_path):
    """Earlier versions wrote the key: it is read, and not written again."""
    model = build(family(name).builder(**SIZES), device="cpu")
    model.family = name
    folder = save(model, tmp_path / "a", format="hf")
    said = json.loads((folder / "config.json").read_text()) | {"add_pooling_layer": False}
    (folder / "config.json").write_text(json.dumps(said))
    back = load(folder, device="cpu")
    assert back.spec.replace(init=model.spec.init) == model.spec
    again = save(back, tmp_path / "b", format="hf")
    assert "add_pooling_layer" not in json.loads((again / "config.json").read_text())


def test_positions_that_a_roberta_file_leaves_out():
    """What the reference has there."""
    found = family("roberta")
    said = found.hf.write(found.cases()[0])
    del said["max_position_embeddings"]
    rows = hf.RobertaConfig().max_position_embeddings
    positions = found.hf.read(Config(said)).encoder.embed.positions
    assert positions.max_seq_len + positions.offset == rows
