"""Looks into a run every so many steps: what moves, what attention and routers do, what memory the backward pass keeps.

Everything here only reads: a run that is watched ends with the same bits as one that is not.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from phylon.model import Model
from phylon.train.gradients import Gradients, cut, evaluating
from phylon.train.objectives.base import Batch

SAMPLE = 4096  # numbers of a parameter that are looked at
MOST_TOKENS = 256  # of the row that is looked at through taps


class Watcher:
    """Gathers the "watch" record of a step: ``before`` and ``after`` the update, ``saved`` around a forward pass."""

    def __init__(self, model: Model, gradients: Gradients, parameters: Mapping[str, Tensor]) -> None:
        self.model, self.gradients = model, gradients
        self.parameters = parameters
        self.activation_bytes = 0
        self._before: dict[str, Tensor] = {}

    def before(self) -> None:
        """Keep a sample of every trained parameter."""
        self._before = {name: _sample(p).clone() for name, p in self.parameters.items() if p.requires_grad}

    def after(self) -> dict[str, Any]:
        """``update_ratio``: |change| / |weight| by layer; ``moved``: the share of the weights that are not as before.

        Of at most ``SAMPLE`` numbers a parameter, at equal distances. Updates that rounding swallows show as a share of
        unmoved weights (0.9 of bf16 weights without masters would stay where they are).
        """
        changes: dict[str, list[float]] = {}
        moved = total = 0
        for name, old in self._before.items():
            new = _sample(self.parameters[name])
            layer = layer_of(name)
            sums = changes.setdefault(layer, [0.0, 0.0])
            sums[0] += float((new.float() - old.float()).square().sum())
            sums[1] += float(old.float().square().sum())
            moved, total = moved + int((new != old).sum()), total + new.numel()
        self._before = {}
        ratios = {layer: (change / weight) ** 0.5 if weight else 0.0 for layer, (change, weight) in changes.items()}
        return {"update_ratio": ratios, "moved": moved / max(1, total)}

    @contextmanager
    def saved(self) -> Generator[None]:
        """Count the bytes that the forward pass inside keeps for the backward pass, beside weights, each once."""
        own = {p.untyped_storage().data_ptr() for p in self.parameters.values()}
        seen: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            with suppress(RuntimeError):  # a tensor without storage of its own
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in own and not isinstance(tensor, nn.Parameter):
                    seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self.activation_bytes = sum(seen.values())

    def look(self, batch: Batch) -> dict[str, Any]:
        """Attention's entropy (nats, mean over heads and queries) and largest score, the routers' balance, by path.

        One row of the batch, in evaluation mode, on the reference attention. What the model has none of is left out.
        """
        row = {name: value[:, :MOST_TOKENS] if value.ndim == 2 else value for name, value in cut_row(batch).items()}
        taps = _Numbers()
        self.model.taps = taps
        try:
            with torch.no_grad(), evaluating(self.model), self.gradients.autocast():
                self.gradients.objective.losses(self.model, self.gradients.on_device(row))
        finally:
            self.model.taps = None
        found = {"attention_entropy": taps.entropy, "logit_max": taps.largest, "router_balance": taps.balance}
        return {name: values for name, values in found.items() if values}


class _Numbers:
    """Taps that keep a number of each tensor instead of the tensor."""

    def __init__(self) -> None:
        self.entropy: dict[str, float] = {}
        self.largest: dict[str, float] = {}
        self.balance: dict[str, float] = {}
        self._scores = torch.zeros(())

    def wants(self, path: str) -> bool:
        return path.endswith((".scores", ".weights"))

    def __call__(self, path: str, value: Tensor) -> Tensor:
        where, _, what = path.rpartition(".")
        if what == "scores":
            self._scores = value.detach().float()
        elif what == "weights":
            weights = value.detach().float()
            entropy, seen = -(weights * weights.clamp(min=1e-30).log()).sum(-1), weights.sum(-1) > 0
            if bool(seen.any()):
                self.entropy[where] = float(entropy[seen].mean())
                # Of the keys that may be seen: the others' scores are computed, and mean nothing.
                self.largest[where] = float(self._scores[weights > 0].max())
        elif what == "router_logits":
            self.balance[where] = _balance(value.detach().float())
        return value


def _balance(logits: Tensor) -> float:
    """The share of the busiest expert times the number of experts, by first choices: 1 where all are equally busy."""
    first = logits.flatten(0, -2).argmax(-1)
    return float(torch.bincount(first, minlength=logits.shape[-1]).max()) * logits.shape[-1] / max(1, first.numel())


def trained_share(parameters: Mapping[str, Tensor]) -> float:
    """The share of the matrices (embeddings aside, which multiply nothing) that take a gradient."""
    sizes = [(p.numel(), p.requires_grad) for name, p in parameters.items() if p.ndim > 1 and ".embed." not in name]
    total = sum(size for size, _ in sizes)
    return sum(size for size, trained in sizes if trained) / total if total else 1.0


def layer_of(name: str) -> str:
    """``decoder.blocks.3`` for what is below it, else the first two parts of a name."""
    parts = name.split(".")
    return ".".join(parts[: 3 if len(parts) > 1 and parts[1] == "blocks" else 2])


def cut_row(batch: Batch) -> Batch:
    """The first row of a batch."""
    return cut(batch, max(1, len(next(iter(batch.values())))))[0]


def _sample(parameter: Tensor) -> Tensor:
    flat = parameter.detach().reshape(-1)
    return flat[:: -(-flat.numel() // SAMPLE) or 1]
