"""Never lose a run: loss spikes, fp16's scale, the mean of the weights, what a checkpoint protects, what it records."""

import errno
import math
import os
import random
import signal

import pytest
import torch
from train_toys import ToyLoader, toy_model, toy_recipe

from phylon.ops.loss import Loss
from phylon.spec import UserError
from phylon.train import Adafactor, Callback, Interrupted, Muon, Trainer, latest_checkpoint, read_metrics
from phylon.train.checkpoint import checkpoints, last_good, load_checkpoint, save_checkpoint
from phylon.train.objectives.next_token import NextToken
from phylon.train.scaling import GROW_EVERY, LossScale
from phylon.train.spikes import RollBack, SkipBatch, SpikeState

POLICY = RollBack(window=16, threshold=8.0, margin=4, slow=0.5, slow_steps=6)


class Learnable(ToyLoader):
    """Rows that count upwards, so that a loss falls; ``bad`` batches tell the opposite, a thousand times as loud."""

    def __init__(self, bad=()):
        super().__init__()
        self.bad = set(bad)

    def batch(self, step):
        draw = torch.Generator().manual_seed(step)
        first = torch.randint(13, (self.batch_size, 1), generator=draw)
        tokens = (first + torch.arange(12)) % 13
        targets = tokens.roll(-1, 1)
        targets[:, -1] = -100
        loud = torch.full((self.batch_size, 1), 1000 if step in self.bad else 1)
        if step in self.bad:
            targets[:, :-1] = (tokens[:, :-1] + 5) % 13
        return {"tokens": tokens, "segments": torch.ones_like(tokens), "targets": targets, "loud": loud}


class Loud(NextToken, frozen=True, kw_only=True, tag="loud_for_tests"):
    def losses(self, model, batch):
        found = super().losses(model, {name: value for name, value in batch.items() if name != "loud"})
        factor = batch["loud"].float().mean()
        return {name: Loss(loss.sum * factor, loss.count) for name, loss in found.items()}


def trained(folder, *, bad=(), policy=POLICY, resume=False, callbacks=(), **run):
    from phylon.train import AdamW

    options = {"steps": 60, "save_every": 5, "keep": 2, "on_spike": policy, "watch_every": None}
    optim = AdamW(lr=3e-2, betas=(0.9, 0.9))  # without clipping, so that a bad batch spoils the weights
    recipe = toy_recipe(optim=optim, **options | run).replace(objective=Loud())
    trainer = Trainer(toy_model(0.05), Learnable(bad), recipe, folder, callbacks)
    if resume:
        trainer.resume(latest_checkpoint(folder / "checkpoints"))
    trainer.run()
    return trainer


def log(folder, *kinds):
    timing = {"seconds", "tokens_per_s"}
    found = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in r.items() if k not in timing} for r in found if not kinds or r["kind"] in kinds]


def final(folder):
    return sum(r["loss"] for r in log(folder, "step")[-5:]) / 5


class StopAt(Callback):
    def __init__(self, kind, step):
        self.kind, self.step, self.messages = kind, step, []

    def record(self, record, run):
        if record["kind"] == self.kind and record["step"] == self.step:
            os.kill(os.getpid(), signal.SIGTERM)

    def said(self, message):
        self.messages.append(message)


