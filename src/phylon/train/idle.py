"""Settings that another one takes the place of: side by side they are refused, so that none is lost in silence."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from phylon.spec.errors import UserError
from phylon.train.vocabulary import Loaded

if TYPE_CHECKING:
    from phylon.train.recipe import Recipe

# What the command line says of a run's length takes the place of what the recipe says of it otherwise.
GIVES_WAY = {"run.steps": ("run.epochs", "run.max_minutes"), "run.epochs": ("run.max_minutes",)}


def making_way(overrides: Mapping[str, Any]) -> dict[str, None]:
    """What a recipe says otherwise and ``overrides`` say in another way, to be unset first."""
    given = [path for path, value in overrides.items() if value is not None]
    return {other: None for path in given for other in GIVES_WAY.get(path, ()) if other not in overrides}


def idle(recipe: "Recipe") -> dict[str, str]:
    """The settings that have no effect in this recipe, by dotted path; why, and what to do."""
    run, objective, found = recipe.run, recipe.objective, {}
    if run.epochs is not None:
        found["run.steps"] = f"run.epochs = {run.epochs} says how long the run is; leave one of them out"
    if objective.by_tokens:
        most = getattr(objective, "max_tokens", None)
        found["run.batch_size"] = f"objective.max_tokens = {most} says how large a batch is; leave it out, or set that"
    if not objective.reads_text:
        found["data.seq_len"] = found["data.tokenizer"] = "this objective reads no text; leave it out"
    elif "from" in recipe.model and not isinstance(recipe.data.tokenizer, Loaded):
        found["data.tokenizer"] = "the tokenizer comes with the model that model.from names; leave it out"
    return found


def refuse_idle(recipe: "Recipe", given: Iterable[str]) -> None:
    """Refuse what was given, by dotted path, where something else that was given takes its place."""
    found = idle(recipe)
    for path in given:
        for other, why in found.items():
            if path == other or path.startswith(f"{other}."):
                raise UserError(f"{path} has no effect, since {why}")


def without_idle(recipe: "Recipe") -> "Recipe":
    """The recipe with what has no effect as it is by default, so that recipes that say the same are the same."""
    for path in idle(recipe):
        table, name = path.split(".")
        part = getattr(recipe, table)
        recipe = recipe.replace(**{table: part.replace(**{name: getattr(type(part)(), name)})})
    return recipe


def paths(data: Mapping[str, Any]) -> list[str]:
    """The settings that the tables of a recipe give."""
    return [f"{table}.{name}" for table, entries in data.items() if isinstance(entries, dict) for name in entries]
