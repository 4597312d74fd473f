"""Dispatchers: which of the routers' choices the experts compute."""

import math

import torch
from torch import Tensor

from phylon.spec.base import Mechanism, Slot
from phylon.spec.errors import UserError
from phylon.spec.registry import register


class Dispatcher(Slot):
    """The slot of a mixture of experts for what happens to its router's choices."""

    def dispatch(self, chosen: Tensor, real: Tensor | None, n_experts: int) -> Tensor:
        """``chosen`` (B, T, k) with -1 for what is not computed; padding, where ``real`` (B, T) is false, never is."""
        raise NotImplementedError


class Dropless(Mechanism, Dispatcher, frozen=True, kw_only=True):
    """Every choice is computed. MegaBlocks (arXiv:2211.15841), section 1. Obeys the law; cost: none."""

    def dispatch(self, chosen: Tensor, real: Tensor | None, n_experts: int) -> Tensor:
        return chosen if real is None else chosen.masked_fill(~real[..., None], -1)


class Capacity(Mechanism, Dispatcher, frozen=True, kw_only=True):
    """Every expert takes at most a number of choices of each row; what comes later adds zero to the residual stream.

    Switch Transformer (arXiv:2101.03961), equation 3. ``tokens`` is that number, or ``factor`` gives it from the row's
    own n real tokens: ``ceil(factor * k * n / X)``. First choices go before second ones (GShard, arXiv:2006.16668,
    algorithm 1), earlier tokens before later ones; padding takes no place. Cost of a token: O(k X).

    The law: what overflows depends on the row's other tokens. Padding and the rest of the batch do not matter, and
    while nothing overflows all is as with ``Dropless``.
    """

    factor: float | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.factor is None) == (self.tokens is None):
            raise UserError("a capacity needs either 'factor' or 'tokens'")
        value = self.factor if self.tokens is None else self.tokens
        if value is None or not 0 < value < math.inf:
            raise UserError(f"a capacity must be above 0 and finite, got {value}")

    def dispatch(self, chosen: Tensor, real: Tensor | None, n_experts: int) -> Tensor:
        batch, length, k = chosen.shape
        chosen = Dropless().dispatch(chosen, real, n_experts)
        queue = chosen.transpose(1, 2).reshape(batch, k * length)
        member = queue[..., None] == torch.arange(n_experts, device=chosen.device)
        place = (member.cumsum(1) * member).sum(-1).view(batch, k, length).transpose(1, 2)
        return chosen.masked_fill(place > self._most(chosen, real, n_experts), -1)

    def _most(self, chosen: Tensor, real: Tensor | None, n_experts: int) -> Tensor | int:
        """How many choices of a row an expert takes, one number or (B, 1, 1)."""
        if self.tokens is not None:
            return self.tokens
        assert self.factor is not None
        _, length, k = chosen.shape
        if real is None:
            return math.ceil(self.factor * k * length / n_experts)
        return torch.ceil(self.factor * k * real.sum(1).double() / n_experts)[:, None, None]


register(Dropless, paper="arXiv:2211.15841 §1", cases=lambda: [Dropless()])
register(
    Capacity,
    paper="arXiv:2101.03961 eq. 3",
    cases=lambda: [Capacity(factor=1.25), Capacity(tokens=1)],
    exceptions={
        "chunks": "an expert's places are counted within one call",
        "packing": "the documents of a row compete for the same places",
    },
)
