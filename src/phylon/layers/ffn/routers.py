"""Routers: which experts a token goes to, and with what weight each counts."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phylon.layers.part import InitContext, Linear, Part, is_map
from phylon.spec.base import Mechanism, Slot
from phylon.spec.errors import UserError, check_finite
from phylon.spec.registry import register


class Router(Slot):
    """The slot of a mixture of experts for the choice of experts; every token is sent to ``top_k`` of them."""

    @property
    def top_k(self) -> int:
        raise NotImplementedError

    def check(self, n_experts: int) -> None:
        """Raise ``UserError`` where ``n_experts`` cannot be chosen from."""
        if not 1 <= self.top_k <= n_experts:
            raise UserError(f"top_k must be from 1 to n_experts {n_experts}, got {self.top_k}")


class SoftmaxRouter(Mechanism, Router, frozen=True, kw_only=True):
    """The ``top_k`` likeliest experts, each weighed by its probability: ``gate = softmax(x W^T + b)``, chosen entries.

    Switch Transformer (arXiv:2101.03961), equations 1 and 2 with ``top_k`` 1; Jamba (arXiv:2403.19887) with 2.
    ``x`` (B, T, D), ``W`` (X, D). In training the router's input is multiplied by noise uniform in ``1 ± jitter``
    (appendix C). Cost of a token: ``2 D X``.
    """

    top_k: int = 1
    jitter: float = 0.0
    bias: bool = False

    def __post_init__(self) -> None:
        _check_jitter(self.jitter)


class RenormalisedRouter(Mechanism, Router, frozen=True, kw_only=True):
    """The ``top_k`` likeliest experts, weighed by a softmax over those alone: their gates sum to 1.

    Mixtral (arXiv:2401.04088), section 2.1; Shazeer et al. (arXiv:1701.06538), equation 3 without noise. ``x``
    (B, T, D), ``W`` (X, D). ``jitter`` as in ``SoftmaxRouter``. Cost of a token: ``2 D X``.
    """

    top_k: int = 2
    jitter: float = 0.0

    def __post_init__(self) -> None:
        _check_jitter(self.jitter)


class GroupedSigmoidRouter(Mechanism, Router, frozen=True, kw_only=True):
    """Sigmoid scores; a bias that only selects; only the best ``top_groups`` of ``n_groups`` groups of experts.

    DeepSeek-V3 (arXiv:2412.19437), section 2.1.2, equations 12 to 16: ``s = sigmoid(x W^T)``; the ``top_k`` largest
    ``s + b`` within the groups whose two largest ``s + b`` sum highest; gates are the chosen ``s``, divided by their
    sum, times ``scale``. ``b`` (X,) is a buffer, no parameter: ``update_bias`` moves it after a training step.
    ``x`` (B, T, D), ``W`` (X, D). Cost of a token: ``2 D X``.
    """

    top_k: int = 8
    n_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.top_groups <= self.n_groups:
            raise UserError(f"top_groups must be from 1 to n_groups {self.n_groups}, got {self.top_groups}")
        check_finite("scale", self.scale, above=0)

    def check(self, n_experts: int) -> None:
        if n_experts % self.n_groups or (self.n_groups > 1 and n_experts < 2 * self.n_groups):
            raise UserError(f"n_experts {n_experts} must be n_groups {self.n_groups} times at least 2")
        open_experts = n_experts // self.n_groups * self.top_groups
        if not 1 <= self.top_k <= open_experts:
            raise UserError(f"top_k must be from 1 to the {open_experts} experts of top_groups, got {self.top_k}")


def _check_jitter(jitter: float) -> None:
    if not 0 <= jitter < 1:
        raise UserError(f"jitter must be at least 0 and below 1, got {jitter}")


class RouterModule(Part):
    """The map to the router's logits, (X, D), computed in at least fp32 whatever the model's dtype."""

    def __init__(self, spec: Router, d_model: int, n_experts: int, *, bias: bool = False, jitter: float = 0.0) -> None:
        super().__init__()
        spec.check(n_experts)
        self.top_k, self.jitter = spec.top_k, jitter
        self.proj = Linear(d_model, n_experts, bias=bias)

    def logits(self, x: Tensor) -> Tensor:
        """(B, T, X) of ``x`` (B, T, D), with the noise of training."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        x = x.to(dtype)
        if self.training and self.jitter:
            x = x * torch.empty_like(x).uniform_(1 - self.jitter, 1 + self.jitter)
        bias = None if self.proj.bias is None else self.proj.bias.to(dtype)
        with _no_autocast(x.device.type):
            if not is_map(self.proj):
                return self.proj(x.to(self.proj.weight.dtype)).to(dtype)
            return F.linear(x, self.proj.weight.to(dtype), bias)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From logits (B, T, X): ``chosen`` and ``gates`` (B, T, k), best first; ``shares`` (B, T, X) that sum to 1."""
        raise NotImplementedError


def _no_autocast(device: str) -> AbstractContextManager[Any]:
    available = torch.amp.is_autocast_available(device)
    return torch.autocast(device, enabled=False) if available else nullcontext()


class SoftmaxRouterModule(RouterModule):
    def __init__(self, spec: SoftmaxRouter, d_model: int, n_experts: int) -> None:
        super().__init__(spec, d_model, n_experts, bias=spec.bias, jitter=spec.jitter)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shares = logits.softmax(-1)
        gates, chosen = shares.topk(self.top_k, dim=-1)
        return chosen, gates, shares


class RenormalisedRouterModule(RouterModule):
    def __init__(self, spec: RenormalisedRouter, d_model: int, n_experts: int) -> None:
        super().__init__(spec, d_model, n_experts, jitter=spec.jitter)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        best, chosen = logits.topk(self.top_k, dim=-1)
        return chosen, best.softmax(-1), logits.softmax(-1)


class GroupedSigmoidRouterModule(RouterModule):
    """``selection_bias`` (X,) in fp32; ``load`` (X,), how many tokens chose each expert since the last update."""

    selection_bias: Tensor

    def __init__(self, spec: GroupedSigmoidRouter, d_model: int, n_experts: int) -> None:
        super().__init__(spec, d_model, n_experts)
        self.spec = spec
        self.register_buffer("selection_bias", torch.empty(n_experts, dtype=torch.float32))
        # No buffer: nothing to store, and wrappers that broadcast buffers would mix up the counts of their ranks.
        self.load: Tensor | None = None

    def init_parameters(self, init: InitContext) -> None:
        nn.init.zeros_(self.selection_bias)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spec, scores = self.spec, logits.sigmoid()
        with torch.no_grad():
            biased = scores + self.selection_bias
            if spec.top_groups < spec.n_groups:
                grouped = biased.unflatten(-1, (spec.n_groups, -1))
                best = grouped.topk(2, dim=-1).values.sum(-1).topk(spec.top_groups, dim=-1).indices
                closed = torch.ones(grouped.shape[:-1], dtype=torch.bool, device=best.device).scatter(-1, best, False)
                biased = grouped.masked_fill(closed[..., None], float("-inf")).flatten(-2)
            chosen = biased.topk(spec.top_k, dim=-1).indices
        picked = scores.gather(-1, chosen)
        gates = picked / picked.sum(-1, keepdim=True).clamp(min=1e-20) * spec.scale
        return chosen, gates, scores / scores.sum(-1, keepdim=True).clamp(min=1e-20)

    def observe(self, load: Tensor) -> None:
        """Count the tokens (X,) of a training pass; recomputed passes count again, which the sign does not see."""
        self.load = load if self.load is None else self.load + load

    @torch.no_grad()
    def update_bias(self, rate: float) -> None:
        """After a training step: overloaded experts become less likely by ``rate``, the others more; counts restart.

        arXiv:2412.19437, section 2.1.2, auxiliary-loss-free load balancing; the paper's rate is 1e-3. With several
        ranks, add up ``load`` over them first.
        """
        if self.load is not None:
            load = self.load.to(self.selection_bias.dtype)
            self.selection_bias += rate * torch.sign(load.mean() - load)
            self.load = None


register(
    SoftmaxRouter,
    module=SoftmaxRouterModule,
    paper="arXiv:2101.03961 eq. 1, 2",
    cases=lambda: [SoftmaxRouter(jitter=0.01), SoftmaxRouter(top_k=2, bias=True)],
)
register(
    RenormalisedRouter,
    module=RenormalisedRouterModule,
    paper="arXiv:2401.04088 §2.1",
    cases=lambda: [RenormalisedRouter(), RenormalisedRouter(top_k=3)],
)
register(
    GroupedSigmoidRouter,
    module=GroupedSigmoidRouterModule,
    paper="arXiv:2412.19437 eq. 12-16",
    cases=lambda: [
        GroupedSigmoidRouter(top_k=3, n_groups=3, top_groups=2, scale=2.5),
        GroupedSigmoidRouter(top_k=2),
    ],
)
