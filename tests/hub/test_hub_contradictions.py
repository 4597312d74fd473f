"""What a folder says twice must be one thing: model_type and architecture, the family and the names of tensors."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from phylon.families import families
from phylon.hub import describe, load
from phylon.model import ModelSpec
from phylon.spec.errors import UserError

from .hub_data import hf_folder, one_line

FORMATS = {f.name: f for f in families() if f.hf is not None}
ENCODERS = ("bert", "roberta", "distilbert", "roformer", "vit", "deit")


@cache
def written(name: str) -> dict[str, Any]:
    hf = FORMATS[name].hf
    assert hf is not None
    return hf.write(FORMATS[name].cases()[0])


def put(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_a_class_of_another_family_is_refused(name: str, tmp_path: Path) -> None:
    """Also as the second of several, and the class of its language model or of its stacks alone."""
    mine = written(name)["architectures"][0]
    for other in FORMATS.keys() - {name}:
        theirs = written(other)["architectures"][0]
        for names in ([theirs], [mine, theirs]):
            with pytest.raises(UserError, match=f"'{theirs}'") as error:
                describe(put(tmp_path, written(name) | {"architectures": names}))
            said = one_line(error)
            assert f"family '{name}'" in said
            assert f"family '{other}'" in said
            assert said.startswith(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("llama", "YiForCausalLM"),
        ("mpt", "MPTForCausalLM"),
        ("falcon", "RWForCausalLM"),
        ("gemma3", "Gemma3ForCausalLM"),
        ("mamba", "MambaLMHeadModel"),
        ("t5", "T5WithLMHeadModel"),
    ],
)
def test_other_names_of_the_same_model(name: str, architecture: str, tmp_path: Path) -> None:
    """As published files have them."""
    same = describe(put(tmp_path, written(name))).spec
    assert describe(put(tmp_path, written(name) | {"architectures": [architecture]})).spec == same


@pytest.mark.parametrize("name", FORMATS)
def test_stacks_that_the_family_has_not(name: str, tmp_path: Path) -> None:
    spec = FORMATS[name].cases()[0]
    both = spec.encoder is not None and spec.decoder is not None
    for said in (both, None):
        assert describe(put(tmp_path, written(name) | {"is_encoder_decoder": said})).spec == describe(
            put(tmp_path, written(name))
        ).spec.replace(init=spec.init)
    wrong = written(name) | {"is_encoder_decoder": not both}
    with pytest.raises(UserError, match=f"'is_encoder_decoder' is {str(not both).lower()}, .*family '{name}'"):
        describe(put(tmp_path, wrong))


@pytest.mark.parametrize("said", [True, False])
def test_an_encoder_of_an_encoder_decoder_may_be_said_either_way(said: bool, tmp_path: Path) -> None:
    config = written("t5") | {"architectures": ["T5EncoderModel"], "is_encoder_decoder": said}
    assert describe(put(tmp_path, config)).spec.decoder is None


def bare(spec: ModelSpec) -> ModelSpec:
    return spec.replace(heads={}, ties=tuple(tie for tie in spec.ties if not tie.name.startswith("heads.")))


PAIRS = [(a, b) for a in FORMATS for b in FORMATS if a != b]
QUICK = [pair for pair in PAIRS if set(pair) <= set(ENCODERS)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory):
    """By family: a folder of a small model, and one of its stacks alone, whose tensors have no prefix."""
    root = tmp_path_factory.mktemp("families")
    sizes = {name: found.cases()[0] for name, found in FORMATS.items()}
    return {
        name: (hf_folder(root / name, spec), hf_folder(root / f"{name}-bare", bare(spec)))
        for name, spec in sizes.items()
    }


def refusal(folder: Path) -> str | None:
    try:
        load(folder, device="cpu")
    except UserError as error:
        return str(error)
    return None


def refused(config: Path, weights: Path, names: tuple[str, str]) -> None:
    there = config.parent / f"{config.name}-{weights.name}"
    there.mkdir()
    (there / "config.json").write_bytes((config / "config.json").read_bytes())
    for file in weights.glob("*.safetensors"):
        (there / file.name).write_bytes(file.read_bytes())
    said = refusal(there)
    if said is None:  # nothing in the file tells the two apart: the very tensors that this model has
        shapes = [
            {name: tensor.shape for name, tensor in load(folder, device="cpu").state_dict().items()}
            for folder in (there, weights)
        ]
        assert shapes[0] == shapes[1]
    else:
        # Llama and Mistral call their tensors alike: an untied head is no sign of another family.
        tie = set(names) == {"llama", "mistral"} and "differ, but the model ties them" in said
        assert tie or all(f"'{name}'" in said for name in names), said


@pytest.mark.parametrize("pair", QUICK, ids="-".join)
def test_bare_tensors_of_another_encoder_name_both_families(pair: tuple[str, str], folders) -> None:
    name, other = pair
    for config in folders[name]:
        refused(config, folders[other][1], pair)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_tensors_of_another_family_name_both(name: str, folders) -> None:
    for other in FORMATS.keys() - {name}:
        for config in folders[name]:
            for weights in folders[other]:
                if not (config.parent / f"{config.name}-{weights.name}").exists():
                    refused(config, weights, (name, other))


def test_a_roformer_configuration_over_bare_bert_tensors(folders) -> None:
    """They differ by one table, which RoFormer lacks."""
    there = folders["roformer"][1].parent / "here"
    there.mkdir()
    (there / "config.json").write_bytes((folders["roformer"][1] / "config.json").read_bytes())
    (there / "model.safetensors").write_bytes((folders["bert"][1] / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match=r"of family 'roformer', but its tensors are those of family .*'bert'"):
        load(there, device="cpu")
