"""Which weights a run leaves: the last ones, the best of its evaluations, or the mean of its last checkpoints."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from phylon.data import Batches
from phylon.spec.errors import UserError, did_you_mean
from phylon.train.average import average_checkpoints
from phylon.train.checkpoint import Best, RunState, checkpoints, open_part, scheduled, step_of
from phylon.train.recipe import Recipe, RunRecipe

SMALLER_IS_BETTER = ("loss", "nll", "mse", "perplexity", "lm", "mlm", "nsp", "soft")
"""Everything else that is measured is a share, a correlation or a score, of which more is better."""


def with_epochs(recipe: Recipe, loader: Batches) -> Recipe:
    """The recipe with its ``epochs`` as steps, and an evaluation after each where none is asked for."""
    run = recipe.run
    if run.epochs is None:
        return recipe
    steps = getattr(loader, "steps_per_epoch", None)
    if steps is None:
        raise UserError("these data have no end, so run.epochs says nothing; give run.steps")
    if run.epochs * steps >= 2**63:
        raise UserError(f"run.epochs {run.epochs} are more steps than can be counted; lower it")
    every = steps if run.eval_every is None else run.eval_every
    return recipe.replace(run=run.replace(steps=run.epochs * steps, eval_every=every))


def check_metric(name: str, metrics: Mapping[str, float]) -> None:
    """Refuse a ``run.best`` that an evaluation does not measure."""
    if name not in metrics:
        raise UserError(f"run.best names no metric of this objective: '{name}'{did_you_mean(name, metrics)}")


def check_kept(recipe: Recipe) -> None:
    """``check_metric`` and ``check_average`` as far as the recipe alone can tell."""
    run, measured = recipe.run, recipe.objective.measured()
    if run.best is not None:
        if not recipe.data.held_out:
            raise UserError(f"run.best = '{run.best}' needs held-out data to compare weights on; set data.held_out")
        if measured is not None:
            check_metric(run.best, dict.fromkeys(("loss", *measured), 0.0))
    if run.epochs is None:
        check_average(run)


def check_average(run: RunRecipe) -> None:
    """Refuse a ``run.average`` of more checkpoints than the run will write."""
    written = 1 if run.save_every is None else -(-run.steps // run.save_every)
    if run.average is None or run.max_minutes is not None or run.average <= written:
        return
    every = run.steps // run.average
    fix = f"set run.save_every={every} or less, or lower run.average" if every else "lower run.average"
    raise UserError(
        f"run.average is the mean of {run.average} checkpoints and a run of {run.steps} steps writes {written}: {fix}"
    )


def better(name: str, metrics: Mapping[str, float], before: Best | None, step: int) -> Best | None:
    """The best evaluation so far, if this one is it; a tie stays with the earlier one."""
    check_metric(name, metrics)
    value = metrics[name]
    if not math.isfinite(value):
        return None
    sign = -1 if name.rpartition(".")[2] in SMALLER_IS_BETTER else 1
    return Best(step=step, value=value) if before is None or sign * value > sign * before.value else None


class Kept(NamedTuple):
    """The weights a run leaves where they are not its last ones, and what to say of them."""

    tensors: dict[str, Tensor]
    what: str


def kept_weights(recipe: Recipe, state: RunState, folder: Path) -> Kept | None:
    """What ``run.best`` or ``run.average`` keep of the checkpoints in ``folder``; ``None`` for the last weights."""
    best = state.best
    if recipe.run.average is not None:
        # Those of the schedule alone, however often the run was stopped. Fewer where time, a roll-back or a smaller
        # run.keep has taken some: the run is not lost for it.
        asked, found = recipe.run.average, scheduled(folder, recipe.run.save_every, state.step)
        tensors, used = average_checkpoints(folder, min(asked, len(found)), found)
        fewer = "" if len(used) == asked else f", as no more of the {asked} of run.average are left"
        return Kept(tensors, f"the model is the mean of {', '.join(path.name for path in used)}{fewer}")
    if recipe.run.best is None or best is None or best.step == state.step:
        return None
    found = [path for path in checkpoints(folder) if step_of(path) == best.step]
    if not found:
        raise UserError(
            f"the best weights, those of step {best.step}, are no longer in {folder}: --resume --set run.best=none "
            "keeps the last ones"
        )
    what = f"the model is that of step {best.step}, the best by {recipe.run.best}: {best.value:.4f}"
    source = open_part(found[-1], "model")
    return Kept({name: source.read(name).clone() for name in source.tensors}, what)
