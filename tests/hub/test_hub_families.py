"""A checkpoint under another family's configuration, or under one that no family says."""

import time

import pytest

from phylon.families import families
from phylon.families.base import _LACKING, hf_format
from phylon.hub import load
from phylon.spec.errors import UserError

from .hub_data import GPT2, hf_folder, one_line

CASES = {f.name: f.cases()[0] for f in families() if f.hf is not None}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder and ``config.json`` of every family's first case."""
    root = tmp_path_factory.mktemp("families")
    made = {name: hf_folder(root / name, spec) for name, spec in CASES.items()}
    return {name: (folder, (folder / "config.json").read_text()) for name, folder in made.items()}


@pytest.mark.parametrize("stored", CASES)
def test_tensors_of_one_family_under_the_configuration_of_another(stored, folders):
    """Both families are named, or the two say the same model."""
    folder, own = folders[stored]
    silent = []
    for said in CASES:
        if said == stored:
            continue
        (folder / "config.json").write_text(folders[said][1])
        try:
            load(folder, device="cpu")
        except UserError as error:
            text = str(error)
            assert "\n" not in text
            assert len(text) < 1000, text
            if "the model ties them" in text and (stored, said) in SAME_MODEL:
                continue
            if f"of family '{said}'" not in text or f"'{stored}'" not in text.split("of family")[-1]:
                silent.append((said, text))
        else:
            assert (stored, said) in SAME_MODEL, (stored, said)
    (folder / "config.json").write_text(own)
    load(folder, device="cpu")
    assert not silent


SAME_MODEL = {("llama", "mistral"), ("mistral", "llama")}


@pytest.mark.parametrize(
    ("model_type", "says"),
    {
        "qwen3_moe": "did you mean 'qwen3'.*norm_topk_prob",
        "rwkv": "its recurrence",
        "whisper": "audio frames",
        "llava": "images",
        "nobody_made_this": "no family file says it yet",
    }.items(),
)
def test_an_unknown_model_type(model_type, says, tmp_path):
    """What is known is listed, and what is missing is named where that is known."""
    hf_folder(tmp_path / "a", GPT2, model_type=model_type)
    with pytest.raises(UserError, match=f"unknown model_type '{model_type}'.*{says}") as error:
        load(tmp_path / "a", device="cpu")
    listed = one_line(error).split("(known: ")[1].rstrip(")").split(", ")
    assert listed == sorted({m for f in families() if f.hf is not None for m in f.hf.model_types})


def test_what_is_said_to_be_missing_is_not_there():
    """The words for a model_type go when a family reads it."""
    known = {m for f in families() if f.hf is not None for m in f.hf.model_types}
    assert not known & set(_LACKING)
    with pytest.raises(UserError, match="…'"):
        hf_format("x" * 5000)


@pytest.mark.parametrize("name", ["jamba", "llama", "deepseek"])
def test_more_blocks_than_tensors_is_refused_at_once(name, tmp_path):
    folder = hf_folder(tmp_path / "a", CASES[name], num_hidden_layers=4096)
    start = time.process_time()
    with pytest.raises(UserError, match=r"4096 blocks, and it has [0-9]+ tensors") as error:
        load(folder, device="cpu")
    one_line(error)
    assert time.process_time() - start < 5
