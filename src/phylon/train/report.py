"""The report of a run: one HTML page with its curves, its samples, its recipe and its machine; nothing to load."""

import os
import tempfile
from collections.abc import Iterable, Mapping
from html import escape
from importlib import resources
from pathlib import Path
from statistics import median

from phylon.data import Texts
from phylon.data.documents import kind_of
from phylon.model import Model
from phylon.spec.errors import UserError, system_reason
from phylon.train.chart import Line, line_chart, smooth
from phylon.train.diagnosis import charts, tiles
from phylon.train.metrics import Record, read_metrics
from phylon.train.recipe import Recipe, recipe_to_toml

MOST_EARLIER_SAMPLES = 8


def write_report(
    out: Path, recipe: Recipe, model: Model, environment: Mapping[str, str], *, ended: str | None = None
) -> Path:
    """Write ``out/report.html`` from the run's log; ``ended`` says how the run did."""
    records = list(read_metrics(out / "metrics.jsonl"))
    page = report_page(out.resolve().name, records, recipe, model, environment, ended=ended)
    write_text(out / "report.html", page)
    return out / "report.html"


def report_page(
    name: str,
    records: list[Record],
    recipe: Recipe,
    model: Model,
    environment: Mapping[str, str],
    *,
    ended: str | None = None,
) -> str:
    """The page of a run called ``name`` with the log ``records``."""
    records = _as_it_counted(records)
    steps, evals, samples = (_of_kind(records, kind) for kind in ("step", "eval", "samples"))
    n_params = sum(p.numel() for p in model.parameters())
    figures = "".join(_tile(*tile) for tile in _figures(records, n_params, recipe.objective.counted))
    body = [
        f"<header><h1>{escape(name)}</h1><p>{escape(_subtitle(recipe, n_params))}</p></header>",
        f'<div class="tiles">{figures}</div>',
        _section("How it ended", f'<div class="card">{escape(ended)}</div>' if ended else ""),
        _section("Loss", f'<div class="card">{_loss_chart(steps, evals)}</div>' if steps else ""),
        _section("Final samples", "".join(f'<div class="card"><pre>{escape(t)}</pre></div>' for t in _final(samples))),
        _section("Samples while it learned", _earlier(samples)),
        _section("Learning rate", f'<div class="card">{_rate_chart(steps)}</div>' if steps else ""),
        *(
            _section(title, f'<p class="about">{escape(about)}</p><div class="card">{svg}</div>' if svg else "")
            for title, about, svg in charts(records)
        ),
        _section("Held-out loss", _table((str(r["step"]), _number(r["loss"], ".4f")) for r in evals), fold=True),
        _section("What went wrong on the way", _events(records)),
        _section("Recipe", f'<div class="card"><pre>{escape(recipe_to_toml(recipe))}</pre></div>'),
        _section("Machine and versions", _table(environment.items())),
    ]
    style = (resources.files("phylon.train") / "report.css").read_text("utf-8")
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    footer = f"<footer>Written by phylon {escape(environment.get('phylon', ''))}.</footer>"
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<title>{escape(name)}: training report</title>'
        f"<style>\n{style}</style></head>\n<body>\n" + "\n".join(filter(None, body)) + f"\n{footer}\n</body></html>\n"
    )


def write_text(path: Path, text: str) -> None:
    """Write beside, then rename."""
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise UserError(f"cannot write '{path}': {system_reason(error)}") from None


def _subtitle(recipe: Recipe, n_params: int) -> str:
    model = recipe.model.get("preset") or recipe.model.get("family") or recipe.model.get("from", "model")
    source = recipe.data.source
    named = getattr(source, "path", "the recipe's own text" if isinstance(source, Texts) else kind_of(source))
    return f"{model}, {n_params:,} parameters, trained on {named}"


