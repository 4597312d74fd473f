"""What holds for every objective in the registry: resuming bit for bit, exact accumulation, words for bad recipes."""

import os
import signal

import pytest
import torch
from objective_toys import ALL, TINY, tiny

from phylon.spec import UserError
from phylon.spec.registry import entries
from phylon.train import AdamW, Callback, Interrupted, Objective, latest_checkpoint, read_metrics, train
from phylon.train.checkpoint import load_checkpoint


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def record(self, record, run):
        if record["kind"] == "step" and record["step"] == self.step:
            os.kill(os.getpid(), signal.SIGINT)


def log(out):
    timing = {"seconds", "tokens_per_s"}
    return [{k: v for k, v in r.items() if k not in timing} for r in read_metrics(out / "metrics.jsonl")]


def test_every_registered_objective_has_a_tiny_run():
    kinds = {entry.kind for entry in entries(Objective) if entry.spec.__module__.startswith("phylon.")}
    assert kinds == set(TINY)


@pytest.mark.parametrize(("kind", "number"), ALL)
def test_twenty_steps_are_ten_and_ten_bit_for_bit(tmp_path, kind, number):
    """Case 25, with dropout, accumulation, evaluation and samples: weights, optimizer, random state, data, log."""
    recipe = tiny(kind, number)
    whole = train(recipe, out=tmp_path / "whole", device="cpu")
    with pytest.raises(Interrupted):
        train(recipe, out=tmp_path / "parts", callbacks=[StopAt(9)], device="cpu")
    parts = train(recipe, out=tmp_path / "parts", resume=True, device="cpu")
    assert whole.steps == parts.steps == 20
    assert log(tmp_path / "parts") == log(tmp_path / "whole")
    one, two = (load_checkpoint(latest_checkpoint(tmp_path / n / "checkpoints")) for n in ("whole", "parts"))
    for name in ("model", "optimizer", "random"):
        left, right = getattr(one, name), getattr(two, name)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left), name
    steps = [r["loss"] for r in log(tmp_path / "whole") if r["kind"] == "step"]
    assert len(set(steps)) == 20, "the loss moves, so equal logs say something"
    assert whole.held_out_loss == parts.held_out_loss is not None


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "number"), ALL)
def test_two_examples_say_every_metric_that_all_do(tmp_path, kind, number, monkeypatch):
    """What ``run.best`` is checked by before the first step."""
    seen = []

    def measured(name, metrics):
        seen.append(set(metrics))

    monkeypatch.setattr("phylon.train.looks.check_metric", measured)
    recipe = tiny(kind, number)
    result = train(
        recipe.replace(run=recipe.run.replace(steps=1, average=None, best="loss")), out=tmp_path, device="cpu"
    )
    assert seen == [{"loss", *result.metrics}]
    assert {"loss", *recipe.objective.measured()} == {"loss", *result.metrics}, "known before anything is read"


@pytest.mark.parametrize(("kind", "number"), ALL)
def test_the_number_of_parts_does_not_change_the_gradient(tmp_path, kind, number):
    """Case 24 for every term: sums over the parts, each divided by its count in the whole batch."""
    recipe = tiny(kind, number)
    still = {"dropout", "attention_dropout"} & recipe.model.keys()
    optim = AdamW(lr=1e-2, eps=1.0, betas=(0.0, 0.0), weight_decay=0.0)  # the update shows the gradient's size
    recipe = recipe.replace(model=recipe.model | dict.fromkeys(still, 0.0), optim=optim)
    models = {}
    for parts in (1, 4):
        run = recipe.run.replace(steps=2, accumulate=parts, eval_every=None)
        try:
            models[parts] = train(recipe.replace(run=run), out=tmp_path / str(parts), device="cpu").model
        except UserError as error:
            if parts == 1 or "accumulate" not in str(error):
                raise
            return  # an objective that cannot be cut says so
    for (name, whole), split in zip(models[1].named_parameters(), models[4].parameters(), strict=True):
        torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-6, msg=name)
