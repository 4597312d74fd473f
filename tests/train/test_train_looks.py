"""Looks at a model in training: after the checkpoint, once in the log, refused at the start where they cannot be."""

import fcntl
import os
import signal
from contextlib import suppress

import pytest
import torch
from train_toys import ToyLoader, toy_model, toy_recipe

from phylon.spec import UserError
from phylon.train import AdamW, Callback, RunRecipe, Trainer, latest_checkpoint, read_metrics
from phylon.train.budget import TimeBudget
from phylon.train.checkpoint import Best, checkpoints, load_checkpoint, read_manifest
from phylon.train.ema import Ema
from phylon.train.final import check_average, kept_weights
from phylon.train.folder import MARKER, Lock, claim, clear
from phylon.train.objectives.next_token import NextToken
from phylon.train.optim import AdamWOptimizer
from phylon.train.schedule import InverseSqrt, WarmupCosine

HELD_OUT = {"held_out": lambda: [ToyLoader(seed=9).batch(0)], "sample": lambda model: ["text"]}


class Said(Callback):
    def __init__(self):
        self.all = []

    def said(self, message):
        self.all.append(message)


class DieAt(Callback):
    """What a kill at a record leaves: nothing after it."""

    def __init__(self, kind, step):
        self.at = (kind, step)

    def record(self, record, run):
        if (record["kind"], record["step"]) == self.at:
            raise KeyboardInterrupt


def trainer_in(folder, *callbacks, resume=False, schedule=None, looks=None, **run):
    recipe = toy_recipe(**{"steps": 6, "watch_every": None, **run})
    recipe = recipe if schedule is None else recipe.replace(schedule=schedule)
    trainer = Trainer(toy_model(0.1), ToyLoader(), recipe, folder, callbacks, **(HELD_OUT if looks is None else looks))
    if resume:
        trainer.resume(latest_checkpoint(folder / "checkpoints"))
    return trainer


def log(folder):
    timing = {"seconds", "tokens_per_s"}
    return [{k: v for k, v in r.items() if k not in timing} for r in read_metrics(folder / "metrics.jsonl")]


class Failing(NextToken, frozen=True, kw_only=True, tag="failing_for_tests"):
    def evaluate(self, model, batches):
        raise ValueError("cannot measure")


@pytest.mark.parametrize(("every", "step"), [(None, 6), (2, 2), (3, 3)])
def test_where_an_evaluation_fails_what_was_trained_is_saved(tmp_path, every, step):
    recipe = toy_recipe(steps=6, eval_every=every).replace(objective=Failing())
    trainer = Trainer(toy_model(), ToyLoader(), recipe, tmp_path, **HELD_OUT)
    with pytest.raises(ValueError, match="cannot measure"):
        trainer.run()
    assert load_checkpoint(latest_checkpoint(tmp_path / "checkpoints")).manifest.run.step == step


RUNS = [
    {"eval_every": 2, "sample_every": 3, "save_every": 3},
    {"eval_every": 2, "best": "loss"},
    {"eval_every": 6, "sample_every": 6, "save_every": 2, "best": "loss"},
    {},
]
DEATHS = [("eval", 6), ("samples", 6), ("end", 6), ("eval", 2), None]
FAST = [(1, 0), (3, 4)]


@pytest.mark.parametrize(
    ("run", "died"),
    [
        pytest.param(run, died, marks=() if (i, j) in FAST else pytest.mark.slow)
        for i, run in enumerate(RUNS)
        for j, died in enumerate(DEATHS)
    ],
)
def test_the_log_is_the_uninterrupted_one_wherever_the_run_died(tmp_path, run, died):
    """After the last checkpoint, between two looks, at the very end, and where nothing was left to do."""
    trainer_in(tmp_path / "whole", **run).run()
    if died is None:
        trainer_in(tmp_path / "parts", **run).run()
    else:
        with suppress(KeyboardInterrupt):
            trainer_in(tmp_path / "parts", DieAt(*died), **run).run()
    trainer_in(tmp_path / "parts", resume=True, **run).run()
    assert log(tmp_path / "parts") == log(tmp_path / "whole")
    one, two = (load_checkpoint(latest_checkpoint(tmp_path / name / "checkpoints")) for name in ("whole", "parts"))
    assert one.manifest.run.best == two.manifest.run.best
    assert all(torch.equal(one.model[name], two.model[name]) for name in one.model)


def test_the_best_evaluation_is_noted_in_a_checkpoint_that_is_there_already(tmp_path):
    trainer_in(tmp_path, eval_every=2, save_every=2, best="loss", keep=1).run()
    evals = {r["step"]: r["loss"] for r in log(tmp_path) if r["kind"] == "eval"}
    best = min(evals, key=lambda step: evals[step])
    found = [read_manifest(path) for path in checkpoints(tmp_path / "checkpoints")]
    assert found[-1].run.best == Best(step=best, value=evals[best])


