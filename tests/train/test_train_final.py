"""Which weights a run leaves: the best of its evaluations, the mean of the last; runs by epochs."""

import pytest
import torch
from objective_toys import tiny

from phylon.spec import UserError
from phylon.spec.registry import entries
from phylon.train import read_metrics, train
from phylon.train.checkpoint import Best, checkpoints, load_checkpoint, step_of
from phylon.train.final import better
from phylon.train.objectives import Objective


def run(folder, **options):
    recipe = tiny("text_classes")
    return train(recipe.replace(run=recipe.run.replace(**options)), out=folder, device="cpu")


def of_kind(folder, kind):
    return [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == kind]


def test_the_best_epoch_is_what_is_kept(tmp_path):
    found = run(tmp_path, epochs=6, eval_every=None, best="loss", keep=1)
    evals = of_kind(tmp_path, "eval")
    assert len(evals) == 6, "one after each epoch"
    best = min(evals, key=lambda r: r["loss"])
    assert best["step"] < found.steps, "the rate is high enough to overfit; else this test says nothing"
    assert best["step"] in map(step_of, checkpoints(tmp_path / "checkpoints"))
    (kept,) = of_kind(tmp_path, "kept")
    assert kept["loss"] == found.held_out_loss == pytest.approx(best["loss"])
    path = next(p for p in checkpoints(tmp_path / "checkpoints") if step_of(p) == best["step"])
    tensors = load_checkpoint(path).model
    assert all(torch.equal(tensors[name], p) for name, p in found.model.named_parameters())
    last = load_checkpoint(checkpoints(tmp_path / "checkpoints")[-1]).model
    assert any(not torch.equal(last[name], p) for name, p in found.model.named_parameters())


def test_the_mean_of_the_last_checkpoints_is_what_is_kept(tmp_path):
    found = run(tmp_path, steps=8, save_every=2, average=3)
    assert [step_of(p) for p in checkpoints(tmp_path / "checkpoints")] == [4, 6, 8]
    kept = [load_checkpoint(p).model for p in checkpoints(tmp_path / "checkpoints")]
    for name, parameter in found.model.named_parameters():
        expected = torch.stack([tensors[name].double() for tensors in kept]).mean(0).float()
        assert torch.equal(parameter.detach(), expected), name
    (record,) = of_kind(tmp_path, "kept")
    assert "mean of step-00000004, step-00000006, step-00000008" in record["what"]
    assert record["loss"] == found.held_out_loss


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"best": "accurracy"},
            r"run.best names no metric of this objective: 'accurracy' \(did you mean 'accuracy'\?\)",
        ),
        ({"best": "loss", "average": 2}, "choose one"),
        ({"epochs": 2, "max_minutes": 1.0}, "choose one"),
        ({"average": 0}, "average must be at least 1"),
    ],
)
def test_what_cannot_be_kept_is_said(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        run(tmp_path, **options)


def test_the_best_needs_held_out_data(tmp_path):
    recipe = tiny("text_classes")
    recipe = recipe.replace(data=recipe.data.replace(held_out=0.0), run=recipe.run.replace(best="loss"))
    with pytest.raises(UserError, match=r"run.best = 'loss' needs held-out data"):
        train(recipe, out=tmp_path, device="cpu")


def test_of_every_measure_it_is_known_whether_less_is_better():
    """A loss that was maximised would keep the worst weights without a word."""
    losses = {"loss", "nll", "mse", "perplexity", "lm", "mlm", "nsp", "soft"}
    scores = {"accuracy", "mlm_accuracy", "nsp_accuracy", "f1", "exact", "exact_match", "pearson", "spearman", "bleu"}
    scores |= {"retrieval"}
    found = {name for entry in entries(Objective) for case in entry.cases() for name in case.measured() or ()}
    assert {name.rpartition(".")[2] for name in found} <= losses | scores
    assert {"lm", "mlm", "nsp", "soft", "accuracy"} <= found
    for name in found:
        before = Best(step=1, value=2.0)
        less, more = (better(name, {name: value}, before, 2) for value in (1.0, 3.0))
        assert (less is not None) == (more is None) == (name.rpartition(".")[2] in losses), name
