"""``phylon.train``: a recipe (or a model's spec and data) to a trained model, its log, checkpoints and report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phylon.data import Source
from phylon.hub import save_adapter
from phylon.model import Model, ModelSpec
from phylon.model.passes import lora_tensors, merge_lora
from phylon.spec import UserError, to_data
from phylon.text import Tokenizer
from phylon.train.callbacks import Callback
from phylon.train.checkpoint import latest_checkpoint, save_model
from phylon.train.final import with_epochs
from phylon.train.folder import check_free, claim, clear, is_run
from phylon.train.forecast import check_fits
from phylon.train.prepare import Prepared, check, prepare
from phylon.train.recipe import Recipe, apply_overrides, load_recipe, recipe_to_toml
from phylon.train.report import write_report, write_text
from phylon.train.trainer import Trainer
from phylon.train.world import World, join_world, leave_world


@dataclass(kw_only=True)
class TrainResult:
    """A finished run. ``loss`` is the last step's, ``held_out_loss`` the last evaluation's (``None`` without one).

    ``metrics``: what else the last evaluation measured. ``tokenizer`` is ``None`` where the objective reads no text.
    """

    model: Model
    tokenizer: Tokenizer | None
    out: Path
    steps: int
    tokens: int
    seconds: float
    loss: float | None
    held_out_loss: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)


def train(
    recipe: Recipe | ModelSpec | str | Path,
    *,
    data: str | Path | Source | None = None,
    out: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
    fresh: bool = False,
    allow_changes: bool = False,
    sample: Callable[[Model], list[str]] | None = None,
    callbacks: Sequence[Callback] = (),
    device: str = "auto",
) -> TrainResult:
    """Train a model as a recipe says (a ``Recipe``, a file, or the name of one that comes with the library).

    A ``ModelSpec`` trains with the default recipe around it. ``data`` replaces the recipe's source; ``overrides`` are
    dotted paths. Writes ``out/`` (``runs/<name>`` unless given): ``recipe.toml``, ``metrics.jsonl``, ``checkpoints/``,
    ``model/`` and ``report.html``; with LoRA ``adapter/`` as well, and ``model/`` holds the merged weights. ``resume``
    goes on from the latest checkpoint; a recipe that differs from the run's is refused with its differences unless
    ``allow_changes``. ``fresh`` removes the run in ``out`` first, once nothing is found wrong with the new one.
    ``sample`` gives texts of the model now and then, where the objective does not.

    Raises UserError for every mistake in the above, and Interrupted after Ctrl-C, once the last step is saved.
    """
    wanted = _recipe(recipe, data, overrides or {})
    out = Path(out) if out is not None else Path("runs") / _name(recipe, wanted)
    world, device = join_world(device)
    try:
        world.from_first(lambda: _check_folder(recipe, out, resume=resume, fresh=fresh))
        last = world.from_first(lambda: latest_checkpoint(out / "checkpoints") if resume else None)
        source = check(wanted, data if data is not None and not isinstance(data, str | Path) else None, device)
        world.from_first(lambda: check_fits(wanted, source, device, world))
        watchers = tuple(callbacks) if world.first else ()
        prepared = _prepared(wanted, out, source, device, watchers, world, last, resume=resume, fresh=fresh)
        feed = prepared.feed
        wanted = with_epochs(wanted, feed.loader)
        trainer = Trainer(
            prepared.model,
            feed.loader,
            wanted,
            out,
            watchers,
            held_out=feed.held_out,
            sample=feed.sample or sample,
            world=world,
        )
        if last is not None:
            trainer.resume(last, allow_changes=allow_changes)
        if world.first:
            write_text(out / "recipe.toml", recipe_to_toml(wanted))
        state = trainer.run()
        model = trainer.whole_model()
        averaged = trainer.whole_model(averaged=True) if trainer.ema is not None and trainer.ema.updates else None
        world.from_first(lambda: _write(trainer, model, averaged, wanted, out))
    finally:
        leave_world(world)
    return TrainResult(
        model=model,
        tokenizer=prepared.tokenizer,
        out=out,
        steps=state.step,
        tokens=state.tokens,
        seconds=state.seconds,
        loss=trainer.loss,
        held_out_loss=trainer.held_out_loss,
        metrics=trainer.held_out_metrics,
        samples=trainer.samples,
    )


def _prepared(
    recipe: Recipe,
    out: Path,
    source: Source,
    device: str,
    watchers: Sequence[Callback],
    world: World,
    last: Path | None,
    *,
    resume: bool,
    fresh: bool,
) -> Prepared:
    """Claim the folder and make what the trainer needs; the first process writes, the others read what it wrote."""

    def say(message: str) -> None:
        for watcher in watchers:
            watcher.said(message)

    def made(tokenizer: Tokenizer) -> None:
        for watcher in watchers:
            watcher.vocabulary(tokenizer)

    def make(first: bool) -> Prepared:
        if first and fresh:
            clear(out)
        if first and last is None:
            claim(out)
            say(f"no checkpoint in '{out}' yet: beginning again" if resume else f"training in '{out}'")
        try:
            kept = last is not None or not first
            return prepare(recipe, out, source, device, say, made, resume=last is not None, kept=kept)
        except UserError:
            if first and not resume:
                clear(out)
            raise

    prepared = world.one_after_the_other(make)
    say(_parameters(prepared.model))
    return prepared


def _write(trainer: Trainer, model: Model, averaged: Model | None, recipe: Recipe, out: Path) -> None:
    """The trained model, its adapter, the mean of its weights, the report."""
    model.eval()
    if averaged is not None:
        merge_lora(averaged)
        save_model(averaged, out / "model_ema")
    if lora_tensors(model):
        save_adapter(model, out / "adapter", replace=True)
        merge_lora(model)
    save_model(model, out / "model")
    write_report(out, recipe, model, trainer.environment)


def _parameters(model: Model) -> str:
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return f"{total:,} parameters" + ("" if trained == total else f", {trained:,} of them trained")


def _check_folder(recipe: Any, out: Path, *, resume: bool, fresh: bool) -> None:
    """Whether the run may begin (or go on) in ``out``."""
    if resume and fresh:
        raise UserError("--resume goes on with a run and --fresh removes it; choose one")
    if resume:
        if not is_run(out) and latest_checkpoint(out / "checkpoints") is None:
            raise UserError(f"there is no run to resume in '{out}'; leave --resume out to begin one")
        return
    if isinstance(recipe, str | Path) and Path(recipe).is_file() and Path(recipe).resolve().parent == out.resolve():
        raise UserError(f"the recipe '{recipe}' lies in '{out}' itself, where the run's own would replace it; move it")
    if not fresh and is_run(out) and (out / "recipe.toml").exists():
        raise UserError(
            f"'{out}' already holds a run: --resume goes on with it, --fresh removes it first; or give another folder"
        )
    check_free(out)


def _name(given: Any, recipe: Recipe) -> str:
    """What to call the folder of a run that was given none."""
    if isinstance(given, str | Path):
        return Path(given).stem
    start = recipe.model.get("from")
    return str(recipe.model.get("preset") or recipe.model.get("family") or (Path(start).stem if start else "model"))


def _recipe(given: Recipe | ModelSpec | str | Path, data: Any, overrides: Mapping[str, Any]) -> Recipe:
    changes = dict(overrides)
    if isinstance(data, str | Path):
        changes["data.source"] = str(data)
    if isinstance(given, ModelSpec):
        given = Recipe(model={"spec": to_data(given)})
    return apply_overrides(given, changes) if isinstance(given, Recipe) else load_recipe(given, changes)
