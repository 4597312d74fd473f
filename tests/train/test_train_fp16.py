"""Loss scaling, on the CPU's fp16 autocast: growth, backing off, clipping behind it, parts of a batch, resuming."""

import math
import os
import signal

import pytest
import torch
from train_toys import ToyLoader, toy_model, toy_recipe

from phylon.spec import UserError
from phylon.train import AdamW, Callback, Interrupted, Trainer, latest_checkpoint, read_metrics, scaling
from phylon.train.checkpoint import load_checkpoint
from phylon.train.objectives.next_token import NextToken
from phylon.train.scaling import LossScale


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr("phylon.train.session.resolve_precision", lambda wanted, device: wanted)
    monkeypatch.setattr(scaling, "GROW_EVERY", 3)


class Scales(Callback):
    """What the scale is after every record, and a signal at step ``stop``."""

    def __init__(self, stop=None):
        self.stop, self.seen = stop, []

    def record(self, record, run):
        if record["kind"] == "step":
            self.seen.append((run.loss_scale.value, run.loss_scale.good))
            if record["step"] == self.stop:
                os.kill(os.getpid(), signal.SIGTERM)


def run(folder, scale=2.0**8, stop=None, resume=False, model=None, precision="fp16", **options):
    optim = options.pop("optim", AdamW(lr=1e-2, clip=1.0))
    scales = Scales(stop)
    recipe = toy_recipe(optim=optim, precision=precision, **options)
    trainer = Trainer(model or toy_model(0.1), ToyLoader(), recipe, folder, [scales] if precision == "fp16" else ())
    if precision == "fp16":
        trainer.state.loss_scale = LossScale(value=scale)
    if resume:
        trainer.resume(latest_checkpoint(folder / "checkpoints"))
    if stop is None:
        trainer.run()
    else:
        with pytest.raises(Interrupted):
            trainer.run()
    return trainer, scales.seen


def log(folder, *kinds):
    found = [r for r in read_metrics(folder / "metrics.jsonl") if not kinds or r["kind"] in kinds]
    return [{k: v for k, v in r.items() if k not in ("seconds", "tokens_per_s")} for r in found]


def moments(trainer):
    return {name: state["exp_avg"] for name, state in trainer.optimizer.state.items()}


def norm(tensors):
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


def test_the_scale_grows_after_good_steps_and_halves_at_an_overflow(tmp_path):
    _, seen = run(tmp_path / "grows", steps=7)
    assert seen == [(2.0**8, 1), (2.0**8, 2), (2.0**9, 0), (2.0**9, 1), (2.0**9, 2), (2.0**10, 0), (2.0**10, 1)]
    trainer, seen = run(tmp_path / "backs off", scale=2.0**20, steps=24)
    skipped = {r["step"]: r["loss_scale"] for r in log(tmp_path / "backs off", "skipped")}
    value, good = 2.0**20, 0
    for step, found in enumerate(seen):  # the rule itself, told which steps overflowed
        if step in skipped:
            value, good = value / 2, 0
            assert skipped[step] == value
        elif good == 2:
            value, good = value * 2, 0
        else:
            good += 1
        assert found == (value, good), step
    first_good = next(step for step in range(24) if step not in skipped)
    assert 0 < first_good < max(skipped), "it grew into an overflow again, and backed off"
    assert trainer.state.skipped == trainer.state.skipped_in_row == 0


def test_an_overflow_leaves_weights_moments_and_the_mean_alone(tmp_path):
    model = toy_model(0.1)
    trainer = Trainer(model, ToyLoader(), toy_recipe(precision="fp16", steps=4, ema=0.9, accumulate=2), tmp_path)
    trainer.state.loss_scale = LossScale(value=2.0**60)
    with pytest.raises(UserError, match=r"all 4 steps .* too large for fp16"):
        trainer.run()
    assert len(log(tmp_path, "skipped")) == 4
    assert "too large for fp16" in log(tmp_path, "skipped")[0]["reason"]
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), toy_model(0.1).parameters(), strict=True))
    assert not trainer.optimizer.state
    assert trainer.ema.updates == 0
    assert all(p.grad is None for p in trainer.model.parameters())


def test_gradients_are_clipped_behind_the_scale(tmp_path):
    """AdamW hardly minds the size of a gradient, so that the first moment is looked at, which is a tenth of it."""
    optim = AdamW(lr=1e-2, clip=0.01, betas=(0.9, 0.99))
    plain, _ = run(tmp_path / "plain", precision="fp32", steps=1, optim=optim, model=toy_model())
    for scale in (1.0, 2.0**10):
        clipped, _ = run(tmp_path / str(scale), scale=scale, steps=1, optim=optim, model=toy_model())
        (step,) = log(tmp_path / str(scale), "step")
        assert step["grad_norm"] == pytest.approx(log(tmp_path / "plain", "step")[0]["grad_norm"], rel=0.02)
        assert norm(moments(clipped).values()) == pytest.approx(0.1 * 0.01, rel=1e-3)
        apart = [moments(clipped)[name] - moment for name, moment in moments(plain).items()]
        assert norm(apart) < 0.03 * norm(moments(plain).values())


def test_parts_of_a_batch_have_one_scale_and_one_verdict(tmp_path):
    whole, _ = run(tmp_path / "whole", steps=1, model=toy_model())
    for parts in (2, 4):
        cut, seen = run(tmp_path / str(parts), steps=1, accumulate=parts, model=toy_model())
        assert seen == [(2.0**8, 1)]
        apart = [moments(cut)[name] - moment for name, moment in moments(whole).items()]
        assert norm(apart) < 0.01 * norm(moments(whole).values())
    # One part alone overflows, the last one of four: nothing of the others is used.
    calls = []

    class Loud(NextToken, frozen=True, kw_only=True, tag="loud_part_for_tests"):
        def summed(self, losses, counts):
            calls.append(1)
            return super().summed(losses, counts) * (1e30 if len(calls) == 4 else 1.0)

    recipe = toy_recipe(precision="fp16", steps=1, accumulate=4).replace(objective=Loud())
    model = toy_model()
    again = Trainer(model, ToyLoader(), recipe, tmp_path / "loud")
    again.state.loss_scale = LossScale(value=2.0**8)
    with pytest.raises(UserError, match="too large for fp16"):
        again.run()
    assert len(calls) == 4
    assert again.state.loss_scale == LossScale(value=2.0**7)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), toy_model().parameters(), strict=True))


def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(tmp_path):
    """Stopped while it backs off, and between two growths."""
    options = {"scale": 2.0**20, "steps": 20, "ema": 0.9, "accumulate": 2}
    whole, seen = run(tmp_path / "whole", **options)
    first_good = next(i for i, (_, good) in enumerate(seen) if good)
    _, one = run(tmp_path / "parts", stop=first_good - 2, **options)
    about_to_grow = next(i for i, (_, good) in enumerate(seen) if good == 2)
    _, two = run(tmp_path / "parts", stop=about_to_grow, resume=True, **options)
    assert one[-1][1] == 0
    assert two[-1][1] == 2
    parts, three = run(tmp_path / "parts", resume=True, **options)
    assert one + two + three == seen
    assert log(tmp_path / "parts") == log(tmp_path / "whole")
    assert parts.state.loss_scale == whole.state.loss_scale
    ends = [load_checkpoint(latest_checkpoint(tmp_path / name / "checkpoints")) for name in ("whole", "parts")]
    for part in ("model", "optimizer", "random", "ema"):
        left, right = (getattr(end, part) for end in ends)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left), part
