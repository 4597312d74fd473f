"""``phylon.train``: a recipe (or a model's spec and data) to a trained model, its log, checkpoints and report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phylon.data import Source
from phylon.model import Model, ModelSpec
from phylon.spec import UserError, to_data
from phylon.text import Tokenizer
from phylon.train.callbacks import Callback
from phylon.train.checkpoint import latest_checkpoint, save_model
from phylon.train.prepare import prepare
from phylon.train.recipe import Recipe, apply_overrides, load_recipe, recipe_to_toml
from phylon.train.report import write_report, write_text
from phylon.train.trainer import Trainer


@dataclass(kw_only=True)
class TrainResult:
    """A finished run. ``loss`` is the last step's, ``held_out_loss`` the last evaluation's (``None`` without one)."""

    model: Model
    tokenizer: Tokenizer
    out: Path
    steps: int
    tokens: int
    seconds: float
    loss: float | None
    held_out_loss: float | None
    samples: list[str] = field(default_factory=list)


def train(
    recipe: Recipe | ModelSpec | str | Path,
    *,
    data: str | Path | Source | None = None,
    out: str | Path,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
    allow_changes: bool = False,
    sample: Callable[[Model], list[str]] | None = None,
    callbacks: Sequence[Callback] = (),
    device: str = "auto",
) -> TrainResult:
    """Train a model as a recipe says (a ``Recipe``, a file, or the name of one that comes with the library).

    A ``ModelSpec`` trains with the default recipe around it. ``data`` replaces the recipe's source; ``overrides`` are
    dotted paths. Writes ``out/``: ``recipe.toml``, ``metrics.jsonl``, ``checkpoints/``, ``model/`` and ``report.html``.
    ``resume`` goes on from the latest checkpoint (or begins, where there is none); a recipe that differs from the run's
    is refused with its differences unless ``allow_changes``. ``sample`` gives texts of the model now and then.

    Raises UserError for every mistake in the above, and Interrupted after Ctrl-C, once the last step is saved.
    """
    wanted = _recipe(recipe, data, overrides or {})
    out = Path(out)
    last = latest_checkpoint(out / "checkpoints")
    if (out / "recipe.toml").exists() and not resume:
        raise UserError(f"'{out}' already holds a run; resume it, or give another folder")

    def say(message: str) -> None:
        for callback in callbacks:
            callback.said(message)

    _make_folder(out)
    source = data if data is not None and not isinstance(data, str | Path) else None
    prepared = prepare(wanted, out, source, device, say, resume=last is not None)
    model = prepared.model
    say(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    trainer = Trainer(model, prepared.loader, wanted, out, callbacks, held_out=prepared.held_out, sample=sample)
    if last is not None:
        trainer.resume(last, allow_changes=allow_changes)
    write_text(out / "recipe.toml", recipe_to_toml(wanted))
    state = trainer.run()
    model.eval()
    save_model(model, out / "model")
    write_report(out, wanted, model, trainer.environment)
    return TrainResult(
        model=model,
        tokenizer=prepared.tokenizer,
        out=out,
        steps=state.step,
        tokens=state.tokens,
        seconds=state.seconds,
        loss=trainer.loss,
        held_out_loss=trainer.held_out_loss,
        samples=trainer.samples,
    )


def _recipe(given: Recipe | ModelSpec | str | Path, data: Any, overrides: Mapping[str, Any]) -> Recipe:
    if isinstance(given, ModelSpec):
        given = Recipe(model={"spec": to_data(given)})
    recipe = given if isinstance(given, Recipe) else load_recipe(given)
    changes = dict(overrides)
    if isinstance(data, str | Path):
        changes["data.source"] = str(data)
    return apply_overrides(recipe, changes)


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to '{out}': {error.strerror}") from None
