"""The typed recipe of a run, its TOML files, and the recipes that come with the library.

A recipe is a TOML document with ``schema = 1`` and the tables ``[model] [tune] [data] [objective] [optim] [schedule]
[run]``. ``[objective]``, ``[optim]`` and ``[schedule]`` are slots: ``kind`` says which, and may be left out for the
usual one.
"""

import math
import typing
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec
import tomli_w

from phylon.data import DataSource, PythonCorpus
from phylon.model import ModelSpec
from phylon.model.passes import Lora
from phylon.spec import Spec, UserError, did_you_mean, from_data, override, to_data
from phylon.spec.errors import check_seed
from phylon.spec.serial import SCHEMA, check_schema, parse_toml
from phylon.train.idle import idle, making_way, paths, refuse_idle, without_idle
from phylon.train.objectives import NextToken, Objective
from phylon.train.optim import AdamW, Optimizer
from phylon.train.schedule import Schedule, WarmupCosine
from phylon.train.spikes import SpikePolicy
from phylon.train.vocabulary import BPE, Vocabulary

USUAL_KINDS = {"objective": "next_token", "optim": "adamw", "schedule": "warmup_cosine"}
MODEL_FORMS = ("family", "preset", "spec", "from")


def _at_least(spec: Spec, least: int, *names: str) -> None:
    for name in names:
        value = getattr(spec, name)
        if value is not None and value < least:
            raise UserError(f"{name} must be at least {least}, got {value}")


class DataRecipe(Spec, frozen=True, kw_only=True):
    """``source``: "python" (the standard library), a path, or a table with its ``kind``.

    ``held_out``: the share kept for evaluation. ``max_bytes`` keeps the documents before the first that would pass it.
    """

    source: DataSource = PythonCorpus()
    seq_len: int = 256
    tokenizer: Vocabulary = BPE()
    held_out: float = 0.02
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.source, str):
            msgspec.structs.force_setattr(self, "source", DataSource.from_word(self.source))
        _at_least(self, 1, "seq_len", "max_bytes")
        if not 0 <= self.held_out < 1:
            raise UserError(f"held_out is a share of the data, at least 0 and below 1; got {self.held_out}")


class TuneRecipe(Spec, frozen=True, kw_only=True):
    """Which parameters are trained, by path glob (``phylon show MODEL`` lists them).

    ``train``: these alone; ``freeze``: all but these. With ``lora`` the model is frozen, its adapters are trained, and
    ``train`` names what is trained beside them.
    """

    lora: Lora | None = None
    train: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()


class RunRecipe(Spec, frozen=True, kw_only=True):
    """How long, how large, how often.

    ``steps``: updates, at most so many with ``max_minutes``, with which the run measures its speed and takes as many as
    fit, so that the schedule still reaches its end; its warmup is then at most a tenth of them, and the counts below
    shrink with them.
    ``batch_size``: rows of an update, computed in ``accumulate`` parts. ``precision``: "bf16" is autocast over fp32
    weights, "fp16" the same with a scaled loss (GPUs), "auto" is bf16 where the machine computes it in hardware.
    ``eval_every``, ``sample_every`` and ``save_every`` count steps (``None``: only at the end); ``eval_rows`` bounds
    the held-out rows of one evaluation. ``epochs``: passes over the data, which say how many ``steps`` there are, with
    an evaluation after each unless ``eval_every`` says otherwise; ``steps`` beside them are refused. On the command
    line ``steps`` take the place of a recipe's ``epochs`` and ``max_minutes``, and ``epochs`` of its ``max_minutes``.
    ``best``: the metric of an evaluation ("accuracy",
    "bleu", "loss", …) by which the best weights are what is kept as ``model/``. ``average``: ``model/`` is the mean of
    so many last checkpoints. ``keep``: checkpoints kept, besides the last good one and the best. ``watch_every``: steps
    between looks into the model ("watch" in the log). ``on_spike``: what to do when the loss jumps. ``ema``: the decay
    of a running mean of the weights, which is evaluated and saved beside them. ``recompute`` = "blocks" keeps less for
    the backward pass and computes it again; ``compile`` = "blocks" uses ``torch.compile``. ``parallel``: how several
    processes (``torchrun``) share the work: "ddp", or "fsdp" with the weights in shards. ``threads``: CPU threads
    (``None``: as PyTorch chooses; with ``max_minutes`` all or one, whichever is measured to be faster at the start).
    """

    steps: int = 1000
    epochs: int | None = None
    max_minutes: float | None = None
    batch_size: int = 8
    accumulate: int = 1
    seed: int = 0
    precision: Literal["fp32", "bf16", "fp16", "auto"] = "fp32"
    eval_every: int | None = None
    eval_rows: int | None = None
    sample_every: int | None = None
    save_every: int | None = None
    keep: int = 2
    best: str | None = None
    average: int | None = None
    watch_every: int | None = 100
    on_spike: SpikePolicy | None = None
    ema: float | None = None
    recompute: Literal["off", "blocks"] = "off"
    compile: Literal["off", "blocks"] = "off"
    parallel: Literal["ddp", "fsdp"] = "ddp"
    threads: int | None = None

    def __post_init__(self) -> None:
        _at_least(self, 1, "steps", "batch_size", "accumulate", "keep", "threads")
        _at_least(self, 1, "eval_every", "eval_rows", "sample_every", "save_every", "watch_every")
        _at_least(self, 1, "epochs", "average")
        check_seed("run.seed", self.seed)
        if self.best is not None and self.average is not None:
            raise UserError("run.best keeps the best weights and run.average the mean of the last; choose one")
        if self.epochs is not None and self.max_minutes is not None:
            raise UserError(
                f"run.epochs = {self.epochs} says how long a run is, and so does run.max_minutes = {self.max_minutes}; "
                "choose one and set the other to none"
            )
        if self.ema is not None and not 0 < self.ema < 1:
            raise UserError(f"ema is the decay of the mean, above 0 and below 1, for example 0.999; got {self.ema}")
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise UserError(f"max_minutes must be above 0, got {self.max_minutes}")


