"""The loop: exact accumulation, clipping, skipped steps, evaluation, resuming, stopping."""

import math
import os
import signal

import pytest
import torch
from train_toys import ToyLoader, toy_model, toy_recipe

from phylon.ops.loss import Loss
from phylon.spec import UserError
from phylon.train import AdamW, Callback, Interrupted, Trainer, WarmupCosine, latest_checkpoint, read_metrics
from phylon.train.checkpoint import checkpoints, load_checkpoint
from phylon.train.objectives import NextToken
from phylon.train.threads import faster_threads


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train(folder, *, dropout=0.0, resume=False, callbacks=(), loader=None, model=None, **options):
    model = toy_model(dropout) if model is None else model
    held_out = options.pop("held_out", None)
    sample = options.pop("sample", None)
    loader = loader or ToyLoader()
    trainer = Trainer(model, loader, toy_recipe(**options), folder, callbacks, held_out=held_out, sample=sample)
    if resume:
        trainer.resume(latest_checkpoint(folder / "checkpoints"))
    trainer.run()
    return trainer


def log(folder, *kinds):
    timing = {"seconds", "tokens_per_s"}
    found = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in r.items() if k not in timing} for r in found if not kinds or r["kind"] in kinds]


class StopAt(Callback):
    """A signal in the middle of a step."""

    def __init__(self, step, number=signal.SIGINT):
        self.step, self.number, self.messages = step, number, []

    def record(self, record, run):
        if record["kind"] == "step" and record["step"] == self.step:
            os.kill(os.getpid(), self.number)

    def said(self, message):
        self.messages.append(message)


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_accumulated_gradient_is_the_big_batchs(tmp_path, parts):
    """Case 24: rows of unequal lengths; the mean is over tokens, whatever the parts."""
    sgd_like = AdamW(lr=1e-2, eps=1.0, betas=(0.0, 0.0), weight_decay=0.0)  # the update shows the gradient's size
    whole = train(tmp_path / "whole", steps=3, optim=sgd_like)
    split = train(tmp_path / "split", steps=3, optim=sgd_like, accumulate=parts)
    for name, weight in weights(whole.model).items():
        torch.testing.assert_close(weights(split.model)[name], weight, rtol=1e-5, atol=1e-6)
    for one, other in zip(log(tmp_path / "whole", "step"), log(tmp_path / "split", "step"), strict=True):
        numbers = [{k: v for k, v in r.items() if k != "kind"} for r in (one, other)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)


