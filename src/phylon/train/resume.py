"""Whether a checkpoint may be continued: differences of the recipe are refused, those of the machine are named."""

from typing import Any

from phylon.spec import to_data
from phylon.spec.errors import UserError
from phylon.train.checkpoint import Manifest
from phylon.train.machine import changes
from phylon.train.recipe import Recipe

# What only says how often to look or to save, and may differ without changing what is learned.
FREE = {"run.eval_every", "run.eval_rows", "run.sample_every", "run.save_every", "run.keep", "run.watch_every"}
# Bit for bit the same either way.
FREE |= {"run.recompute"}


def recipe_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One phrase for every entry of two recipes (as plain data) that differs and matters."""
    old, new = _flat(before), _flat(now)
    paths = [path for path in {**old, **new} if old.get(path) != new.get(path) and path not in FREE]
    return [f"{path} was {old.get(path, 'absent')} and is now {new.get(path, 'absent')}" for path in paths]


def check_continuation(
    manifest: Manifest, recipe: Recipe, environment: dict[str, str], allow_changes: bool
) -> list[str]:
    """What differs from when the checkpoint was written; a changed recipe is refused unless ``allow_changes``."""
    changed = recipe_changes(manifest.recipe, to_data(recipe))
    if changed and not allow_changes:
        raise UserError(
            f"the recipe is not the one of this run: {'; '.join(changed)}; "
            "resume with the run's own recipe.toml, or with --allow-changes"
        )
    return changed + changes(manifest.environment, environment)


def _flat(data: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(data, dict) or not data:
        return {path: data}
    found: dict[str, Any] = {}
    for key, value in data.items():
        found |= _flat(value, f"{path}.{key}" if path else key)
    return found
