"""The mean of the last checkpoints of a run."""

import pytest
import torch
from train_toys import ToyLoader, toy_model, toy_recipe

from phylon.spec import UserError
from phylon.train import Trainer, read_metrics
from phylon.train.average import average_checkpoints, average_into
from phylon.train.checkpoint import checkpoints, load_checkpoint, scheduled
from phylon.train.metrics import MetricsFile


def test_weights_are_the_mean_of_the_last_checkpoints(tmp_path):
    Trainer(toy_model(), ToyLoader(), toy_recipe(steps=8, save_every=2, keep=4), tmp_path).run()
    folder = tmp_path / "checkpoints"
    model = toy_model()
    used = average_into(model, folder, 3)
    assert [path.name for path in used] == ["step-00000004", "step-00000006", "step-00000008"]
    kept = [load_checkpoint(path).model for path in used]
    for name, parameter in model.named_parameters():
        expected = torch.stack([tensors[name].double() for tensors in kept]).mean(0).float()
        assert torch.equal(parameter.detach(), expected), name
        assert not torch.equal(parameter.detach(), kept[-1][name]), name
    one, _ = average_checkpoints(folder, 1)
    assert all(torch.equal(one[name], kept[-1][name]) for name in one)


def test_too_few_checkpoints_or_another_model_are_refused(tmp_path):
    Trainer(toy_model(), ToyLoader(), toy_recipe(steps=2), tmp_path).run()
    with pytest.raises(UserError, match="holds 1 checkpoints, fewer than the 2 to average"):
        average_checkpoints(tmp_path / "checkpoints", 2)
    with pytest.raises(UserError, match="at least 1"):
        average_checkpoints(tmp_path / "checkpoints", 0)
    with pytest.raises(UserError, match="holds 0 checkpoints"):
        average_checkpoints(tmp_path / "none", 1)
    assert len(checkpoints(tmp_path / "checkpoints")) == 1


def test_a_stopped_run_averages_what_the_uninterrupted_one_does(tmp_path):
    """A checkpoint between those of the schedule, as a signal leaves it, is none of the mean and takes none's place."""
    recipe = toy_recipe(steps=8, save_every=2, keep=1, average=3)
    Trainer(toy_model(), ToyLoader(), recipe, tmp_path / "a").run()
    stopped = Trainer(toy_model(), ToyLoader(), recipe, tmp_path / "b")
    step = stopped._step

    def saving() -> bool:
        went = step()
        if stopped.state.step == 7:
            stopped._save()
        return went

    stopped._step = saving
    stopped.run()
    said = [next(r for r in read_metrics(tmp_path / x / "metrics.jsonl") if r["kind"] == "kept")["what"] for x in "ab"]
    assert said == ["the model is the mean of step-00000004, step-00000006, step-00000008"] * 2
    names = [path.name for path in checkpoints(tmp_path / "b" / "checkpoints")]
    assert names == ["step-00000004", "step-00000006", "step-00000008"], "step 7 is gone again: run.keep is 1"


def test_a_step_that_was_taken_again_counts_once(tmp_path):
    for name in ("step-00000004", "step-00000006", "step-00000006-r1", "step-00000007", "step-00000008-r1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{}")
    assert [path.name for path in scheduled(tmp_path, 2, 8)] == [
        "step-00000004",
        "step-00000006-r1",
        "step-00000008-r1",
    ]
    assert [path.name for path in scheduled(tmp_path, None, 7)] == ["step-00000007"]


def test_a_full_disk_leaves_whole_lines(tmp_path):
    """It takes a part of a line without an error and refuses the rest."""
    log = MetricsFile(tmp_path / "metrics.jsonl")
    log.write({"kind": "step", "step": 0})

    class Full:
        def __init__(self, file):
            self.file, self.left = file, 9

        def write(self, line):
            if self.left == 0:
                raise OSError(28, "No space left on device")
            taken, self.left = line[: self.left], 0
            return self.file.write(taken)

        def __getattr__(self, name):
            return getattr(self.file, name)

    log.__dict__["_file"] = Full(log._file)
    with pytest.raises(UserError, match="the disk is full"):
        log.write({"kind": "step", "step": 1})
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [{"kind": "step", "step": 0}]
