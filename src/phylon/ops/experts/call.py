"""The one description of an experts call that every backend reads."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import dropout

from phylon.ops.activation import ACTIVATIONS, check_activation
from phylon.ops.checks import check_floats, check_shapes, may_ask
from phylon.spec.errors import UserError, check_rate


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """The stacked maps of X experts: ``up`` (X, F, D), ``down`` (X, D, F), and ``gate`` (X, F, D) of gated ones.

    The biases are (X, F) and (X, D); an MLP has no ``gate``.
    """

    up: Tensor
    down: Tensor
    gate: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gate_bias: Tensor | None = None

    @property
    def biases(self) -> tuple[Tensor | None, ...]:
        return self.up_bias, self.gate_bias, self.down_bias


@dataclass(frozen=True, kw_only=True)
class ExpertCall:
    """``x`` (N, D); ``chosen`` (N, k) int64, -1 where a choice is not dispatched; ``gates`` (N, k), at least fp32."""

    x: Tensor
    chosen: Tensor
    gates: Tensor
    weights: ExpertWeights
    activation: str = "silu"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        x, up, down = self.x, self.weights.up, self.weights.down
        if x.ndim != 2 or self.chosen.shape != self.gates.shape or self.chosen.shape[:1] != x.shape[:1]:
            shapes = ", ".join(str(tuple(t.shape)) for t in (x, self.chosen, self.gates))
            raise UserError(f"experts take x (N, D), chosen (N, k) and gates (N, k), got {shapes}")
        if up.ndim != 3 or up.shape[2] != x.shape[1] or down.shape != (up.shape[0], up.shape[2], up.shape[1]):
            raise UserError(
                f"expert weights do not fit: x {tuple(x.shape)}, up {tuple(up.shape)}, down {tuple(down.shape)}"
            )
        if self.weights.gate is not None and self.weights.gate.shape != up.shape:
            raise UserError(f"expert weights do not fit: gate {tuple(self.weights.gate.shape)}, up {tuple(up.shape)}")
        if self.chosen.dtype != torch.int64:
            raise UserError(f"chosen must be int64, got {self.chosen.dtype}")
        w, (n, hidden, width) = self.weights, up.shape
        check_floats("experts", x=x, gates=self.gates, up=up, down=down, gate=w.gate)
        inner = (n, hidden)
        check_shapes(
            "experts",
            up_bias=(w.up_bias, inner),
            gate_bias=(w.gate_bias, inner),
            down_bias=(w.down_bias, (n, width)),
        )
        if w.gate_bias is not None and w.gate is None:
            raise UserError("experts without a gate take no gate_bias")
        if self.chosen.numel() and may_ask(self.chosen):
            least, most = (int(end) for end in self.chosen.aminmax())
            if least < -1 or most >= n:
                wrong = least if least < -1 else most
                raise UserError(f"expert {wrong} was chosen; there are {n}, and -1 is none")
        check_activation(self.activation)
        check_rate("dropout", self.dropout)

    @property
    def n_experts(self) -> int:
        return self.weights.up.shape[0]

    def hidden(self, up: Tensor, gate: Tensor | None) -> Tensor:
        """The inner activations (M, F), of the plain MLP or the gated one, after dropout."""
        act = ACTIVATIONS[self.activation]
        made = act(up) if gate is None else act(gate) * up
        return dropout(made, self.dropout) if self.dropout else made

    def sorted(self) -> tuple[Tensor, Tensor, Tensor]:
        """All choices by expert, in token order within one, and last those that are not dispatched.

        ``token`` (N k,) and ``place`` (N k,), the flat index of token and choice; ``counts`` (X,) how many each has.
        Asks the device for nothing.
        """
        flat = self.chosen.flatten()
        flat = torch.where(flat < 0, self.n_experts, flat)
        counts = flat.new_zeros(self.n_experts + 1).scatter_add(0, flat, torch.ones_like(flat))
        place = torch.argsort(flat, stable=True)
        return place // self.chosen.shape[1], place, counts[:-1]

    def combine(self, out: Tensor, token: Tensor, place: Tensor) -> Tensor:
        """(N, D): the experts' outputs (M, D) times their gates, summed over the choices of a token, rounded once."""
        wide = out.to(torch.promote_types(out.dtype, self.gates.dtype))
        gates = self.gates.flatten().index_select(0, place)
        summed = wide.new_zeros(self.x.shape).index_add(0, token, wide * gates[:, None])
        return summed.to(self.x.dtype)