def test_the_loss_and_gradient_norm_are_those_of_plain_pytorch(tmp_path):
    model = toy_model()
    batch = ToyLoader().batch(0)
    logits = model(batch["tokens"], segments=batch["segments"]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    train(tmp_path, steps=1)
    (record,) = log(tmp_path, "step")
    assert record["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert record["tokens"] == int((batch["segments"] != 0).sum())


class Nothing(ToyLoader):
    """Batches of steps without anything to learn: no target, or weights of 0 alone."""

    def __init__(self, steps, what="targets"):
        super().__init__()
        self.steps, self.what = steps, what

    def batch(self, step):
        found = super().batch(step)
        if self.what == "weights":
            found["weights"] = torch.ones(found["targets"].shape)
        if step in self.steps:
            found[self.what] = torch.full_like(found[self.what], -100 if self.what == "targets" else 0)
        return found


@pytest.mark.parametrize("what", ["targets", "weights"])
def test_a_batch_without_anything_to_learn_changes_no_weight(tmp_path, what):
    """A decay of the weights alone is no step."""
    trainer = train(tmp_path, steps=4, loader=Nothing({1}, what))
    assert [r["loss"] == 0.0 for r in log(tmp_path, "step")] == [False, True, False, False]
    assert [r["step"] for r in log(tmp_path, "skipped")] == [1]
    assert (trainer.state.skipped, trainer.state.idle) == (1, 1)
    model = toy_model()
    before = weights(model)
    with pytest.raises(UserError, match="all 3 steps of the run were skipped, the last because its batch has nothing"):
        train(tmp_path / "all", steps=3, model=model, loader=Nothing(range(9), what))
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_a_run_that_gets_on_no_more_is_saved_and_goes_on_behind_the_bad_steps(tmp_path):
    good = 5
    with pytest.raises(
        UserError, match=r"10 steps in a row were skipped.* data of step 14; .* saved in .*step-00000015"
    ):
        train(tmp_path, steps=40, loader=Nothing(range(good, good + 17)))
    saved = load_checkpoint(latest_checkpoint(tmp_path / "checkpoints"))
    whole = train(tmp_path / "short", steps=good)
    # The schedule is that of 40 steps, so only the count of updates is compared: as many as there were good batches.
    assert saved.manifest.run.step - saved.manifest.run.idle == good == whole.state.step
    again = train(tmp_path, steps=40, loader=Nothing(range(good, good + 17)), resume=True)
    assert (again.state.step, again.state.idle) == (40, 17)


def test_a_run_that_ends_in_skipped_steps_says_so(tmp_path):
    with pytest.raises(UserError, match=r"the last 3 of 6 steps were skipped.*saved in .*step-00000006"):
        train(tmp_path, steps=6, loader=Nothing({3, 4, 5}))
    assert train(tmp_path / "few", steps=7, loader=Nothing({4, 5, 6})).state.step == 7


def test_clipping_bounds_the_global_norm(tmp_path):
    plain = AdamW(lr=1.0, eps=1e6, betas=(0.0, 0.0), weight_decay=0.0)  # the update is gradient / 1e6
    moved = {}
    for clip in (None, 1e-3):
        before = weights(toy_model())
        after = weights(train(tmp_path / str(clip), steps=1, optim=plain.replace(clip=clip)).model)
        moved[clip] = math.sqrt(sum(float(((after[n] - before[n]).double() * 1e6).square().sum()) for n in before))
    assert moved[None] > 0.1
    assert moved[1e-3] < moved[None] / 20


def test_resumed_run_is_bit_for_bit_the_uninterrupted_one(tmp_path):
    """Case 25, with dropout, accumulation, evaluation and samples that draw random numbers."""
    options = {"dropout": 0.2, "accumulate": 2, "eval_every": 4, "sample_every": 3}
    options |= {"held_out": lambda: [ToyLoader(seed=9).batch(0)], "sample": lambda model: [str(torch.rand(1).item())]}
    whole = train(tmp_path / "whole", **options)
    stop = StopAt(9)
    with pytest.raises(Interrupted) as caught:
        train(tmp_path / "parts", callbacks=[stop], **options)
    assert caught.value.exit_code == 130
    assert "step 10 of 20" in str(caught.value)
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 10, "loss": 9.9}\n{"kind": "st')  # what a killed run leaves
    again = train(tmp_path / "parts", resume=True, **options)
    assert log(tmp_path / "parts") == log(tmp_path / "whole")
    one, two = (load_checkpoint(latest_checkpoint(tmp_path / n / "checkpoints")) for n in ("whole", "parts"))
    for part in ("model", "optimizer", "random"):
        left, right = getattr(one, part), getattr(two, part)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left), part
    assert one.manifest.python_random == two.manifest.python_random
    assert one.manifest.numpy_random == two.manifest.numpy_random
    assert again.loss == whole.loss


def test_a_checkpoint_is_written_before_the_samples_of_its_step(tmp_path):
    """A process that dies while it samples has lost nothing, and the resumed run takes those samples again."""

    def die(model):
        raise KeyboardInterrupt

    options = {"steps": 6, "sample_every": 3, "save_every": 3}
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "parts", sample=die, **options)
    assert latest_checkpoint(tmp_path / "parts" / "checkpoints").name == "step-00000003"
    train(tmp_path / "parts", resume=True, sample=lambda model: ["text"], **options)
    train(tmp_path / "whole", sample=lambda model: ["text"], **options)
    assert log(tmp_path / "parts") == log(tmp_path / "whole")


def test_dropout_is_on_and_the_seed_matters(tmp_path):
    """The positive control of the test above."""
    losses = [
        [r["loss"] for r in log(train(tmp_path / str(i), dropout=d, seed=s, steps=4).out, "step")]
        for i, (d, s) in enumerate([(0.2, 5), (0.2, 5), (0.2, 6), (0.0, 5)])
    ]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
    assert losses[0] != losses[3]


def test_watching_more_often_changes_nothing(tmp_path):
    options = {"dropout": 0.2, "held_out": lambda: [ToyLoader(seed=9).batch(0)]}
    options |= {"sample": lambda model: [str(torch.rand(3).sum())]}
    rare = train(tmp_path / "rare", **options)
    often = train(tmp_path / "often", eval_every=1, sample_every=1, save_every=3, **options)
    assert all(torch.equal(a, b) for a, b in zip(rare.model.parameters(), often.model.parameters(), strict=True))
    assert len(log(tmp_path / "often", "eval")) == 20
    assert often.model.training


