"""Keys that are passed over still hold what the reference has there; others' keys may hold anything."""

import ast
import inspect
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phylon.families import families
from phylon.families.base import Config
from phylon.families.neutral import NEUTRAL
from phylon.families.passed import wrong
from phylon.model import ModelSpec
from phylon.spec.errors import UserError

FORMATS = {f.name: f for f in families() if f.hf is not None}


def said_by(name: str) -> dict[str, Any]:
    found = FORMATS[name]
    assert found.hf is not None
    return found.hf.write(found.cases()[0])


def read(name: str, changes: dict[str, Any]) -> ModelSpec:
    found = FORMATS[name]
    assert found.hf is not None
    return found.hf.read(Config(said_by(name) | changes, "there"))


WRONG: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {
        "torch_dtype": (5, "banana", "nn", True, ["float32"]),
        "dtype": (5, "float31"),
        "id2label": ({"a": 1}, [], "x", 3),
        "label2id": ([], "x"),
        "use_cache": ("yes", 1, []),
        "architectures": ("LlamaForCausalLM", [3], {}),
        "is_encoder_decoder": ("no", 0),
        "problem_type": ("banana", 3, []),
        "initializer_range": ("x", -1, math.nan, True),
        "transformers_version": (5, True),
        "num_beams": (0, 1.5, "x"),
        "max_length": (-1, 1.5, True),
        "early_stopping": ("sometimes", 1),
        "repetition_penalty": ("x", math.inf),
        "task_specific_params": ([], 3),
        "bad_words_ids": (3, {}),
        "suppress_tokens": ("x", [1.5], [True]),
        "eos_token_id": (1.7, "x", [[1]]),
        "pretraining_tp": (1.5, "x"),
        "tokenizer_class": (3,),
    },
    "mamba2": {
        "chunk_size": (0, -1, 1.5, "x", True),
        "residual_in_fp32": ("x", 1),
        "time_step_rank": ("x", 0, 1.5),
        "rescale_prenorm_residual": ("yes",),
        "time_step_floor": ("x", -1),
    },
    "mamba": {"time_step_scale": ("x",), "use_mambapy": (1,), "time_step_init_scheme": (3,)},
    "gpt2": {"summary_type": (3,), "summary_first_dropout": (7, "x"), "reorder_and_upcast_attn": ("x",)},
    "switch": {"router_z_loss_coef": ("x",), "add_router_probs": (3,), "router_ignore_padding_tokens": ("x",)},
    "t5": {"n_positions": (0, "x"), "classifier_dropout": (7, -1, "x")},
    "transformer2017": {"encoder_layerdrop": (3, "x"), "init_std": ("x", -1)},
    "bloom": {"slow_but_exact": ("x",), "attention_softmax_in_fp32": (3,)},
    "vit": {"encoder_stride": (0, "x")},
    "mpt": {"learned_pos_emb": ("x",), "embedding_fraction": (7,), "init_device": (3,)},
    "jamba": {"use_mamba_kernels": ("x",), "router_aux_loss_coef": ("x",)},
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in WRONG.items() for key in keys])
def test_a_value_of_another_kind_is_refused(name: str, key: str) -> None:
    for value in WRONG[name][key]:
        with pytest.raises(UserError, match=f"^there: '{key}' must be .*, got ") as error:
            read(name, {key: value})
        assert "\n" not in str(error.value)
    assert read(name, {key: None}) == read(name, {})


@pytest.mark.parametrize("name", FORMATS)
def test_what_nobody_declares_may_hold_anything(name: str) -> None:
    """Metadata of others, in keys that change nothing."""
    for value in ("x", 3, -1.5, [1], {"a": 1}, True):
        said = dict.fromkeys(("unsloth_fixed", "unsloth_version", "custom_pipelines", "finetuning_task"), value)
        assert read(name, said) == read(name, {})


ODD: tuple[Any, ...] = ("banana", -3, 0.5, 1e9, True, ["x"], [0.5], {"x": "y"})


def passed_over(module: Any) -> Iterator[str]:
    """The keys that a family's file names to ``Config.ignore``."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "ignore":
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant))


@pytest.mark.parametrize("name", FORMATS)
def test_what_the_reference_refuses_is_refused(name: str, tmp_path: Path) -> None:
    """Every key that is passed over and that its configuration class declares, with values of every kind."""
    transformers = pytest.importorskip("transformers")
    kind = type(transformers.AutoConfig.for_model(said_by(name)["model_type"]))
    module = inspect.getmodule(
        FORMATS[name].builder.func if hasattr(FORMATS[name].builder, "func") else FORMATS[name].builder
    )
    declared = (NEUTRAL | set(passed_over(module))) & set(kind.__dataclass_fields__)
    assert len(declared) > 8
    for key in declared - {"model_type"}:
        for value in ODD:
            (tmp_path / "config.json").write_text(json.dumps(said_by(name) | {key: value}))
            try:
                transformers.AutoConfig.from_pretrained(tmp_path)
            except Exception:  # whatever a foreign program raises at a senseless value
                assert wrong(key, value) is not None, (key, value)
