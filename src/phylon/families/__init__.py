"""One paper a file: builder, presets, mapping, configuration both ways. Importing registers every family."""

import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

import phylon.layers  # noqa: F401 - registers the mechanisms
from phylon.families.base import Family, families, family, family_of_preset, gguf_format, hf_format, preset, presets
from phylon.model import Model
from phylon.model import build as model_build
from phylon.model.spec import ModelSpec
from phylon.spec.errors import UserError, did_you_mean
from phylon.spec.override import override
from phylon.spec.serial import from_data

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)


def build_spec(table: Mapping[str, Any]) -> ModelSpec:
    """The spec a recipe's ``[model]`` table says.

    ``preset = "gpt2"``, or ``family = "llama"`` with the arguments of its builder, or ``spec = {…}`` in full; and
    ``set = {"decoder.blocks.*.attn.dropout" = 0.1}`` on top.
    """
    arguments = dict(table)
    changes = arguments.pop("set", {})
    ways = [way for way in ("preset", "family", "spec") if way in arguments]
    if len(ways) != 1:
        raise UserError("[model] needs exactly one of 'preset', 'family' or 'spec'")
    chosen = arguments.pop(ways[0])
    if ways[0] == "family":
        spec = _from_builder(family(chosen), arguments)
    else:
        if arguments:
            raise UserError(f"[model] with '{ways[0]}' takes changes in 'set', not {', '.join(map(repr, arguments))}")
        spec = preset(chosen) if ways[0] == "preset" else from_data(ModelSpec, chosen)
    return override(spec, changes)


def build(
    spec_or_preset: ModelSpec | str,
    *,
    seed: int = 0,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "auto",
) -> Model:
    """A new model from a spec or a preset's name, drawn from ``seed``: the same on every device, fp32 by default."""
    spec = preset(spec_or_preset) if isinstance(spec_or_preset, str) else spec_or_preset
    model = model_build(spec, seed=seed, dtype=dtype, device=device)
    if isinstance(spec_or_preset, str):
        model.family = family_of_preset(spec_or_preset).name
    return model


def _from_builder(chosen: Family, arguments: dict[str, Any]) -> ModelSpec:
    function = chosen.builder.func if isinstance(chosen.builder, partial) else chosen.builder
    hints = inspect.get_annotations(function, eval_str=True)
    values = {}
    for name, value in arguments.items():
        if name not in hints or name == "return":
            known = [n for n in hints if n != "return"]
            raise UserError(f"[model] unknown key '{name}' for family '{chosen.name}'{did_you_mean(name, known)}")
        try:
            values[name] = from_data(hints[name], value)
        except UserError as error:
            raise UserError(f"[model] {name}: {error}") from None
    return chosen.builder(**values)


__all__ = [
    "Family",
    "build",
    "build_spec",
    "families",
    "family",
    "family_of_preset",
    "gguf_format",
    "hf_format",
    "preset",
    "presets",
]