class Poisoned(NextToken, frozen=True, kw_only=True, tag="poisoned_for_tests"):
    """Makes the gradient of one tensor infinite."""

    def losses(self, model, batch):
        found = super().losses(model, batch)["lm"]
        if int(batch["tokens"][0, 0]) < 4:
            bias = model.decoder.blocks[0].ffn_norm.bias
            return {"lm": Loss(found.sum + (bias * 0).sum() / 0, found.count)}
        return {"lm": found}


def test_a_gradient_that_is_not_finite_skips_the_step_and_is_named(tmp_path):
    """Case 27: weights and moments are exactly those of a run without the bad batches."""
    recipe = toy_recipe(steps=12)
    stop = StopAt(-1)
    trainer = Trainer(toy_model(), ToyLoader(), recipe.replace(objective=Poisoned()), tmp_path / "bad", [stop])
    trainer.run()
    bad = {r["step"] for r in log(tmp_path / "bad", "skipped")}
    assert 0 < len(bad) < 12
    assert {tuple(r["tensors"]) for r in log(tmp_path / "bad", "skipped")} == {("decoder.blocks.0.ffn_norm.bias",)}
    assert sum("decoder.blocks.0.ffn_norm.bias" in message for message in stop.messages) == len(bad)
    assert trainer.state.skipped == len(bad)

    by_hand, optimizer = toy_model(), None
    for step in range(12):
        if optimizer is None:
            optimizer = Trainer(by_hand, ToyLoader(), recipe, tmp_path / "good").optimizer
        if step in bad:
            continue
        loss = NextToken().losses(by_hand, ToyLoader().batch(step))["lm"]
        loss.sum.backward()
        norm = optimizer.norm(int(loss.count)).value
        lr = recipe.optim.lr * recipe.schedule.ratio(step, 12)
        optimizer.step(lr, min(1.0, 1.0 / norm) / int(loss.count))
    for (name, a), b in zip(trainer.model.named_parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_ten_bad_steps_in_a_row_end_the_run_with_its_checkpoint_kept(tmp_path):
    model = toy_model()
    train(tmp_path, steps=2, model=model)
    good = latest_checkpoint(tmp_path / "checkpoints")
    with torch.no_grad():
        model.decoder.norm_final.bias.fill_(math.nan)
    with pytest.raises(UserError, match=r"10 steps in a row.* no longer finite, and the last good state is .*00000002"):
        train(tmp_path, model=model, save_every=5)
    assert load_checkpoint(good).manifest.run.step == 2


def test_sigterm_stops_too_and_handlers_are_put_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted) as caught:
        train(tmp_path, callbacks=[StopAt(3, signal.SIGTERM)])
    assert caught.value.exit_code == 143
    assert latest_checkpoint(tmp_path / "checkpoints").name == "step-00000004"
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_evaluation_is_the_mean_over_held_out_tokens(tmp_path):
    batches = [ToyLoader(seed=9).batch(step) for step in range(3)]
    trainer = train(tmp_path, steps=2, held_out=lambda: iter(batches))
    trainer.model.eval()
    losses = [NextToken().losses(trainer.model, batch)["lm"] for batch in batches]
    expected = sum(float(x.sum.detach()) for x in losses) / sum(int(x.count) for x in losses)
    assert trainer.held_out_loss == pytest.approx(expected, rel=1e-6)
    assert [r["loss"] for r in log(tmp_path, "eval")] == [trainer.held_out_loss]


def test_bf16_autocast_keeps_fp32_weights_and_learns(tmp_path):
    model = toy_model()
    fixed = ToyLoader().batch(0)
    loader = ToyLoader()
    loader.batch = lambda step: fixed
    train(tmp_path, model=model, loader=loader, steps=40, precision="bf16")
    losses = [r["loss"] for r in log(tmp_path, "step")]
    assert losses[-1] < 0.5 * losses[0]
    assert {p.dtype for p in model.parameters()} == {torch.float32}


class SlowingClock:
    """Every look at it takes a second; twice as long from the 200th on."""

    def __init__(self):
        self.now, self.looks = 0.0, 0

    def perf_counter(self):
        self.looks += 1
        self.now += 1.0 if self.looks < 200 else 2.0
        return self.now


