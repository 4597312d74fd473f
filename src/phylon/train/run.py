"""``phylon.train``: a recipe (or a model's spec and data) to a trained model, its log, checkpoints and report."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
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
from phylon.train.checkpoint import latest_checkpoint, read_manifest, save_model
from phylon.train.compiling import compiler_log
from phylon.train.final import with_epochs
from phylon.train.folder import STAGE, Lock, check_free, clear, is_run, replace_run, stage, unstage
from phylon.train.forecast import check_fits
from phylon.train.prepare import Prepared, check, prepare
from phylon.train.recipe import Recipe, apply_overrides, load_recipe, recipe_to_toml
from phylon.train.report import write_report, write_text
from phylon.train.resume import check_before
from phylon.train.session import OtherData
from phylon.train.sources import changed_files, check_files, note_files
from phylon.train.trainer import Trainer
from phylon.train.world import PeerLost, World, join_world, leave_world, lost_peer


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
    ``model/`` and ``report.html``, which is there however the run ends after its first step; with LoRA ``adapter/`` as
    well, and ``model/`` holds the merged weights. ``resume`` goes on from the latest checkpoint; a recipe that differs
    from the run's is refused with its differences unless ``allow_changes``, and where nothing can make them on the way.
    ``fresh`` replaces the run in ``out`` once nothing is found wrong with the new one and its data are prepared. A
    folder in which another process trains is refused.
    ``sample`` gives texts of the model now and then (or none), where the objective does not.

    Raises UserError for every mistake in the above, and Interrupted after Ctrl-C, once the last step is saved.
    """
    wanted = _recipe(recipe, data, overrides or {})
    out = Path(out) if out is not None else Path("runs") / _name(recipe, wanted)
    with compiler_log(out) if wanted.run.compile != "off" else nullcontext():
        return _train(recipe, wanted, data, out, resume, fresh, allow_changes, sample, callbacks, device)


def _train(
    recipe: Any,
    wanted: Recipe,
    data: Any,
    out: Path,
    resume: bool,
    fresh: bool,
    allow_changes: bool,
    sample: Callable[[Model], list[str]] | None,
    callbacks: Sequence[Callback],
    device: str,
) -> TrainResult:
    world, device = join_world(device)
    lock = Lock(out)
    try:
        world.from_first(lambda: _check_folder(recipe, out, lock, resume=resume, fresh=fresh))
        last = world.from_first(lambda: latest_checkpoint(out / "checkpoints") if resume else None)
        if last is not None:
            check_before(read_manifest(last), wanted, allow_changes)
        source = check(wanted, data if data is not None and not isinstance(data, str | Path) else None, device)
        if last is not None and not allow_changes:
            world.from_first(lambda: check_files(source, out))
        world.from_first(lambda: check_fits(wanted, source, device, world))
        watchers = tuple(callbacks) if world.first else ()
        trainer, prepared = _trainer(
            wanted, out, source, device, watchers, world, last, lock, sample, fresh=fresh, resume=resume
        )
        wanted = trainer.recipe
        if last is not None:
            try:
                trainer.resume(last, allow_changes=allow_changes)
            except OtherData as error:
                raise OtherData(error.what, changed_files(source, out)) from None
            if allow_changes:
                world.from_first(lambda: note_files(source, out))
        if world.first:
            write_text(out / "recipe.toml", recipe_to_toml(wanted))
            (out / "report.html").unlink(missing_ok=True)  # it says how the run ended before
        try:
            state = trainer.run()
            model = trainer.whole_model()
            averaged = trainer.whole_model(averaged=True) if trainer.ema is not None and trainer.ema.updates else None
            world.from_first(lambda: _write(trainer, model, averaged, out))
        except BaseException as error:
            _report_early_end(trainer, out, error)
            raise
    except UserError as error:
        if not isinstance(error, PeerLost):
            world.failed(error)  # before the others find this process gone
        raise
    except RuntimeError as error:
        if world.size == 1 or not lost_peer(error):
            raise
        raise PeerLost("another process of this run is gone before it began to train; start all again") from None
    finally:
        lock.release()
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


