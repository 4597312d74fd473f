"""The mean of a run's last checkpoints. *Attention Is All You Need* (arXiv:1706.03762), section 6.1."""

from pathlib import Path

import torch
from torch import Tensor

from phylon.model import Model
from phylon.spec.errors import UserError
from phylon.train.checkpoint import checkpoints, load_model_tensors, open_part, step_of


def average_checkpoints(
    folder: Path, last: int, found: list[Path] | None = None
) -> tuple[dict[str, Tensor], list[Path]]:
    """The tensors of a model, each the mean of the ``last`` newest checkpoints below ``folder``, and which these are.

    ``found``: the checkpoints to choose from, oldest first, where not all are meant. Of a step that was taken again
    after a roll-back, the newest alone counts.

    Sums are fp64, rounded once to the dtype that is stored. What is no floating-point number must be the same in all.
    Fewer checkpoints than asked for are an error: ``run.keep`` says how many a run leaves.
    """
    if last < 1:
        raise UserError(f"the number of checkpoints to average must be at least 1, got {last}")
    found = list({step_of(path): path for path in (checkpoints(folder) if found is None else found)}.values())[-last:]
    if len(found) < last:
        raise UserError(
            f"'{folder}' holds {len(found)} checkpoints, fewer than the {last} to average; "
            "train with run.keep and run.save_every that leave as many"
        )
    files = [open_part(path, "model") for path in found]
    averaged: dict[str, Tensor] = {}
    for name in files[-1].tensors:
        if any(name not in file.tensors for file in files):
            raise UserError(f"the checkpoints in '{folder}' are of different models: one lacks '{name}'")
        newest = files[-1].read(name).clone()
        if not newest.is_floating_point():
            if not all(torch.equal(newest, file.read(name)) for file in files[:-1]):
                raise UserError(f"'{name}' is no floating-point number and changes over the checkpoints of '{folder}'")
            averaged[name] = newest
            continue
        total = newest.double()
        for file in files[:-1]:
            total += file.read(name)
        averaged[name] = (total / last).to(newest.dtype)
    return averaged, found


def average_into(model: Model, folder: Path, last: int) -> list[Path]:
    """Give ``model`` the mean of the ``last`` newest checkpoints below ``folder`` (a run's ``checkpoints/``)."""
    tensors, found = average_checkpoints(folder, last)
    load_model_tensors(model, tensors)
    return found
