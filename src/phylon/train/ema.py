"""An exponential mean of the weights, kept in fp32 beside them. Polyak and Juditsky (1992)."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from phylon.spec.errors import UserError


class Ema:
    """``mean <- d mean + (1 - d) weight`` after every update, ``d = min(decay, (1 + t) / (10 + t))`` at update t.

    The shorter memory of the first updates keeps the drawn weights out of the mean. ``masters`` stand for the
    parameters below fp32, which are these rounded.
    """

    def __init__(
        self, decay: float, parameters: Mapping[str, Tensor], masters: Mapping[str, Tensor] | None = None
    ) -> None:
        self.decay, self.parameters, self.updates = decay, parameters, 0
        self.sources = {**parameters, **(masters or {})}
        self.begin()

    def begin(self) -> None:
        """The weights as they are now are the mean."""
        self.updates = 0
        self.means = {name: self.sources[name].detach().float().clone() for name in self.parameters}

    @torch.no_grad()
    def update(self) -> None:
        keep = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        torch._foreach_lerp_(list(self.means.values()), [self.sources[name].float() for name in self.means], 1 - keep)

    @contextmanager
    def swapped(self) -> Generator[None]:
        """The means in the place of the weights inside the block, the weights bit for bit after it."""
        kept = {name: p.detach().clone() for name, p in self.parameters.items()}
        self._write(self.means)
        try:
            yield
        finally:
            self._write(kept)

    def state_tensors(self) -> dict[str, Tensor]:
        """The means by parameter, and the number of updates."""
        return {**self.means, "updates": torch.tensor(self.updates)}

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        self.check_state_tensors(tensors)
        self.updates = int(tensors["updates"])
        for name, mean in self.means.items():
            mean.copy_(tensors[name])

    def check_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse the mean of another model's weights."""
        if tensors.keys() != {*self.means, "updates"}:
            odd = min(tensors.keys() ^ {*self.means, "updates"})
            raise UserError(f"the checkpoint's mean of the weights is of another model: they differ in '{odd}'")

    @torch.no_grad()
    def _write(self, values: dict[str, Tensor]) -> None:
        for name, p in self.parameters.items():
            p.copy_(values[name])