@pytest.mark.parametrize("policy", [POLICY, SkipBatch(window=16)], ids=["roll back", "skip"])
def test_a_planted_bad_batch_is_survived_and_the_loss_ends_where_the_clean_runs_does(tmp_path, policy):
    trained(tmp_path / "clean", policy=policy)
    said = StopAt("none", 0)
    bad = trained(tmp_path / "bad", bad={40, 41}, policy=policy, callbacks=[said])
    trained(tmp_path / "unguarded", bad={40, 41}, policy=None)
    assert final(tmp_path / "bad") < 1.12 * final(tmp_path / "clean")
    assert final(tmp_path / "unguarded") > 1.2 * final(tmp_path / "clean"), "the positive control"
    assert not log(tmp_path / "clean", "skipped", "rolled_back")
    if isinstance(policy, SkipBatch):
        assert [(r["step"], r["batch"]) for r in log(tmp_path / "bad", "skipped")] == [(40, 40), (41, 41)]
        assert all(r["z_score"] > 8 for r in log(tmp_path / "bad", "skipped"))
        return
    first, second = log(tmp_path / "bad", "rolled_back")
    assert (first["step"], first["to"], first["batches"]) == (40, 35, [35, 40])
    assert (second["step"], second["to"], second["batches"]) == (35, 35, [41, 41])
    assert bad.state.spikes.passed == 7
    assert bad.state.step == 60
    rates = {r["step"]: r["lr"] for r in log(tmp_path / "bad", "step")}
    clean = {r["step"]: r["lr"] for r in log(tmp_path / "clean", "step")}
    assert [round(rates[s] / clean[s], 6) for s in (34, 35, 40, 41)] == [1.0, 0.5, 0.5, 1.0]
    assert sum("back to step 35, past batches 35 to 40" in message for message in said.messages) == 1


def test_a_rolled_back_run_resumes_bit_for_bit(tmp_path):
    whole = trained(tmp_path / "whole", bad={40})
    with pytest.raises(Interrupted):
        trained(tmp_path / "parts", bad={40}, callbacks=[StopAt("rolled_back", 40)])
    with pytest.raises(Interrupted):
        trained(tmp_path / "parts", bad={40}, callbacks=[StopAt("step", 52)], resume=True)
    parts = trained(tmp_path / "parts", bad={40}, resume=True)
    assert log(tmp_path / "parts") == log(tmp_path / "whole")
    assert parts.state.spikes == whole.state.spikes
    assert all(torch.equal(a, b) for a, b in zip(parts.model.parameters(), whole.model.parameters(), strict=True))


def test_a_run_killed_right_after_rolling_back_decides_the_same_again(tmp_path):
    class Die(Callback):
        def record(self, record, run):
            if record["kind"] == "rolled_back":
                raise KeyboardInterrupt

    whole = trained(tmp_path / "whole", bad={40})
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "parts", bad={40}, callbacks=[Die()])
    parts = trained(tmp_path / "parts", bad={40}, resume=True)
    assert log(tmp_path / "parts") == log(tmp_path / "whole")
    assert all(torch.equal(a, b) for a, b in zip(parts.model.parameters(), whole.model.parameters(), strict=True))


def test_data_that_are_bad_for_good_end_the_run_with_its_good_state_named(tmp_path):
    with pytest.raises(UserError, match=r"spiked again .* after 2 roll-backs.*step-000000"):
        trained(tmp_path, bad=range(40, 999), policy=POLICY.replace(most=2))
    assert load_checkpoint(latest_checkpoint(tmp_path / "checkpoints")).manifest.run.skipped_in_row == 0


def test_without_an_old_enough_checkpoint_the_batch_is_skipped(tmp_path):
    trained(tmp_path, bad={20}, save_every=None, steps=30)
    (record,) = log(tmp_path, "skipped")
    assert record["step"] == record["batch"] == 20
    assert not log(tmp_path, "rolled_back")


def test_the_score_is_robust_and_waits_for_a_window():
    state, policy = SpikeState(), SkipBatch(window=8, threshold=5.0)
    for loss in (2.0, 2.1, 1.9):
        assert state.z_score(1e9, policy) is None
        state.accept(loss, policy)
    state.accept(2.0, policy)
    assert state.z_score(math.inf, policy) == math.inf
    assert state.z_score(2.3, policy) is None
    assert state.z_score(2.5, policy) == pytest.approx(0.5 / (1.4826 * 0.05))
    for loss in (2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0):
        state.accept(loss, policy)
    assert len(state.losses) == 8
    assert state.z_score(2.05, policy) is None, "a deviation is at least 1 % of the median"
    assert state.z_score(2.2, policy) == pytest.approx(10.0)


