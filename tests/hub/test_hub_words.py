"""Every key of a ``config.json`` comes back in the file's own words: of every case, and of the reference's defaults."""

import json
from pathlib import Path
from typing import Any

import pytest

from phylon.families import families, family
from phylon.hub import describe, load, save
from phylon.hub.load import stored_tensors
from phylon.hub.written import hf_config
from phylon.model import build_meta
from phylon.spec.errors import UserError

from .hub_data import hf_folder

FORMATS = {f.name: f for f in families() if f.hf is not None}
TYPES = {name: f.hf.model_types for name, f in FORMATS.items() if f.hf is not None}
NORMALISED = {
    "dtype": "says what is stored",
    "torch_dtype": "says what is stored",
    "auto_map": "names code that is not copied",
}
"""Keys that may change, and why."""
OF_THE_TASK = {"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}, "_name_or_path": "x", "prefix": "a"}


def drift(config: dict[str, Any], written: dict[str, Any]) -> dict[str, Any]:
    """What of a file is written otherwise, as pairs."""
    missing = object()
    pairs = {key: (value, written.get(key, missing)) for key, value in config.items() if key not in NORMALISED}
    return {key: pair for key, pair in pairs.items() if json.dumps(pair[0]) != json.dumps(pair[1], default=repr)}


def written_again(folder: Path) -> dict[str, Any]:
    """What is written of a folder that may have no weights, nor a machine room for them."""
    found = describe(folder)
    assert found.family is not None
    assert found.family.hf is not None
    model = build_meta(found.spec)
    model.family, model.labels, model.generation, model.kept = found.family.name, found.labels, found.generation, found.kept
    names = found.family.hf.layout(found.spec).unmap(stored_tensors(model)).names()
    return json.loads(json.dumps(hf_config(model, found.family.hf, names)))


def put(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", FORMATS)
def test_every_case_says_it_in_the_same_words(name: str, tmp_path: Path) -> None:
    """Through a native folder; with names of classes, whatever the heads."""
    n_said = 0
    for i, case in enumerate(FORMATS[name].cases()):
        try:
            folder = hf_folder(tmp_path / str(i), case)
        except UserError:  # a case that this format cannot say
            continue
        config = json.loads((folder / "config.json").read_text())
        config = put(folder, config | ({} if "id2label" in config else OF_THE_TASK))
        native = save(load(folder, device="cpu"), tmp_path / f"{i}n")
        again = save(load(native, device="cpu"), tmp_path / f"{i}b", format="hf")
        assert not drift(config, json.loads((again / "config.json").read_text()))
        assert load(again, device="cpu").spec == load(folder, device="cpu").spec
        n_said += 1
    assert n_said


DEFAULTS = [(name, model_type) for name, types in TYPES.items() for model_type in types]


@pytest.mark.parametrize(("name", "model_type"), DEFAULTS)
@pytest.mark.parametrize("whole", [True, False])
def test_the_defaults_of_the_reference(name: str, model_type: str, whole: bool, tmp_path: Path) -> None:
    """All keys, and those that the reference saves."""
    transformers = pytest.importorskip("transformers")
    made = transformers.CONFIG_MAPPING[model_type]()
    config = put(tmp_path, made.to_dict() if whole else made.to_diff_dict())
    assert not drift(config, written_again(tmp_path))
