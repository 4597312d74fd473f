"""A live line on standard error (step, loss, speed, time left); plain lines where that is no terminal."""

import math
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from phylon.train.callbacks import Callback
from phylon.train.checkpoint import RunState
from phylon.train.metrics import Record

PLAIN_EVERY = 10.0  # seconds between plain lines
SMOOTHING = 0.9


class ProgressLine(Callback):
    """Shows a run while it goes. ``console`` defaults to standard error; ``unit`` is what the objective counts."""

    def __init__(self, console: Console | None = None, *, unit: str = "token") -> None:
        self.unit = unit
        self.console = console or Console(file=sys.stderr, highlight=False)
        self.live = self.console.is_terminal
        self.loss: float | None = None
        self.speed: float | None = None
        self.held_out: float | None = None
        self.utilisation: float | None = None
        self._bar: Progress | None = None
        self._shown = time.monotonic()

    def started(self, run: RunState) -> None:
        self._from = (run.step, time.monotonic())
        if not self.live:
            return
        columns = (BarColumn(bar_width=24), TextColumn("{task.fields[text]}", markup=False))
        self._bar = Progress(*columns, console=self.console, refresh_per_second=4)
        self._task = self._bar.add_task("train", total=run.total, completed=run.step, text="")
        self._bar.start()

    def record(self, record: Record, run: RunState) -> None:
        kind = record["kind"]
        if kind == "step":
            self.loss = _smooth(self.loss, record["loss"])
            self.speed = _smooth(self.speed, record["tokens_per_s"])
            self._show(run)
        elif kind == "eval":
            self.held_out = record["loss"]
            if not self.live:
                self.said(f"step {record['step']}: held-out loss {record['loss']:.4f}")
        elif kind == "watch":
            self.utilisation = record["utilisation"]
        elif kind == "samples":
            for text in record["texts"]:
                self.said(f"── step {record['step']} ──\n{text}")
        elif kind == "plan" and self._bar is not None:
            self._bar.update(self._task, total=run.total)

    def said(self, message: str) -> None:
        self.console.print(message, markup=False, soft_wrap=True)

    def ended(self, run: RunState) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=run.step, text=self.text(run))
            self._bar.stop()
            self._bar = None
        elif self.loss is not None:
            self.said(self.text(run))

    def text(self, run: RunState) -> str:
        """``step 120/400  loss 3.21  held-out 3.40  8,120 tokens/s  1:02 left``."""
        parts = [f"step {run.step}/{run.total}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}" if self.loss < 0.1 else f"loss {self.loss:.2f}")
        if self.held_out is not None:
            parts.append(f"held-out {self.held_out:.2f}")
        if self.speed is not None:
            parts.append(f"{self.speed:,.0f} {self.unit}s/s")
        if self.utilisation is not None:
            parts.append(f"{100 * self.utilisation:.0f} % of the machine")
        steps, seconds = run.step - self._from[0], time.monotonic() - self._from[1]
        if steps and run.step < run.total:
            left = seconds / steps * (run.total - run.step)
            parts.append(f"{_clock(left if run.limit is None else min(left, max(0.0, run.limit - run.seconds)))} left")
        elif steps:
            parts.append(f"{_clock(seconds)} in all")
        return "  ".join(parts)

    def _show(self, run: RunState) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=run.step, text=self.text(run))
        elif time.monotonic() - self._shown >= PLAIN_EVERY:
            self._shown = time.monotonic()
            self.said(self.text(run))


def _smooth(before: float | None, now: float) -> float:
    return now if before is None or not math.isfinite(before) else SMOOTHING * before + (1 - SMOOTHING) * now


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