def test_the_last_good_checkpoint_outlives_newer_bad_ones(tmp_path):
    trainer = trained(tmp_path, steps=5, save_every=None)
    good = latest_checkpoint(tmp_path / "checkpoints")
    kept = load_checkpoint(good)
    for step in (6, 7, 8, 9):
        kept.manifest.run.step, kept.manifest.run.skipped_in_row = step, step - 5
        save_checkpoint(tmp_path / "checkpoints", kept, 2)
    names = [path.name for path in checkpoints(tmp_path / "checkpoints")]
    assert names == ["step-00000005", "step-00000008", "step-00000009"]
    assert last_good(tmp_path / "checkpoints", 9) == good
    assert trainer.state.step == 5


@pytest.mark.parametrize("optim", [Adafactor(lr=0.05), Muon(lr=1e-2)], ids=["adafactor", "muon"])
def test_all_state_survives_a_resumption(tmp_path, optim):
    """Mean of the weights, spikes and another optimizer's moments: stopped at two places, bit for bit the whole run."""

    def go(folder, resume=False, callbacks=()):
        run = {"steps": 14, "ema": 0.9, "on_spike": SkipBatch(window=8), "recompute": "blocks", "eval_every": 7}
        recipe = toy_recipe(optim=optim, **run)
        held_out = lambda: [ToyLoader(seed=9).batch(0)]
        trainer = Trainer(toy_model(0.2), ToyLoader(), recipe, folder, callbacks, held_out=held_out)
        if resume:
            trainer.resume(latest_checkpoint(folder / "checkpoints"))
        trainer.run()
        return trainer

    whole = go(tmp_path / "whole")
    for step in (3, 10):
        with pytest.raises(Interrupted):
            go(tmp_path / "parts", resume=step > 3, callbacks=[StopAt("step", step)])
    parts = go(tmp_path / "parts", resume=True)
    assert log(tmp_path / "parts") == log(tmp_path / "whole")
    one, two = (load_checkpoint(latest_checkpoint(tmp_path / n / "checkpoints")) for n in ("whole", "parts"))
    for part in ("model", "optimizer", "random", "ema"):
        left, right = getattr(one, part), getattr(two, part)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left), part
    assert parts.state.spikes == whole.state.spikes
    records = log(tmp_path / "whole", "eval")
    assert all(r["ema_loss"] != r["loss"] for r in records)
    with whole.ema.swapped():
        assert whole._measure()["loss"] == records[-1]["ema_loss"]


def test_fp16_is_refused_on_a_cpu_and_its_scale_finds_its_place(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"run\.precision fp16 needs a GPU"):
        Trainer(toy_model(), ToyLoader(), toy_recipe(precision="fp16"), tmp_path / "refused")
    scale = LossScale(value=4.0)
    scale.overflowed()
    assert scale.value == 2.0
    for _ in range(GROW_EVERY):
        scale.succeeded()
    assert (scale.value, scale.good) == (4.0, 0)
    plain = Trainer(toy_model(), ToyLoader(), toy_recipe(steps=1), tmp_path / "plain")
    plain.run()
    # The arithmetic of a GPU run, on the CPU's autocast.
    monkeypatch.setattr("phylon.train.session.resolve_precision", lambda wanted, device: "fp16")
    fixed = ToyLoader().batch(0)

    def go(folder, steps=30):
        loader = ToyLoader()
        loader.batch = lambda step: fixed
        trainer = Trainer(toy_model(), loader, toy_recipe(precision="fp16", steps=steps), folder)
        trainer.state.loss_scale = LossScale(value=2.0**24)
        if (folder / "checkpoints").exists():
            trainer.resume(latest_checkpoint(folder / "checkpoints"), allow_changes=True)
        return trainer, trainer.run()

    trainer, state = go(tmp_path / "run")
    skipped, steps = log(tmp_path / "run", "skipped"), log(tmp_path / "run", "step")
    assert 5 < len(skipped) < 28
    assert state.skipped == 0, "a scale that is too high says nothing against the batches"
    assert state.loss_scale.value == 2.0**24 / 2 ** len(skipped)
    assert steps[-1]["loss"] < 0.9 * steps[0]["loss"]
    good = steps[len(skipped)]
    assert good["grad_norm"] == pytest.approx(log(tmp_path / "plain", "step")[0]["grad_norm"], rel=0.02)
    _, later = go(tmp_path / "run", 31)
    assert later.loss_scale.value == state.loss_scale.value
    assert trainer.environment["precision"] == "fp16"