class Recipe(Spec, frozen=True, kw_only=True):
    """A run: ``model`` is one of ``{family = …, builder arguments}``, ``{preset = …, set = {…}}``, ``{spec = {…}}``.

    Or ``{from = MODEL}``: trained weights to go on from (a folder, a ``.gguf`` file, a known name), their tokenizer
    too. ``heads = {…}`` replaces the heads by new ones, ``set = {…}`` changes the spec, ``dtype`` is that of the
    parameters ("float32").
    """

    model: dict[str, Any]
    tune: TuneRecipe = TuneRecipe()
    data: DataRecipe = DataRecipe()
    objective: Objective = NextToken()
    optim: Optimizer = AdamW()
    schedule: Schedule = WarmupCosine()
    run: RunRecipe = RunRecipe()

    def __post_init__(self) -> None:
        run = self.run
        if run.accumulate > run.batch_size and not self.objective.by_tokens:
            raise UserError(
                f"run.accumulate {run.accumulate} is more parts than the batch has rows (run.batch_size "
                f"{run.batch_size}); lower it, or raise run.batch_size"
            )
        forms = [form for form in MODEL_FORMS if form in self.model]
        if len(forms) != 1:
            raise UserError(f"[model] needs exactly one of {', '.join(MODEL_FORMS)}; got {', '.join(forms) or 'none'}")
        for path, number in _numbers(to_data(self), ""):
            if isinstance(number, int):
                if abs(number) >= 2**63:
                    raise UserError(f"{path} must be below 2^63, got {number}")
                continue
            # An infinite number has its uses in a model (a limit that is none), and nowhere else.
            if math.isnan(number) or (math.isinf(number) and not path.startswith("model.")):
                raise UserError(f"{path} must be a finite number, got {number}")


def _numbers(data: Any, path: str) -> Iterator[tuple[str, int | float]]:
    """Every number in plain data, with its dotted path."""
    if isinstance(data, int | float):
        yield path, data
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list | tuple) else ()
    for key, value in items:
        yield from _numbers(value, f"{path}.{key}" if path else str(key))


