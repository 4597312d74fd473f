"""The report page and the progress line."""

import io
import math
import re
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console
from train_toys import ToyLoader, toy_model, toy_recipe

from phylon.spec import UserError
from phylon.train import ProgressLine, Trainer, write_report
from phylon.train.chart import Line, line_chart, smooth
from phylon.train.checkpoint import RunState


def drawn(svg):
    return ElementTree.fromstring(svg)


def path_of(svg, style):
    data = next(e.get("d") for e in drawn(svg) if e.get("class") == f"line {style}")
    return [tuple(map(float, spot.split())) for spot in data[1:].split("L")]


def test_the_report_is_one_self_contained_page(tmp_path):
    texts = iter(range(100))
    trainer = Trainer(
        toy_model(),
        ToyLoader(),
        toy_recipe(steps=6, eval_every=2, sample_every=2),
        tmp_path / "my run",
        held_out=lambda: [ToyLoader(seed=9).batch(0)],
        sample=lambda model: [f"<b>text {next(texts)}</b>"],
    )
    trainer.run()
    page = write_report(trainer.out, trainer.recipe, trainer.model, trainer.environment).read_text("utf-8")
    assert not re.search(r"<script|https?://|\ssrc=|<link|@import|url\(", page)
    assert "<b>text" not in page
    assert re.search(r"<b>[0-9.]+ s</b><span>until the last step</span>", page)
    assert re.search(r"<b>[0-9.]+ s</b><span>in all</span>", page)
    for word in ("my run", "&lt;b&gt;text 2", "&lt;b&gt;text 0", "5,", "torch", "[schedule]", "held out"):
        assert word in page
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        drawn(svg)
    assert len(re.findall(r"<svg", page)) == 4  # loss, rate, gradient norm, speed


def test_a_run_without_steps_or_samples_has_a_page_too(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    page = write_report(tmp_path, toy_recipe(), toy_model(), {}).read_text("utf-8")
    assert "[run]" in page
    assert "<svg" not in page


def test_the_chart_places_points_in_proportion():
    svg = line_chart([Line([(0, 10), (5, 20), (10, 40)], "a")], height=200, x_label="x", title="t")
    (x0, y0), (x1, y1), (x2, y2) = path_of(svg, "a")
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert (y0 - y1) * 2 == pytest.approx(y1 - y2, abs=0.5)
    assert y0 > y1 > y2


def test_a_wide_range_is_drawn_on_a_logarithmic_axis():
    svg = line_chart([Line([(0, 1.0), (1, 0.1), (2, 0.01)], "a")], height=200, x_label="x", title="t")
    (_, y0), (_, y1), (_, y2) = path_of(svg, "a")
    assert y1 - y0 == pytest.approx(y2 - y1, abs=0.2)
    assert ">0.1<" in svg


def test_ticks_differ_and_steps_are_whole():
    """Three steps of a warmup from 7.5e-5 to 2.25e-4."""
    svg = line_chart([Line([(1, 7.5e-5), (2, 1.5e-4), (3, 2.25e-4)], "a")], height=150, x_label="step", title="t")
    ticks = re.findall(r'<text class="tick"[^>]*>([^<]*)</text>', svg)
    assert ticks == ["1e-4", "1.5e-4", "2e-4", "1", "2", "3", "step"]


def test_charts_take_what_a_bad_run_logs():
    bad = [(0, 1.0), (1, math.nan), (2, None), (3, math.inf), (4, 2.0)]
    assert len(path_of(line_chart([Line(bad, "a")], height=99, x_label="x", title="<&>"), "a")) == 2
    assert line_chart([Line([(0, math.nan)], "a")], height=99, x_label="x", title="t") == ""
    drawn(line_chart([Line([(3, 5.0)], "a")], height=99, x_label="x", title="<&>"))


def test_a_long_run_stays_a_small_page():
    points = [(i, 5 / (1 + i)) for i in range(100_000)]
    svg = line_chart([Line(points, "a", "train")], height=200, x_label="x", title="t")
    assert len(svg) < 20_000
    assert len(path_of(svg, "a")) <= 500


def test_smoothing_keeps_a_constant_and_calms_noise():
    noisy = [(i, 2.0 + (-1) ** i) for i in range(100)]
    assert [y for _, y in smooth([(i, 2.0) for i in range(9)], 4)] == pytest.approx([2.0] * 9)
    calm = [y for _, y in smooth(noisy, 20)][20:]
    assert max(calm) - min(calm) < 0.3


def progress(terminal):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=120, highlight=False, color_system=None)
    return ProgressLine(console), stream


@pytest.mark.parametrize("terminal", [True, False])
def test_the_progress_line_says_step_loss_speed_and_time_left(terminal):
    line, stream = progress(terminal)
    run = RunState(total=40)
    line.started(run)
    for step in range(10):
        run.step = step + 1
        line.record({"kind": "step", "step": step, "loss": 3.25, "tokens_per_s": 1234.0}, run)
    line.record({"kind": "eval", "step": 10, "loss": 3.5}, run)
    text = line.text(run)
    assert re.fullmatch(r"step 10/40  loss 3.25  held-out 3.50  1,234 tokens/s  0:0\d left", text)
    line.record({"kind": "watch", "step": 10, "utilisation": 0.383}, run)
    assert "1,234 tokens/s  38 % of the machine  0:0" in line.text(run)
    line.unit = "image"
    assert "1,234 images/s  38 % of the machine  0:0" in line.text(run)
    line.record({"kind": "samples", "step": 10, "texts": ["[not markup] ok"]}, run)
    line.ended(run)
    shown = stream.getvalue()
    assert "[not markup] ok" in shown
    assert "step 10/40" in shown
    assert ("\x1b[" in shown) == terminal


def test_the_time_left_of_a_timed_run_is_never_above_its_limit():
    line, _ = progress(False)
    run = RunState(total=10**9, limit=180.0, seconds=30.0)
    line.started(run)
    line._from = (0, line._from[1] - 30)
    run.step = 1
    assert line.text(run).endswith("2:30 left")


def test_a_loss_that_is_not_a_number_does_not_stay_in_the_line():
    line, _ = progress(False)
    run = RunState(total=9, step=3)
    line.started(run)
    for loss in (math.nan, 2.0):
        line.record({"kind": "step", "step": 1, "loss": loss, "tokens_per_s": 1.0}, run)
    assert "loss 2.00" in line.text(run)


def test_the_report_of_a_skipping_run_names_the_tensor(tmp_path):
    trainer = Trainer(toy_model(), ToyLoader(), toy_recipe(steps=2), tmp_path)
    with torch.no_grad():
        trainer.model.decoder.norm_final.bias[0] = math.nan
    with pytest.raises(UserError, match="nothing was learned"):
        trainer.run()
    page = write_report(tmp_path, trainer.recipe, trainer.model, trainer.environment).read_text("utf-8")
    assert "skipped" in page
    assert "decoder.norm_final" in page


def test_a_loss_that_is_not_finite_is_said_in_the_report():
    from phylon.train.report import report_page

    records = [
        {
            "kind": "step",
            "step": 0,
            "loss": None,
            "lr": 1.0,
            "grad_norm": None,
            "tokens": 4,
            "tokens_per_s": 1.0,
            "seconds": 1.0,
        },
        {"kind": "eval", "step": 1, "loss": None, "ema_loss": None, "metrics": {"perplexity": None}, "tokens": 4},
        {"kind": "kept", "step": 1, "what": "the model is that of step 1", "loss": None},
    ]
    page = report_page("run", records, toy_recipe(), toy_model(), {})
    assert page.count("not finite") == 3