def _trainer(
    recipe: Recipe,
    out: Path,
    source: Source,
    device: str,
    watchers: Sequence[Callback],
    world: World,
    last: Path | None,
    lock: Lock,
    sample: Callable[[Model], list[str]] | None,
    *,
    fresh: bool,
    resume: bool,
) -> tuple[Trainer, Prepared]:
    """Claim the folder, prepare the run and look for what is wrong with it; only then is a finished run replaced."""
    staged = world.from_first(lambda: fresh and is_run(out))
    place = out / STAGE if staged else out
    try:
        prepared = world.one_after_the_other(
            lambda first: _prepared(recipe, out, place, source, device, watchers, first, last, lock, resume)
        )
        _say(watchers, _parameters(prepared.model))
        feed = prepared.feed
        recipe = with_epochs(recipe, feed.loader)
        trainer = Trainer(
            prepared.model,
            feed.loader,
            recipe,
            out,
            watchers,
            held_out=feed.held_out,
            sample=feed.sample or sample,
            world=world,
        )
        trainer.check()
        if staged:
            world.from_first(lambda: replace_run(out))
        if last is None:
            world.from_first(lambda: note_files(source, out))
    except BaseException as error:
        if world.first and staged and lock.held:
            unstage(out)
        elif lock.made and isinstance(error, UserError):
            clear(out)
        raise
    return trainer, prepared


def _prepared(
    recipe: Recipe,
    out: Path,
    place: Path,
    source: Source,
    device: str,
    watchers: Sequence[Callback],
    first: bool,
    last: Path | None,
    lock: Lock,
    resume: bool,
) -> Prepared:
    """What the trainer needs, kept in ``place``; the first process writes, the others read what it wrote."""

    def made(tokenizer: Tokenizer) -> None:
        for watcher in watchers:
            watcher.vocabulary(tokenizer)

    if first and last is None:
        began = is_run(out) and place == out
        lock.claim()
        if place != out:
            stage(out)
        elif not resume:
            _check_new(out)  # since it was looked at, another process may have begun and ended
        _say(watchers, f"no checkpoint in '{out}' yet: beginning again" if began else f"training in '{out}'")
    kept = last is not None or not first
    say = lambda message: _say(watchers, message)
    return prepare(recipe, place, source, device, say, made, resume=last is not None, kept=kept)


def _say(watchers: Sequence[Callback], message: str) -> None:
    for watcher in watchers:
        watcher.said(message)


def _write(trainer: Trainer, model: Model, averaged: Model | None, out: Path) -> None:
    """The trained model, its adapter, the mean of its weights, the report."""
    model.eval()
    if averaged is not None:
        merge_lora(averaged)
        save_model(averaged, out / "model_ema")
    if lora_tensors(model):
        save_adapter(model, out / "adapter", replace=True)
        merge_lora(model)
    save_model(model, out / "model")
    write_report(out, trainer.recipe, model, trainer.environment, ended=trainer.ended())


def _report_early_end(trainer: Trainer, out: Path, error: BaseException) -> None:
    """The report of a run that ``error`` ends after its first step, if the disk takes it."""
    if not trainer.world.first or not trainer.state.step:
        return
    known = isinstance(error, UserError | KeyboardInterrupt)
    why = " ".join(str(error).split()) or "interrupted" if known else f"{type(error).__name__}: {error}"
    with suppress(UserError, OSError):
        write_report(out, trainer.recipe, trainer.model, trainer.environment, ended=trainer.ended(why))


def _parameters(model: Model) -> str:
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return f"{total:,} parameters" + ("" if trained == total else f", {trained:,} of them trained")


def _check_folder(recipe: Any, out: Path, lock: Lock, *, resume: bool, fresh: bool) -> None:
    """Whether the run may begin (or go on) in ``out``; the folder is locked if it is a run's already."""
    if resume and fresh:
        raise UserError("--resume goes on with a run and --fresh removes it; choose one")
    if resume:
        if not is_run(out) and latest_checkpoint(out / "checkpoints") is None:
            raise UserError(f"there is no run to resume in '{out}'; leave --resume out to begin one")
        lock.take()
        return
    if isinstance(recipe, str | Path) and Path(recipe).is_file() and Path(recipe).resolve().parent == out.resolve():
        raise UserError(f"the recipe '{recipe}' lies in '{out}' itself, where the run's own would replace it; move it")
    if not fresh:
        _check_new(out)
    check_free(out)
    lock.take()


def _check_new(out: Path) -> None:
    """Refuse a folder that holds a run which has begun to train."""
    if is_run(out) and ((out / "recipe.toml").exists() or latest_checkpoint(out / "checkpoints") is not None):
        raise UserError(
            f"'{out}' already holds a run: --resume goes on with it, --fresh replaces it; or give another folder"
        )


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