def test_unreadable_data_end_the_run_in_one_line_with_its_state_kept(tmp_path):
    class Broken(ToyLoader):
        def batch(self, step):
            if step == 7:
                raise OSError(errno.EIO, "Input/output error", "shard-3.bin")
            return super().batch(step)

    trainer = Trainer(toy_model(), Broken(), toy_recipe(save_every=3), tmp_path)
    with pytest.raises(UserError, match=r"cannot read the data 'shard-3.bin' of step 7: input/output error") as caught:
        trainer.run()
    assert "\n" not in str(caught.value)
    last = latest_checkpoint(tmp_path / "checkpoints")
    assert last.name == "step-00000006"
    assert f"the last good state is {last}, --resume" in str(caught.value)
    again = Trainer(toy_model(), ToyLoader(), toy_recipe(save_every=3), tmp_path)
    again.resume(latest_checkpoint(tmp_path / "checkpoints"))
    assert again.run().step == 20


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: toy_recipe(ema=1.0), "ema"),
        (lambda: RollBack(margin=0), "margin"),
        (lambda: RollBack(slow=0.0), "slow"),
        (lambda: SkipBatch(window=3), "window"),
        (lambda: SkipBatch(threshold=0.0), "threshold"),
        (lambda: toy_recipe(watch_every=0), "watch_every"),
    ],
)
def test_bad_settings_are_one_line(make, words):
    with pytest.raises(UserError, match=words):
        make()


@pytest.mark.parametrize("seed", range(6))
def test_wherever_a_run_goes_back_to_its_best_weights_are_still_there(tmp_path, seed, monkeypatch):
    """Whatever the schedule of evaluations, checkpoints and spikes: the best that any checkpoint knows is kept."""
    draw = random.Random(seed)
    every = {"eval_every": draw.choice([2, 3, 5]), "save_every": draw.choice([3, 4, 10]), "keep": draw.choice([1, 2])}
    policy = RollBack(window=8, margin=draw.choice([1, 4, 9]), most=9)
    recipe = toy_recipe(**every, steps=40, on_spike=policy, best="loss", watch_every=None)
    spikes = set(draw.sample(range(12, 40), 3))

    class Planned(Trainer):
        def _measure(self, batches=None):
            return {"loss": draw.random()}

        def _spike(self, loss):
            return 99.0 if self.state.step + self.state.spikes.passed in spikes else None

    trainer = Planned(toy_model(), ToyLoader(), recipe, tmp_path, held_out=lambda: [ToyLoader().batch(0)])
    lasting = trainer._save

    def saved(**options):
        lasting(**options)
        here = {int(path.name[5:13]) for path in checkpoints(tmp_path / "checkpoints")}
        known = [load_checkpoint(path).manifest.run.best for path in checkpoints(tmp_path / "checkpoints")]
        assert {best.step for best in known if best is not None} <= here

    monkeypatch.setattr(trainer, "_save", saved)
    trainer.run()
    best, logged = trainer.state.best, list(read_metrics(tmp_path / "metrics.jsonl"))
    assert any(record["kind"] == "rolled_back" for record in logged)
    kept = [record["what"] for record in logged if record["kind"] == "kept"]
    assert kept == [] if best.step == 40 else f"that of step {best.step}" in kept[0]
