"""``[model] from = …``: trained weights to go on from, and ``[tune]``: which of them are trained."""

from typing import Any

import torch

from phylon import hub
from phylon.hub.labels import kept_labels
from phylon.hub.load import stored_tensors
from phylon.model import Model, ModelSpec, build
from phylon.model.passes import add_lora, freeze, parameters_matching, train_only
from phylon.spec import from_data, override
from phylon.spec.base import Head
from phylon.spec.errors import UserError, did_you_mean
from phylon.text import Tokenizer
from phylon.train.recipe import TuneRecipe

KEYS = ("from", "heads", "set", "dtype")


def started_spec(table: dict[str, Any]) -> ModelSpec:
    """The spec of the model that ``[model] from`` names, with the table's changes; no weight is read.

    New heads bring new parameters; ties to a head that is gone go with it.
    """
    unknown = [key for key in table if key not in KEYS]
    if unknown:
        raise UserError(f"[model] with 'from' takes no '{unknown[0]}'{did_you_mean(unknown[0], KEYS)}")
    if not isinstance(table["from"], str):
        raise UserError(f"[model] from names a model: a folder, a .gguf file or a known name; got {table['from']!r}")
    spec = hub.describe(table["from"]).spec
    if "heads" in table:
        if not isinstance(table["heads"], dict):
            raise UserError('[model] heads is a table by name, for example { class = { kind = "pooled", … } }')
        heads: dict[str, Any] = {name: _head(name, head) for name, head in table["heads"].items()}
        gone = tuple(f"heads.{name}." for name in spec.heads if name not in heads)
        ties = tuple(tie for tie in spec.ties if not tie.name.startswith(gone)) if gone else spec.ties
        spec = spec.replace(heads=heads, ties=ties)
    return override(spec, table.get("set", {}))


def load_start(table: dict[str, Any], spec: ModelSpec, seed: int, device: str) -> Model:
    """The model that ``[model] from`` names as ``spec`` has it: its weights where the names are the same.

    New heads are drawn from ``seed``. A change that alters a stack's parameters is refused.
    """
    dtype = table.get("dtype", "float32")
    loaded = hub.load(table["from"], dtype=dtype, device=device)
    loaded.train()
    # No objective here trains several classes of one text, whatever the file says.
    loaded.kept.pop("problem_type", None)
    if spec == loaded.spec:
        return loaded
    model = build(spec, seed=seed, dtype=dtype, device=device)
    model.tokenizer, model.generation, model.family = loaded.tokenizer, loaded.generation, loaded.family
    model.labels, model.kept = kept_labels(loaded.labels, loaded.spec, spec), dict(loaded.kept)
    model.unread, model.kept_generation = loaded.unread, loaded.kept_generation
    old, new = stored_tensors(loaded), stored_tensors(model)
    with torch.no_grad():
        for name, tensor in new.items():
            source = old.get(name)
            if source is not None and source.shape == tensor.shape:
                tensor.copy_(source)
            elif not name.startswith("heads."):
                found = "has none" if source is None else f"has {tuple(source.shape)}"
                raise UserError(f"[model] set asks for '{name}' {tuple(tensor.shape)} and '{table['from']}' {found}")
    return model


def start_tokenizer(table: dict[str, Any]) -> Tokenizer:
    """The tokenizer that comes with the model."""
    found = hub.load_tokenizer_of(table["from"])
    if found is None:
        raise UserError(
            f"'{table['from']}' comes without a tokenizer; name one: data.tokenizer={{ kind = \"load\", path = … }}"
        )
    return found


def apply_tune(model: Model, tune: TuneRecipe) -> None:
    """Freeze, or add adapters, as the recipe says."""
    if tune.lora is not None:
        add_lora(model, tune.lora)
        for name in parameters_matching(model, tune.train):
            model.get_parameter(name).requires_grad_()
    elif tune.train:
        train_only(model, tune.train)
    freeze(model, tune.freeze)
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError("[tune] leaves no parameter to train; name some in tune.train")


def check_tune(shape: Model, tune: TuneRecipe) -> None:
    """Refuse globs that name nothing, on a model without memory."""
    if tune.lora is not None:
        add_lora(shape, tune.lora)
    parameters_matching(shape, tune.train)
    parameters_matching(shape, tune.freeze)


def _head(name: str, data: Any) -> Head:
    try:
        return from_data(Head, data)
    except UserError as error:
        raise UserError(f"[model] heads.{name}: {error}") from None