def _of_kind(records: list[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def _as_it_counted(records: list[Record]) -> list[Record]:
    """The log without the steps that a roll-back has undone."""
    kept: list[Record] = []
    for record in records:
        if record["kind"] == "rolled_back":
            kept = [r for r in kept if not _undone(r, record["to"])]
        kept.append(record)
    return kept


def _undone(record: Record, to: int) -> bool:
    """Whether going back to step ``to`` undoes what was logged: steps from there on, and looks at later weights."""
    if record["kind"] in ("rolled_back", "skipped", "resumed"):
        return False
    return record["step"] >= to + (record["kind"] != "step")


def _figures(records: list[Record], n_params: int, unit: str) -> Iterable[tuple[str, str]]:
    steps, evals, ends = (_of_kind(records, kind) for kind in ("step", "eval", "end"))
    yield f"{n_params:,}", "parameters"
    if steps:
        last = steps[-1]
        yield f"{last['step'] + 1:,}", "steps"
        yield f"{last['tokens']:,}", f"{unit}s seen"
        yield f"{median(r['tokens_per_s'] for r in steps):,.0f}", f"{unit}s/s (median)"
        yield _clock(last["seconds"]), "until the last step"
        if ends:
            yield _clock(ends[-1]["seconds"]), "in all"
        if last["loss"] is not None:
            yield f"{last['loss']:.4g}", "loss of the last step"
    if evals:
        yield _number(evals[-1]["loss"], ".4g"), "held-out loss"
        if "ema_loss" in evals[-1]:
            yield _number(evals[-1]["ema_loss"], ".4g"), "of the mean of the weights"
    yield from tiles(records)


def _loss_chart(steps: list[Record], evals: list[Record]) -> str:
    raw = [(r["step"] + 1, r["loss"]) for r in steps if r["loss"] is not None]
    lines = [
        Line(raw, "raw"),
        Line(smooth(raw, len(raw) // 40), "train", "training"),
        Line(_points(evals, "loss"), "held", "held out", dots=True),
        Line(_points(evals, "ema_loss"), "rate", "mean of weights", dots=True),
    ]
    drawn = [line for line in lines if line.points]
    return line_chart(drawn, height=320, x_label="step", title="Training and held-out loss by step")


def _points(evals: list[Record], name: str) -> list[tuple[float, float]]:
    return [(r["step"], r[name]) for r in evals if r.get(name) is not None]


def _number(value: float | None, form: str) -> str:
    """A number of the log, where null stands for one that is not finite."""
    return "not finite" if value is None else format(value, form)


def _rate_chart(steps: list[Record]) -> str:
    points = [(r["step"] + 1, r["lr"]) for r in steps]
    return line_chart([Line(points, "rate")], height=150, x_label="step", title="Learning rate by step")


def _final(samples: list[Record]) -> list[str]:
    return samples[-1]["texts"] if samples else []


def _earlier(samples: list[Record]) -> str:
    """One text of each sampling before the last: from the first on, at most ``MOST_EARLIER_SAMPLES``."""
    before = [record for record in samples[:-1] if record["texts"]]
    stride = -(-len(before) // MOST_EARLIER_SAMPLES) or 1
    rows = [
        f'<tr><th class="number">step {r["step"]:,}</th><td><pre>{escape(r["texts"][0])}</pre></td></tr>'
        for r in before[::stride]
    ]
    return f'<div class="card"><table>{"".join(rows)}</table></div>' if rows else ""


def _events(records: list[Record]) -> str:
    rows = [(f"step {r['step']}", _event(r)) for r in records if r["kind"] in ("skipped", "rolled_back", "resumed")]
    return _table(rows)


def _event(record: Record) -> str:
    if record["kind"] == "resumed":
        return f"resumed: {'; '.join(record['changes'])}"
    if record["kind"] == "rolled_back":
        first, last = record["batches"]
        return (
            f"the loss {record['loss']:.4g} was {record['z_score']:.1f} deviations above the median: back to step "
            f"{record['to']}, past batches {first} to {last}, at {record['slow']:g} of the rate until step "
            f"{record['slow_until']}"
        )
    if record.get("tensors"):
        return f"skipped: the gradient of {', '.join(record['tensors'])} was not finite"
    return f"skipped: {record.get('reason', 'the log says why')}"


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = "".join(
        f'<tr><th class="number">{escape(left)}</th><td class="number">{escape(right)}</td></tr>'
        for left, right in rows
    )
    return f'<div class="card"><table>{cells}</table></div>' if cells else ""


def _section(title: str, content: str, fold: bool = False) -> str:
    if not content:
        return ""
    if fold:
        return f"<details><summary>{escape(title)}, in numbers</summary>{content}</details>"
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _tile(value: str, label: str) -> str:
    return f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>'


def _clock(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{minutes:.0f} min {rest:.0f} s" if minutes else f"{rest:.1f} s"
