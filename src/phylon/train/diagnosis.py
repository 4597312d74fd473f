"""The report's pictures of what went on inside: gradients, updates, attention, routers, the machine."""

from collections.abc import Callable, Iterable
from statistics import median

from phylon.train.chart import Line, Points, line_chart, smooth
from phylon.train.metrics import Record

DEPTHS = 6  # shades between the first and the last layer


def charts(records: list[Record]) -> Iterable[tuple[str, str, str]]:
    """Title, one sentence and ``<svg>`` of every picture the log has numbers for."""
    steps = [r for r in records if r["kind"] == "step"]
    watched = [r for r in records if r["kind"] == "watch"]
    norms = [(r["step"] + 1, r["grad_norm"]) for r in steps if r["grad_norm"] is not None]
    yield (
        "Gradient norm",
        "Of the whole gradient, before clipping.",
        _pair(norms, "Gradient norm by step"),
    )
    speeds = [(r["step"] + 1, r["tokens_per_s"]) for r in steps]
    yield "Speed", "Tokens a second.", _pair(speeds, "Tokens a second by step")
    shares = [(r["step"], 100 * r["utilisation"]) for r in watched if r.get("utilisation") is not None]
    yield (
        "Utilisation",
        "Per cent of the machine's measured matrix-product speed that the model's own FLOPs make up.",
        _one(shares, "Utilisation in per cent by step"),
    )
    yield (
        "Size of the updates",
        "Change over weight, by layer: about 0.001 is usual; much more is wild, much less is standing still.",
        _layers(watched, "update_ratio", "Update-to-weight ratio by step and layer"),
    )
    moved = [(r["step"], 100 * r["moved"]) for r in watched if "moved" in r]
    yield (
        "Weights that moved",
        "Per cent of the weights that an update changed at all; rounding swallows the rest.",
        _one(moved, "Share of weights that moved by step"),
    )
    yield (
        "Attention entropy",
        "In nats, mean over heads and queries, by layer; near 0 every head looks at one token.",
        _layers(watched, "attention_entropy", "Attention entropy by step and layer"),
    )
    yield (
        "Largest attention score",
        "By layer; scores that grow without bound end in spikes.",
        _layers(watched, "logit_max", "Largest attention score by step and layer"),
    )
    yield (
        "Router balance",
        "Share of the busiest expert times the number of experts, by layer; 1 is even.",
        _layers(watched, "router_balance", "Router balance by step and layer"),
    )


def tiles(records: list[Record]) -> Iterable[tuple[str, str]]:
    """Figures of the last looks."""
    watched = [r for r in records if r["kind"] == "watch"]
    if watched:
        yield f"{100 * median(r['utilisation'] for r in watched):.0f} %", "utilisation (median)"
        yield f"{watched[-1]['activation_bytes'] / 2**20:,.0f} MiB", "activations kept"


def _one(points: Points, title: str) -> str:
    return line_chart([Line(points, "rate", dots=len(points) < 30)], height=150, x_label="step", title=title)


def _pair(points: Points, title: str) -> str:
    lines = [Line(points, "raw"), Line(smooth(points, len(points) // 40), "train")]
    return line_chart(lines, height=150, x_label="step", title=title)


def _layers(watched: list[Record], name: str, title: str) -> str:
    """One line a layer, from the first (light) to the last (dark)."""
    paths = list(dict.fromkeys(path for record in watched for path in record.get(name, {})))
    value: Callable[[Record, str], float | None] = lambda record, path: record.get(name, {}).get(path)
    lines = []
    for number, path in enumerate(paths):
        points = [(r["step"], v) for r in watched if (v := value(r, path)) is not None]
        shade = round(number * (DEPTHS - 1) / max(1, len(paths) - 1))
        ends = number in (0, len(paths) - 1)
        lines.append(Line(points, f"d{shade}", _short(path) if ends else "", dots=len(points) < 2))
    return line_chart(lines, height=190, x_label="step", title=title)


def _short(path: str) -> str:
    return path.replace("decoder.", "").replace("encoder.", "enc. ").replace("blocks.", "block ")