def test_a_metric_that_is_not_measured_is_refused_before_the_first_step(tmp_path):
    trainer = trainer_in(tmp_path, best="accuracy")
    with pytest.raises(UserError, match=r"run\.best names no metric of this objective: 'accuracy'"):
        trainer.check()
    assert not (tmp_path / "metrics.jsonl").exists()
    weights = [p.clone() for p in trainer.model.parameters()]
    drawn = torch.get_rng_state()
    fine = trainer_in(tmp_path, best="loss")
    fine.check()
    assert all(torch.equal(a, b) for a, b in zip(weights, fine.model.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), drawn)


def test_held_out_data_that_cannot_be_read_are_found_at_the_start(tmp_path):
    def unreadable():
        raise UserError("cannot read 'x.tsv'")

    trainer = trainer_in(tmp_path, looks={"held_out": unreadable})
    for begin in (trainer.check, trainer.run):
        with pytest.raises(UserError, match=r"x\.tsv"):
            begin()


def test_a_mean_of_more_checkpoints_than_there_will_be_is_refused_at_the_start():
    with pytest.raises(UserError, match=r"a run of 12 steps writes 1: set run.save_every=2 or less"):
        check_average(RunRecipe(steps=12, average=5))
    with pytest.raises(UserError, match=r"writes 4: set run.save_every=2 or less"):
        check_average(RunRecipe(steps=12, average=5, save_every=3))
    with pytest.raises(UserError, match=r"writes 3: lower run\.average"):
        check_average(RunRecipe(steps=3, average=5, save_every=1))
    check_average(RunRecipe(steps=11, average=4, save_every=3))
    check_average(RunRecipe(steps=12, average=5, max_minutes=1.0))


def test_fewer_checkpoints_than_asked_for_lose_no_run(tmp_path):
    trainer = trainer_in(tmp_path, save_every=2, average=3)
    trainer.run()
    recipe = trainer.recipe.replace(run=trainer.recipe.run.replace(average=5))
    assert (
        "step-00000002, step-00000004, step-00000006" in kept_weights(recipe, trainer.state, trainer.checkpoints).what
    )


def test_a_warmup_longer_than_the_run_is_said(tmp_path):
    for schedule, run, expected in (
        (InverseSqrt(warmup=4000), {}, True),
        (WarmupCosine(warmup=6), {}, True),
        (WarmupCosine(warmup=5), {}, False),
        (WarmupCosine(warmup=9, total=100), {}, False),
        (WarmupCosine(warmup=9), {"max_minutes": 1.0}, False),
    ):
        said = Said()
        trainer_in(tmp_path, said, schedule=schedule, **run).check()
        assert sum(f"schedule.warmup is {schedule.warmup:,} and the run has 6" in m for m in said.all) == expected


def test_samples_of_a_model_that_writes_nothing_are_no_word(tmp_path):
    said = Said()
    trainer_in(tmp_path, said, looks={"sample": lambda model: []}).run()
    assert not [r for r in log(tmp_path) if r["kind"] == "samples"]
    assert not [message for message in said.all if "no samples" in message]


def test_a_plan_counts_the_steps_that_were_rolled_back_as_done():
    budget = TimeBudget(1000.0, 100_000)
    budget.begin(0, 0.0)
    budget.plan(100, 100.0)
    budget.went_back(60)  # to step 40
    total, _ = budget.plan(50, 110.0)
    assert total == pytest.approx(50 + 1000 - budget.reserve - 110, abs=2), "one step a second, as before"


def test_the_mean_of_narrow_weights_is_that_of_their_masters():
    weight = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = AdamWOptimizer(AdamW(weight_decay=0.0), [("w", weight)])
    ema = Ema(0.9, {"w": weight}, optimizer.masters)
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        optimizer.collect()
        optimizer.step(1e-4, 1.0)
        ema.update()
    assert torch.equal(weight, torch.ones_like(weight)), "too small a step for bf16; else this test says nothing"
    assert (ema.means["w"] < 1).all()


def test_one_process_at_a_time_and_a_kill_frees_the_folder(tmp_path):
    claim(tmp_path)
    ready, told = os.pipe()
    child = os.fork()
    if not child:
        taken = Lock(tmp_path)
        taken.take()
        os.write(told, b".")
        signal.pause()
    try:
        assert os.read(ready, 1) == b"."
        lock = Lock(tmp_path)
        with pytest.raises(UserError, match=f"another process is training in '{tmp_path}'"):
            lock.take()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    lock.take()
    with pytest.raises(UserError, match="another process"):
        Lock(tmp_path).take()
    lock.release()
    Lock(tmp_path).take()


def test_the_lock_of_a_marker_that_was_removed_locks_nothing(tmp_path, monkeypatch):
    flock, folder = fcntl.flock, tmp_path / "run"
    first, second, third = Lock(folder), Lock(folder), Lock(folder)
    first.claim()
    assert first.made
    assert first.held

    def removed_before(file, how):
        monkeypatch.setattr(fcntl, "flock", flock)
        clear(folder)
        first.release()
        claim(folder)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", removed_before)
    second.take()
    assert second.held
    assert os.path.samestat(os.fstat(second._file.fileno()), (folder / MARKER).stat())
    with pytest.raises(UserError, match="another process"):
        third.claim()
    assert not third.made
