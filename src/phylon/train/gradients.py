"""The gradient of a whole batch, in parts and over processes: exact per target, whatever the cut."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from phylon.model import Model
from phylon.train.machine import Precision
from phylon.train.objectives.base import Batch, Objective, divisor
from phylon.train.parallel import Parallel
from phylon.train.scaling import LossScale
from phylon.train.updates import GradientNorm

T = TypeVar("T")
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Found(NamedTuple):
    """What one batch gave. ``divisor`` is what the collected gradients are still to be divided by."""

    loss: float
    means: dict[str, float]
    norm: GradientNorm
    divisor: float


class Gradients:
    """Runs the objective over the parts of a batch and leaves summed gradients in the optimizer."""

    def __init__(
        self, parallel: Parallel, objective: Objective, optimizer: Any, precision: Precision, accumulate: int
    ) -> None:
        self.parallel, self.objective, self.optimizer = parallel, objective, optimizer
        self.precision, self.accumulate = precision, accumulate
        self.device = parallel.model.device

    def autocast(self) -> torch.autocast:
        """The run's precision, for forward passes outside of ``of`` as well."""
        dtype = AUTOCAST.get(self.precision)
        return torch.autocast(self.device.type, dtype or torch.bfloat16, enabled=dtype is not None)

    def on_device(self, batch: Batch) -> Batch:
        if self.device.type == "cpu":
            return batch
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}

    def parts(self, batch: Batch) -> list[Batch]:
        """This process's parts of a batch, in order; all processes' parts in order are the batch."""
        world, rows = self.parallel.world, len(next(iter(batch.values())))
        # A batch by token count may have fewer rows than parts; all processes must have as many parts as each other,
        # since they wait for each other in each.
        count = min(self.accumulate, -(-rows // world.size))
        mine = cut(cut(batch, world.size)[world.rank], count)
        return [part if len(next(iter(part.values()))) else self.objective.blank(batch) for part in mine]

    def of(self, batch: Batch, scale: LossScale | None, watch: Callable[[], Any] = nullcontext) -> Found:
        """Forward and backward passes; ``watch`` is entered around the first forward pass."""
        objective, world = self.objective, self.parallel.world
        # Of the whole batch, which every process has: no count is exchanged.
        counts = objective.counts(batch)
        factor = 1.0 if scale is None else scale.value
        # Detached sums stay tensors until the end: asking for a number waits for the device.
        sums: dict[str, list[Tensor]] = {}
        parts = self.parts(batch)
        # Low-precision gradients go to their fp32 masters after every part, so they are exchanged after every part.
        every = bool(self.optimizer.masters)
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            with self.parallel.part(exchange=every or last):
                with self.autocast(), watch() if number == 0 else nullcontext():
                    losses = objective.losses(self.parallel.called, self.on_device(part))
                    total = objective.summed(losses, counts)
                (total if scale is None else total * factor).backward()
            if every or last:
                self.parallel.take_gradients()
            self.optimizer.collect()
            for name, loss in losses.items():
                sums.setdefault(name, []).append(loss.sum.detach())
        totals = world.sum([float(sum(values)) for values in sums.values()])
        means = {name: value / (counts[name] or 1.0) for name, value in zip(sums, totals, strict=True)}
        divided = divisor(counts) * factor / world.size
        norm = self.optimizer.norm(divided)
        return Found(objective.total(means), means, self._agreed(norm), divided)

    def trial(self, batch: Batch, *, keep: bool = False, between: Callable[[], T] | None = None) -> T | None:
        """One part forward and backward on the bare model, for what must be tried or timed.

        Gradients are dropped unless ``keep``; ``between`` is called before the backward pass, and its answer returned.
        """
        counts = self.objective.counts(batch)
        with self.autocast():
            losses = self.objective.losses(self.parallel.model, self.on_device(self.parts(batch)[0]))
            total = self.objective.summed(losses, counts)
        answer = None if between is None else between()
        total.backward()
        if not keep:
            self.optimizer.drop()
        return answer

    def _agreed(self, norm: GradientNorm) -> GradientNorm:
        """The norm of all shards, and what is not finite in any."""
        if self.parallel.kind != "fsdp":
            return norm
        names = tuple(dict.fromkeys(name for found in self.parallel.world.gather(norm.not_finite) for name in found))
        value = self.parallel.norm(norm.value if math.isfinite(norm.value) else math.inf)
        return GradientNorm(value, names)


class evaluating:
    """Evaluation mode inside the block, and the mode of before after it."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.before = self.model.training
        self.model.eval()

    def __exit__(self, *_: object) -> None:
        self.model.train(self.before)


def cut(batch: Batch, count: int) -> list[Batch]:
    """``count`` consecutive parts of a batch, as equal as its rows allow."""
    if count == 1:
        return [batch]
    split = {name: tensor.tensor_split(count) for name, tensor in batch.items()}
    return [{name: pieces[i] for name, pieces in split.items()} for i in range(count)]
