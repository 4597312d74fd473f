"""Every key of a ``config.json`` comes back in the file's own words: of every case, and of the reference's defaults."""

import json
from pathlib import Path
from typing import Any

import pytest

from phylon.families import families
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
OF_THE_TASK = {
    "id2label": {"0": "no", "1": "yes"},
    "label2id": {"no": 0, "yes": 1},
    "_name_or_path": "x",
    "prefix": "a",
}


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
    model.family, model.labels, model.generation, model.kept = (
        found.family.name,
        found.labels,
        found.generation,
        found.kept,
    )
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
@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_defaults_of_the_reference(name: str, model_type: str, whole: bool, tmp_path: Path) -> None:
    """All keys, and those that the reference saves."""
    transformers = pytest.importorskip("transformers")
    made = transformers.CONFIG_MAPPING[model_type]()
    config = put(tmp_path, made.to_dict() if whole else made.to_diff_dict())
    assert not drift(config, written_again(tmp_path))


SPELLED: list[tuple[str, int, dict[str, Any]]] = [
    ("gpt2", 0, {"activation_function": "gelu_pytorch_tanh"}),
    ("bert", 0, {"classifier_dropout": None, "hidden_act": "gelu_pytorch_tanh", "position_embedding_type": "absolute"}),
    (
        "falcon",
        0,
        {"new_decoder_architecture": True, "num_kv_heads": 1, "multi_query": True, "num_ln_in_parallel_attn": 1},
    ),
    ("falcon", 1, {"ff_factor": 4}),
    ("mamba2", 0, {"chunk_size": 64}),
    ("qwen3", 0, {"max_window_layers": 1, "use_sliding_window": False}),
    ("jamba", 0, {"use_mamba_kernels": False, "output_router_logits": True}),
    ("jamba", 0, {"head_dim": 6}),
    ("mpt", 0, {"emb_pdrop": 0, "learned_pos_emb": True, "no_bias": True}),
    ("t5", 0, {"num_decoder_layers": ..., "feed_forward_proj": ..., "dense_act_fn": "relu", "is_gated_act": False}),
    ("deepseek", 0, {"num_nextn_predict_layers": 1, "aux_loss_alpha": 0.1}),
    ("bloom", 0, {"seq_length": 77, "n_layer": 2}),
    ("llama", 0, {"rope_parameters": ..., "rope_theta": 10000.0, "rope_scaling": None, "bos_token_id": [1]}),
    ("llama", 0, {"eos_token_id": [2], "unk_token_id": 3, "torch_dtype": ..., "dtype": "float32"}),
    ("gpt_neox", 0, {"rope_parameters": ..., "rotary_pct": 1.0, "rotary_emb_base": 10000}),
]
"""Of a case of a family, keys as published files spell them; ``...`` removes one."""


@pytest.mark.parametrize(("name", "case", "changes"), SPELLED, ids=lambda value: str(value).split(":")[0][:20])
def test_other_words_for_the_same(name: str, case: int, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "a", FORMATS[name].cases()[case], **changes)
    config = json.loads((folder / "config.json").read_text())
    again = json.loads((save(load(folder, device="cpu"), tmp_path / "b", format="hf") / "config.json").read_text())
    assert not drift(config, again)
    assert not (again.keys() & {key for key, value in changes.items() if value is ...})
