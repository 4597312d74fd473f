"""What a recipe may well mean, and more probably does not: it is said before the first step, and the run goes on."""

from collections.abc import Iterator

from phylon.data import Batches, BatchOrder, Loader
from phylon.train.recipe import Recipe
from phylon.train.spikes import RollBack


def doubtful(recipe: Recipe, loader: Batches, held_out: bool) -> Iterator[str]:
    """One line for each pair of settings, or setting and data, of which one spoils the other."""
    run, schedule = recipe.run, recipe.schedule
    if run.max_minutes is None and schedule.total is None and schedule.warmup >= run.steps:
        reached = schedule.ratio(run.steps - 1, run.steps)
        yield (
            f"schedule.warmup is {schedule.warmup:,} and the run has {run.steps:,} steps: the rate rises to "
            f"{reached:.0%} of optim.lr and no further"
        )
    if schedule.total is not None and schedule.total < run.steps:
        yield (
            f"schedule.total is {schedule.total:,} and the run has {run.steps:,} steps: from step {schedule.total:,} "
            "on the rate is that of the schedule's end"
        )
    if isinstance(run.on_spike, RollBack) and run.save_every is None and run.best is None:
        yield (
            "run.on_spike = roll_back goes back to a checkpoint, and without run.save_every there is none: the batch "
            "of a spike is skipped instead"
        )
    if not held_out:
        for name in ("eval_every", "eval_rows"):
            if getattr(run, name) is not None:
                yield f"run.{name} says nothing: no data are held out (data.held_out = 0), so nothing is evaluated"
    if isinstance(loader, Loader) and isinstance(loader.order, BatchOrder):
        size, rows = loader.order.batch_size, loader.one_pass
        if size > rows:
            yield (
                f"run.batch_size is {size:,} and the training data are {rows:,} rows: every batch holds them "
                f"{size / rows:.3g} times; set run.batch_size={rows} or less, or give more data"
            )
