"""A mixture of experts: many feed-forward networks, of which every token uses a few."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from phylon.layers.context import Context
from phylon.layers.ffn.dispatchers import Capacity, Dispatcher, Dropless
from phylon.layers.ffn.mlp import GLU, MLP
from phylon.layers.ffn.routers import (
    GroupedSigmoidRouter,
    GroupedSigmoidRouterModule,
    RenormalisedRouter,
    Router,
    SoftmaxRouter,
)
from phylon.layers.part import InitContext, Part
from phylon.ops.experts import ExpertWeights, experts
from phylon.ops.loss import Loss
from phylon.spec.base import FeedForward, Mechanism, Role
from phylon.spec.errors import UserError
from phylon.spec.registry import build, entry_of, register


class MoE(Mechanism, FeedForward, frozen=True, kw_only=True, tag="moe"):
    """``shared(x) + sum over chosen experts of gate * expert(x)``.

    Shazeer et al. (arXiv:1701.06538), equation 1; Switch Transformer (arXiv:2101.03961), section 2; the shared expert:
    DeepSeekMoE (arXiv:2401.06066), equation 9. ``x`` (B, T, D); ``router`` chooses, ``dispatch`` says what is computed
    in training and ``eval_dispatch`` in evaluation; the experts are stacked, (X, F, D) and (X, D, F). Cost of a token:
    the router, ``top_k`` experts, the shared one.

    Auxiliary terms, unweighted, by path, where no state is given (X experts, n real tokens in a row):

    ``balance``: for each row ``X sum_i f_i P_i``, with ``f_i`` the share of expert i among the row's n k choices,
    before any is dropped, and ``P_i`` the mean of the router's shares (softmax; sigmoid scores over their sum). Summed
    over rows that have real tokens, counted in rows; 1 where routing is uniform. arXiv:2101.03961, equation 4, with k
    choices and a row for the batch; arXiv:2412.19437, equations 17 to 20, is the same.

    ``z_loss``: ``logsumexp(logits)^2`` of the raw logits, summed over real tokens, counted in them. ST-MoE
    (arXiv:2202.08906), equation 5.
    """

    training_only: ClassVar[tuple[str, ...]] = ("dispatch",)

    n_experts: int
    expert: MLP | GLU
    router: Router
    dispatch: Dispatcher = Dropless()
    eval_dispatch: Dispatcher = Dropless()
    shared: FeedForward | None = None

    def __post_init__(self) -> None:
        if self.n_experts < 1:
            raise UserError(f"n_experts must be at least 1, got {self.n_experts}")
        self.router.check(self.n_experts)


class MoEModule(Part):
    def __init__(self, spec: MoE, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.router = build(spec.router, d_model, spec.n_experts)
        self.experts = Experts(spec.expert, d_model, spec.n_experts)
        self.shared = None if spec.shared is None else build(spec.shared, d_model)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        spec, segments = self.spec, ctx.records.segments
        real = None if segments is None else (segments != 0).expand(x.shape[:2])
        if real is not None:
            # Padding can hold anything, and 0 * NaN is NaN: in the router's gradient too.
            x = x.masked_fill(~real[..., None], 0)
        logits = self.tap(ctx, "router_logits", self.router.logits(x))
        chosen, gates, shares = self.router.choose(logits)
        if ctx.state is None:
            self._observe(ctx, logits, chosen, shares, real)
        dispatcher = spec.dispatch if self.training else spec.eval_dispatch
        sent = dispatcher.dispatch(chosen, real, spec.n_experts)
        out = self.experts(x, sent, gates)
        return out if self.shared is None else out + self.shared(x, ctx)

    def _observe(self, ctx: Context, logits: Tensor, chosen: Tensor, shares: Tensor, real: Tensor | None) -> None:
        n_experts, k = self.spec.n_experts, self.spec.router.top_k
        z = torch.logsumexp(logits, -1).square()
        if real is None:
            counts = torch.full((len(z),), z.shape[1], device=z.device)
        else:
            counts, z, shares = real.sum(1), z.masked_fill(~real, 0), shares.masked_fill(~real[..., None], 0)
        # Padding is counted in a column of its own, which is cut off.
        kept = (chosen if real is None else chosen.masked_fill(~real[..., None], n_experts)).flatten(1)
        load = z.new_zeros(len(z), n_experts + 1).scatter_add_(1, kept, z.new_ones(kept.shape))[:, :-1]
        n = counts.clamp(min=1)[:, None]
        balance = n_experts * (load / (k * n) * (shares.sum(1) / n)).sum(1)
        ctx.aux[f"{self.path}.balance"] = Loss(balance.sum(), (counts > 0).sum())
        ctx.aux[f"{self.path}.z_loss"] = Loss(z.sum(), counts.sum())
        if self.training and isinstance(self.router, GroupedSigmoidRouterModule):
            self.router.observe(load.sum(0).detach())

    def inactive_parameters(self) -> int:
        """Of the experts that a token is not sent to."""
        total = sum(parameter.numel() for parameter in self.experts.parameters())
        return total // self.spec.n_experts * (self.spec.n_experts - self.spec.router.top_k)


class Experts(Part):
    """X feed-forward networks of one spec, their maps stacked."""

    def __init__(self, spec: MLP | GLU, d_model: int, n_experts: int) -> None:
        super().__init__()
        self.spec = spec
        wide, narrow = (n_experts, spec.d_ff, d_model), (n_experts, d_model, spec.d_ff)
        self.gate_proj = Stacked(wide, bias=spec.bias) if isinstance(spec, GLU) else None
        self.up_proj = Stacked(wide, bias=spec.bias)
        self.down_proj = Stacked(narrow, bias=spec.bias, role="out")

    def forward(self, x: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
        """(B, T, D) from ``x`` (B, T, D), ``chosen`` and ``gates`` (B, T, k)."""
        device = x.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        gate = self.gate_proj
        weights = ExpertWeights(
            up=self.up_proj.weight,
            down=self.down_proj.weight,
            gate=None if gate is None else gate.weight,
            up_bias=self.up_proj.bias,
            down_bias=self.down_proj.bias,
            gate_bias=None if gate is None else gate.bias,
        )
        out = experts(
            x.flatten(0, 1),
            chosen.flatten(0, 1),
            gates.flatten(0, 1),
            weights,
            activation=self.spec.activation,
            dropout=self.spec.dropout if self.training else 0.0,
        )
        return out.view(x.shape)


class Stacked(Part):
    """The linear maps of X experts: ``weight`` (X, out, in), ``bias`` (X, out)."""

    def __init__(self, shape: tuple[int, int, int], *, bias: bool, role: Role = "in") -> None:
        super().__init__()
        self.role = role
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[:2])) if bias else None

    def init_parameters(self, init: InitContext) -> None:
        init.draw(self.weight, self.role)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def _flops(spec: MoE, width: int, n_keys: int) -> int:
    def of(part: FeedForward | None) -> int:
        formula = None if part is None else entry_of(part).flops
        return 0 if formula is None else formula(part, width, n_keys)

    return 2 * width * spec.n_experts + spec.router.top_k * of(spec.expert) + of(spec.shared)


def _cases() -> list[MoE]:
    return [
        MoE(n_experts=4, expert=GLU(d_ff=12), router=RenormalisedRouter()),
        MoE(
            n_experts=3,
            expert=MLP(d_ff=13, activation="relu"),
            router=SoftmaxRouter(jitter=0.01),
            dispatch=Capacity(factor=3.0),
        ),
        MoE(
            n_experts=6,
            expert=GLU(d_ff=8, bias=True),
            router=GroupedSigmoidRouter(top_k=2, n_groups=3, top_groups=2, scale=2.5),
            shared=GLU(d_ff=20),
        ),
    ]


register(MoE, module=MoEModule, paper="arXiv:1701.06538 eq. 1, arXiv:2101.03961 §2", cases=_cases, flops=_flops)
