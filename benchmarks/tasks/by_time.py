"""A Transformer's BLEU after given CPU seconds of training: what ``recurrent.py`` is to be held against.

The run of a recipe is stopped (as Ctrl-C stops it, with everything saved) when its steps have taken so much CPU time,
measured on held-out pairs, as it is and as the mean of its last checkpoints, and resumed:

    python benchmarks/tasks/by_time.py benchmarks/tasks/en-de.toml runs/en-de --seconds 280 560 700 --rows 300
"""

import argparse
import json
import signal
import time
from pathlib import Path

import torch

from phylon.train import Interrupted, load_recipe, train
from phylon.train.average import average_checkpoints
from phylon.train.callbacks import Callback
from phylon.train.checkpoint import RunState, latest_checkpoint, load_checkpoint, load_model_tensors
from phylon.train.metrics import Record
from phylon.train.prepare import prepare, recipe_source

ENDLESS = 1_000_000


class Stop(Callback):
    """Asks the run to stop after a step once ``until`` CPU seconds of this process have gone into steps."""

    def __init__(self) -> None:
        self.spent, self.until = 0.0, 0.0

    def started(self, run: RunState) -> None:
        self.before = time.process_time()

    def record(self, record: Record, run: RunState) -> None:
        now = time.process_time()
        if record["kind"] in ("step", "watch"):
            self.spent += now - self.before
        self.before = now
        if record["kind"] == "step" and self.spent >= self.until:
            signal.raise_signal(signal.SIGINT)

    def said(self, message: str) -> None:
        self.before = time.process_time()  # a checkpoint has been written


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("recipe", type=Path)
    options.add_argument("run", type=Path)
    options.add_argument("--seconds", type=float, nargs="+", required=True, help="CPU time of training at each BLEU")
    options.add_argument("--rows", type=int, default=None, help="held-out pairs of the BLEU")
    given = options.parse_args()
    torch.set_num_threads(1)
    changes = {"run.steps": ENDLESS, "run.average": None, "run.sample_every": None, "run.eval_every": None}
    stop = Stop()
    for index, until in enumerate(sorted(given.seconds)):
        stop.until = until
        try:
            train(given.recipe, out=given.run, overrides=changes, resume=index > 0, callbacks=[stop])
        except Interrupted:
            measure(given.run, stop.spent, given.rows)


def measure(run: Path, spent: float, rows: int | None) -> None:
    """Print the loss and BLEU of the last checkpoint, and of the mean of the last ones."""
    recipe = load_recipe(run / "recipe.toml", {"run.eval_rows": rows})
    prepared = prepare(recipe, run, recipe_source(recipe.data), "cpu", print, lambda made: None, resume=True, kept=True)
    held_out, model = prepared.feed.held_out, prepared.model.eval()
    folder = run / "checkpoints"
    last = latest_checkpoint(folder)
    assert held_out is not None, "the run holds nothing out"
    assert last is not None, "the run has been stopped, and saved"
    found = load_checkpoint(last)
    state = found.manifest.run
    print(json.dumps({"step": state.step, "tokens": state.tokens, "cpu_seconds": spent}), flush=True)
    averaged, files = average_checkpoints(folder, recipe.run.keep)
    for what, tensors in ((last.name, found.model), (", ".join(path.name for path in files), averaged)):
        load_model_tensors(model, tensors)
        with torch.inference_mode():
            result = recipe.objective.evaluate(model, held_out())
        print(json.dumps({"step": state.step, "cpu_seconds": spent, "weights": what, **result}), flush=True)


if __name__ == "__main__":
    main()