def load_recipe(name: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """A recipe file, or one that comes with the library, with dotted ``overrides`` (``{"optim.lr": 1e-3}``)."""
    text, where = _read(name)
    changes = dict(overrides or {})
    try:
        data = parse_toml(text)
        table, start, given = data.get("model", {}), changes.get("model.from"), paths(data)
        if isinstance(table, dict) and start is not None and not any(form in table for form in MODEL_FORMS):
            data["model"] = {**table, "from": start}
            given = [path for path in given if path != "data.tokenizer"]  # makes way for that of the model
        recipe = _from_data(data)
        refuse_idle(recipe, given)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return apply_overrides(recipe, changes)


def builtin_recipes() -> list[str]:
    """Names of the recipes that come with the library."""
    folder = resources.files("phylon.train") / "recipes"
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def recipe_text(name: str) -> list[str]:
    """The lines of a recipe that comes with the library."""
    return _read(name)[0].splitlines()


def recipe_from_toml(text: str) -> Recipe:
    """The recipe a TOML document describes."""
    return recipe_from_data(parse_toml(text))


def recipe_from_data(data: dict[str, Any]) -> Recipe:
    """The recipe of plain data with ``schema``; the usual ``kind`` is filled in where a table names none.

    Two settings of which one says nothing beside the other are refused.
    """
    recipe = _from_data(data)
    refuse_idle(recipe, paths(data))
    return recipe


def _from_data(data: dict[str, Any]) -> Recipe:
    check_schema(data)
    hints = typing.get_type_hints(Recipe)
    parts: dict[str, Any] = {}
    for name, table in data.items():
        if name == "schema":
            continue
        if name not in Recipe.__struct_fields__:
            raise UserError(f"unknown table [{name}]{did_you_mean(name, Recipe.__struct_fields__)}")
        if isinstance(table, dict) and name in USUAL_KINDS:
            table = {"kind": USUAL_KINDS[name]} | table
        try:
            parts[name] = from_data(hints[name], table)
        except UserError as error:
            raise UserError(f"[{name}] {error}") from None
    if "model" not in parts:
        raise UserError(
            'the table [model] is missing; it says what to train, for example preset = "gpt2"; or give --from MODEL'
        )
    return Recipe(**parts)


def recipe_to_toml(recipe: Recipe) -> str:
    """The reverse of ``recipe_from_toml``; what has no effect is left out."""
    data = to_data(recipe)
    for path in idle(recipe):
        table, name = path.split(".")
        data[table].pop(name, None)
    return tomli_w.dumps({"schema": SCHEMA, **data})


def apply_overrides(recipe: Recipe, overrides: Mapping[str, Any]) -> Recipe:
    """``recipe`` with what a user asks for: what it says otherwise makes way, and an override without effect is
    refused with what takes its place."""
    recipe = with_values(recipe, {**making_way(overrides), **overrides})
    refuse_idle(recipe, [path for path, value in overrides.items() if value is not None])
    return without_idle(recipe)


def with_values(recipe: Recipe, overrides: Mapping[str, Any]) -> Recipe:
    """``recipe`` with every dotted path set, in any order, a whole ``model`` before what lies below it. There a new key
    is a builder's argument, checked there."""
    rest: dict[str, Any] = {}
    if "model" in overrides:
        recipe = override(recipe, {"model": overrides["model"]})
    model = dict(recipe.model)
    for path, value in overrides.items():
        head, _, inner = path.partition(".")
        if head == "model" and inner:
            _set_model(model, inner, value)
        elif path != "model":
            rest[path] = value
    return _in_some_order(recipe.replace(model=model), rest)


def _in_some_order(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """Set every path; what is refused is tried again after the others, then together with what stands beside it.

    For values may only agree together.
    """
    while changes:
        refused: dict[str, Any] = {}
        problem = None
        for path, value in changes.items():
            try:
                recipe = override(recipe, {path: value})
            except UserError as error:
                refused[path], problem = value, problem or error
        if problem is not None and len(refused) == len(changes):
            together = _tables(recipe, changes)
            if len(together) == len(changes):
                raise problem
            try:
                return _in_some_order(recipe, together)
            except UserError:
                raise problem from None
        changes = refused
    return recipe


def _tables(recipe: Recipe, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes with several of one table as one of that table."""
    parents = [path.rpartition(".")[0] for path in changes]
    found: dict[str, Any] = {}
    for path, value in changes.items():
        parent, _, name = path.rpartition(".")
        # What another kind says is no part of the new one.
        table = found.get(parent) or ({} if f"{parent}.kind" in changes else _table(to_data(recipe), parent))
        if table is None or parents.count(parent) == 1:
            found[path] = value
        else:
            found[parent] = table | {name: value}
    return found


def _table(data: Any, path: str) -> dict[str, Any] | None:
    """The table at a dotted path, if there is one."""
    for part in path.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    return data if isinstance(data, dict) else None


def _set_model(model: dict[str, Any], path: str, value: Any) -> None:
    """Set an entry of the model table in place; naming one form drops the other."""
    if path in MODEL_FORMS:
        for key in list(model) if path != "from" or path not in model else ():
            del model[key]
    own = ("preset", "set") if "preset" in model else ("from", "set", "heads", "dtype") if "from" in model else None
    if own is not None and path.partition(".")[0] not in own:
        path = f"set.{path}"
    if path.startswith("set."):
        # The keys of a preset's overrides are dotted paths into its spec.
        model["set"] = {**model.get("set", {}), path.removeprefix("set."): value}
        return
    node, parts = model, path.split(".")
    for part in parts[:-1]:
        below = node.get(part, {})
        if not isinstance(below, dict):
            raise UserError(f"'model.{path}': nothing below '{part}' can be set")
        node[part] = node = dict(below)
    if value is None:
        node.pop(parts[-1], None)
    else:
        node[parts[-1]] = value


def model_spec(recipe: Recipe, vocab_size: int | None) -> ModelSpec:
    """The model's spec; a family gets the tokenizer's ``vocab_size``, if there is one, unless the recipe states it."""
    from phylon.families import build_spec

    if "from" in recipe.model:
        from phylon.train.pretrained import started_spec

        return started_spec(recipe.model)
    text = recipe.objective.reads_text and "family" in recipe.model
    given = {"vocab_size": vocab_size} if text and vocab_size is not None else {}
    return build_spec({**given, **recipe.model})


def model_family(recipe: Recipe) -> str | None:
    """Whose format the trained model is saved in: the family that the recipe names, or that of its preset."""
    from phylon.families import family_of_preset

    table = recipe.model
    return table.get("family") or (family_of_preset(table["preset"]).name if "preset" in table else None)


def _read(name: str | Path) -> tuple[str, str]:
    """The text of a recipe and what to call it in a message."""
    known = builtin_recipes()
    if str(name) in known:
        return (resources.files("phylon.train") / "recipes" / f"{name}.toml").read_text("utf-8"), f"recipe '{name}'"
    path = Path(name)
    try:
        return path.read_text("utf-8"), str(path)
    except FileNotFoundError:
        raise UserError(f"no recipe '{name}'{did_you_mean(str(name), known)}; give one or a TOML file") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"cannot read the recipe '{name}': {reason}") from None
