"""The mean of the last checkpoints of a run."""

import pytest
import torch
from train_toys import ToyLoader, toy_model, toy_recipe

from phylon.spec import UserError
from phylon.train import Trainer
from phylon.train.average import average_checkpoints, average_into
from phylon.train.checkpoint import checkpoints, load_checkpoint


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