def test_a_time_budget_plans_the_steps_so_that_the_decay_completes(tmp_path, monkeypatch):
    monkeypatch.setattr("phylon.train.trainer.time", SlowingClock())
    trainer = train(tmp_path, steps=100_000, max_minutes=10)
    steps, plans = log(tmp_path, "step"), log(tmp_path, "plan")
    assert 20 < len(steps) < 200
    assert [plan["step"] for plan in plans[:2]] == [2, 6]
    assert len(steps) < max(plan["total"] for plan in plans) - 5  # it became slower, and the plan shorter
    assert 570 < trainer.state.seconds < 630
    assert trainer.state.limit == 600
    assert steps[-1]["lr"] < 0.12 * max(r["lr"] for r in steps)  # the cosine ends at a tenth


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    train(tmp_path, steps=7, save_every=2, keep=2)
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == ["step-00000006", "step-00000007"]


def test_a_short_plan_keeps_a_short_warmup_and_as_many_samples(tmp_path, monkeypatch):
    """A slow machine takes a few of the steps asked for: the schedule is all there, and so are the samples."""
    monkeypatch.setattr("phylon.train.trainer.time", SlowingClock())
    recipe = toy_recipe(
        steps=3000, max_minutes=10, sample_every=600, save_every=1500, keep=9, threads=1, watch_every=None
    )
    recipe = recipe.replace(schedule=WarmupCosine(warmup=200, min_ratio=0.0))
    trainer = Trainer(toy_model(), ToyLoader(), recipe, tmp_path, sample=lambda model: ["text"])
    trainer.run()
    rates = [r["lr"] for r in log(tmp_path, "step")]
    assert 20 < len(rates) < 200
    assert max(rates) == pytest.approx(recipe.optim.lr, rel=0.05)
    assert rates.index(max(rates)) < len(rates) // 4
    assert rates[-1] < 0.1 * recipe.optim.lr
    assert 4 <= len(log(tmp_path, "samples")) <= 7
    assert 2 <= len(checkpoints(tmp_path / "checkpoints")) <= 4


def test_threads_are_measured_for_timed_runs_alone_and_kept_on_resuming(tmp_path, monkeypatch):
    measured = []

    def measure(work):
        work()
        measured.append(work)
        torch.set_num_threads(1)
        return 1

    monkeypatch.setattr("phylon.train.trainer.faster_threads", measure)
    plain = train(tmp_path / "plain", dropout=0.2, steps=3, threads=1)
    told = train(tmp_path / "told", dropout=0.2, steps=3, max_minutes=10, threads=1)
    assert not measured
    timed = train(tmp_path / "timed", dropout=0.2, steps=3, max_minutes=10)
    assert len(measured) == 1
    assert timed.environment["threads"] == "1"
    for other in (told, timed):  # measuring leaves no trace in weights or randomness
        assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), other.model.parameters(), strict=True))
    train(tmp_path / "timed", dropout=0.2, steps=3, max_minutes=10, resume=True)
    assert len(measured) == 1


@pytest.mark.parametrize("one_takes", [1.0, 5.0])
def test_the_faster_number_of_threads_is_kept(monkeypatch, one_takes):
    now, threads = [0.0], [4]
    monkeypatch.setattr("torch.get_num_threads", lambda: threads[0])
    monkeypatch.setattr("torch.set_num_threads", lambda n: threads.__setitem__(0, n))

    def work():
        now[0] += one_takes if threads[0] == 1 else 3.0

    assert faster_threads(work, lambda: now[0]) == threads[0] == (1 if one_takes < 3 else 4)


class LostLoss(NextToken, frozen=True, kw_only=True, tag="lost_loss_for_tests"):
    """A loss that is infinite while every gradient is finite."""

    def losses(self, model, batch):
        found = super().losses(model, batch)["lm"]
        return {"lm": Loss(found.sum + math.inf, found.count)}


def test_a_loss_that_is_not_finite_skips_the_step_and_is_named(tmp_path):
    listen = StopAt(-1)
    model = toy_model()
    before = weights(model)
    recipe = toy_recipe(steps=3).replace(objective=LostLoss())
    trainer = Trainer(model, ToyLoader(), recipe, tmp_path, [listen])
    with pytest.raises(UserError, match=r"nothing was learned: all 3 steps .* because the loss is not finite"):
        trainer.run()
    assert trainer.state.skipped == 3
    assert "step 0 skipped: the loss is not finite" in listen.messages
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert [r["tensors"] for r in log(tmp_path, "skipped")] == [[], [], []]
