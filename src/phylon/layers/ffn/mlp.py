"""Feed-forward networks: the plain two-map MLP and the gated linear unit."""

from torch import Tensor
from torch.nn.functional import dropout

from phylon.layers.context import Context
from phylon.layers.part import Linear, Part, is_plain
from phylon.ops.activation import ACTIVATIONS, check_activation
from phylon.ops.feedforward import feedforward
from phylon.ops.linear import is_few
from phylon.spec.base import FeedForward, Mechanism
from phylon.spec.errors import UserError, check_rate
from phylon.spec.registry import register


class MLP(Mechanism, FeedForward, frozen=True, kw_only=True):
    """``down_proj(act(up_proj(x)))``. *Attention Is All You Need* (arXiv:1706.03762), equation 2.

    ``x`` (B, T, D); hidden (B, T, F). ``bias`` says whether both maps have one. Cost of a token: ``4 D F``.
    """

    d_ff: int
    activation: str = "gelu"
    bias: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _check(self.d_ff, self.activation)
        check_rate("dropout", self.dropout)


class GLU(Mechanism, FeedForward, frozen=True, kw_only=True):
    """``down_proj(act(gate_proj(x)) * up_proj(x))``. Shazeer (arXiv:2002.05202), equation 6; SwiGLU with "silu".

    ``x`` (B, T, D); hidden (B, T, F). Cost of a token: ``6 D F``.
    """

    d_ff: int
    activation: str = "silu"
    bias: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _check(self.d_ff, self.activation)
        check_rate("dropout", self.dropout)


def _check(d_ff: int, activation: str) -> None:
    check_activation(activation)
    if d_ff < 1:
        raise UserError(f"d_ff must be at least 1, got {d_ff}")


class MLPModule(Part):
    def __init__(self, spec: MLP, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.up_proj = Linear(d_model, spec.d_ff, bias=spec.bias)
        self.down_proj = Linear(spec.d_ff, d_model, bias=spec.bias, role="out")
        self.act = ACTIVATIONS[spec.activation]

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        if _is_whole(self, x, ctx):
            return feedforward(x, _map(self.up_proj), _map(self.down_proj), activation=self.spec.activation)
        hidden = self.tap(ctx, "hidden", self.act(self.up_proj(x)))
        return self.down_proj(dropped(hidden, self.spec.dropout, self.training))


class GLUModule(Part):
    def __init__(self, spec: GLU, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.gate_proj = Linear(d_model, spec.d_ff, bias=spec.bias)
        self.up_proj = Linear(d_model, spec.d_ff, bias=spec.bias)
        self.down_proj = Linear(spec.d_ff, d_model, bias=spec.bias, role="out")
        self.act = ACTIVATIONS[spec.activation]

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        if _is_whole(self, x, ctx):
            up, down, gate = (_map(m) for m in (self.up_proj, self.down_proj, self.gate_proj))
            return feedforward(x, up, down, gate, activation=self.spec.activation)
        hidden = self.tap(ctx, "hidden", self.act(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(dropped(hidden, self.spec.dropout, self.training))


def _is_whole(ffn: "MLPModule | GLUModule", x: Tensor, ctx: Context) -> bool:
    """Whether one op may do all of ``ffn``: nobody looks at or changes its hidden values."""
    if is_few(x) or ctx.taps is not None or (ffn.training and ffn.spec.dropout):
        return False
    return is_plain(*ffn.children())


def _map(linear: Linear) -> tuple[Tensor, Tensor | None]:
    return linear.weight, linear.bias


def dropped(x: Tensor, rate: float, training: bool) -> Tensor:
    """Dropout that costs nothing when it is off."""
    return dropout(x, rate) if training and rate else x


register(
    MLP,
    module=MLPModule,
    paper="arXiv:1706.03762 eq. 2",
    cases=lambda: [MLP(d_ff=20), MLP(d_ff=13, activation="relu", bias=False), MLP(d_ff=16, activation="gelu_tanh")],
    flops=lambda spec, width, n_keys: 4 * width * spec.d_ff,
)
register(
    GLU,
    module=GLUModule,
    paper="arXiv:2002.05202 eq. 6",
    cases=lambda: [GLU(d_ff=20), GLU(d_ff=13, activation="gelu", bias=True)],
    flops=lambda spec, width, n_keys: 6 * width * spec.d_ff,
)
