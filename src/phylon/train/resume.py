"""Whether a checkpoint may be continued: differences of the recipe are refused, those of the machine are named."""

from typing import Any

from torch import Size

from phylon.model import build_meta
from phylon.spec import to_data
from phylon.spec.errors import UserError
from phylon.train.checkpoint import Manifest
from phylon.train.machine import changes
from phylon.train.prepare import PROVISIONAL_VOCAB
from phylon.train.recipe import Recipe, model_spec

# What only says how often to look or to save, and may differ without changing what is learned.
FREE = {"run.eval_every", "run.eval_rows", "run.sample_every", "run.save_every", "run.keep", "run.watch_every"}
# Bit for bit the same either way.
FREE |= {"run.recompute"}
# Which of the checkpoints become the model.
FREE |= {"run.best", "run.average"}
# What nothing can change on the way: the order of the data, the state of the optimizer, what is trained.
FIXED = ("objective.kind", "data.tokenizer", "data.seq_len", "run.batch_size", "run.seed", "optim.kind", "tune")
FIXED += ("model.family", "model.preset", "model.dtype", "objective.max_tokens")


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
    check_changes(changed, allow_changes, _fixed(changed, manifest.recipe, recipe))
    return changed + changes(manifest.environment, environment)


def check_before(manifest: Manifest, recipe: Recipe, allow_changes: bool) -> None:
    """``check_continuation`` as far as it goes before the data are read, which say how long ``run.epochs`` are."""
    before = {**manifest.recipe}
    if recipe.run.epochs is not None and before["run"].get("epochs") == recipe.run.epochs:
        before["run"] = before["run"] | {"steps": recipe.run.steps}
    changed = recipe_changes(before, to_data(recipe))
    check_changes(changed, allow_changes, _fixed(changed, manifest.recipe, recipe))


def check_changes(changed: list[str], allow_changes: bool, fixed: list[str]) -> None:
    """Refuse changes of the recipe: ``fixed``, which nothing can make on the way, and others unless allowed."""
    if fixed:
        raise UserError(
            f"{'; '.join(fixed)}: a run cannot change that on its way, and --allow-changes neither; resume with the "
            "run's own recipe.toml, or begin a new run in another folder (--from its model/ goes on from its weights)"
        )
    if changed and not allow_changes:
        raise UserError(
            f"the recipe is not the one of this run: {'; '.join(changed)}; "
            "resume with the run's own recipe.toml, or with --allow-changes"
        )


def _fixed(changed: list[str], before: dict[str, Any], now: Recipe) -> list[str]:
    """Those of the changes that a run cannot make on its way."""
    of_model = [phrase for phrase in changed if phrase.startswith("model.")]
    reshaped = of_model if of_model and _other_parameters(before, now) else []
    return [phrase for phrase in changed if phrase in reshaped or _is_fixed(phrase.partition(" ")[0])]


def _other_parameters(before: dict[str, Any], now: Recipe) -> bool:
    """Whether the models of two recipes differ in a parameter; false where one is not to be had any more."""
    try:
        return _shapes(now.replace(model=before["model"])) != _shapes(now)
    except UserError:
        return False


def _shapes(recipe: Recipe) -> dict[str, Size]:
    """The shapes of the parameters, as if the tokenizer had some size of its own."""
    spec = model_spec(recipe, PROVISIONAL_VOCAB if recipe.objective.reads_text else None)
    return {name: p.shape for name, p in build_meta(spec).named_parameters()}


def _is_fixed(path: str) -> bool:
    return any(path == fixed or path.startswith(f"{fixed}.") for fixed in FIXED)


def _flat(data: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(data, dict) or not data:
        return {path: data}
    found: dict[str, Any] = {}
    for key, value in data.items():
        found |= _flat(value, f"{path}.{key}" if path else key)
    return found
