"""Mamba-2: state-space duality, a selective scan with one scalar decay a head. Dao and Gu (arXiv:2405.21060).

The paper's symbols, and what they are called here:

    H  ``n_heads``    P  ``head_dim``    H P = the inner width    G  ``n_groups``    N  ``d_state``
    A  (H,)           ``-exp(A_log)``: how fast each head's state decays
    X  (b, l, H, P)   the input of the scan, B, C (b, l, G, N): heads of a group share them, as keys and queries
    Δ  (b, l, H)      ``dt``, the step size        D  (H,)  the skip connection
    h  (b, H, P, N)   the state
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phylon.layers.context import Context
from phylon.layers.mixers.mamba import CausalConv, at_least_fp32, check_step_sizes, draw_step_bias, step_sizes
from phylon.layers.part import InitContext, Linear, Part
from phylon.layers.state import RecurrentState, State, boundaries
from phylon.ops.activation import check_activation
from phylon.ops.norm import rms_norm
from phylon.ops.scan import ssd_scan
from phylon.ops.scan.ssd.chunked import CHUNK
from phylon.spec.base import Mechanism, Mixer
from phylon.spec.errors import UserError, check_finite
from phylon.spec.registry import register


class Mamba2(Mechanism, Mixer, frozen=True, kw_only=True):
    """``out_proj(norm(scan(X, B, C) * silu(gate_proj(x))))`` with ``[X | B | C] = act(conv(in_proj(x)))``.

    ``h_t = exp(Δ_t A) h_{t-1} + Δ_t X_t B_t^T``, ``y_t = h_t C_t + D X_t`` for every head; Δ comes from the residual
    stream. arXiv:2405.21060, sections 6 and 7.1. Residual x (B, T, d_model). The norm is an RMSNorm over each group's
    channels. ``bias`` is that of the maps into and out of the block, ``conv_bias`` the convolution's. ``dt_low`` and
    ``dt_high`` bound the step sizes, ``dt_min`` and ``dt_max`` are those of a new model. ``A``, Δ and the state are
    fp32 at least in every model. Cost of a token: the maps, O(H P N) for the scan; the state of a row is
    H P N + (H P + 2 G N) (W - 1) numbers.

    The released code keeps ``gate_proj``, ``in_proj`` and ``dt_proj`` in one matrix; here they are apart. X, B and C
    pass the convolution together and stay one map.
    """

    n_heads: int
    head_dim: int = 64
    n_groups: int = 1
    d_state: int = 128
    d_conv: int = 4
    bias: bool = False
    conv_bias: bool = True
    activation: str = "silu"
    eps: float = 1e-5
    dt_low: float = 0.0
    dt_high: float | None = None
    dt_min: float = 1e-3
    dt_max: float = 1e-1

    def __post_init__(self) -> None:
        for name in ("n_heads", "head_dim", "n_groups", "d_state", "d_conv"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.n_heads % self.n_groups:
            raise UserError(f"n_heads {self.n_heads} must be a multiple of n_groups {self.n_groups}")
        check_finite("eps", self.eps, above=0)
        if not 0 <= self.dt_low < math.inf or not (self.dt_high is None or self.dt_high >= self.dt_low):
            raise UserError(f"step sizes need 0 <= dt_low <= dt_high, got {self.dt_low} and {self.dt_high}")
        check_step_sizes(self.dt_min, self.dt_max)
        check_activation(self.activation)

    def streams(self) -> str | None:
        return None

    @property
    def inner(self) -> int:
        """Channels of X."""
        return self.n_heads * self.head_dim

    @property
    def widths(self) -> tuple[int, int, int]:
        """Channels of X, B and C, which pass the convolution side by side."""
        return self.inner, self.n_groups * self.d_state, self.n_groups * self.d_state


class Mamba2Module(Part):
    def __init__(self, spec: Mamba2, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.in_proj = Linear(d_model, sum(spec.widths), bias=spec.bias)
        self.gate_proj = Linear(d_model, spec.inner, bias=spec.bias)
        self.dt_proj = Linear(d_model, spec.n_heads, bias=spec.bias)
        self.conv = CausalConv(sum(spec.widths), spec.d_conv, spec.activation, bias=spec.conv_bias)
        self.dt_bias = nn.Parameter(torch.empty(spec.n_heads))
        self.A_log = nn.Parameter(torch.empty(spec.n_heads))
        self.D = nn.Parameter(torch.empty(spec.n_heads))
        self.norm = GatedNorm(spec.inner, spec.n_groups, spec.eps)
        self.out_proj = Linear(spec.inner, d_model, bias=spec.bias, role="out")

    def init_parameters(self, init: InitContext) -> None:
        """``A`` uniform in [1, 16], as the released code draws it."""
        decays = torch.empty(self.A_log.shape).uniform_(1, 16, generator=init.generator)
        self.A_log.copy_(decays.log())
        nn.init.ones_(self.D)
        draw_step_bias(self.dt_bias, self.spec.dt_min, self.spec.dt_max, init.generator)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        spec, breaks = self.spec, boundaries(ctx)
        part = None if ctx.state is None else ctx.state.parts[self.path]
        assert part is None or isinstance(part, RecurrentState)
        (tail, h), (next_tail, next_h) = ((None, None),) * 2 if part is None else (part.tensors, part.spare)
        joined, tail = self.conv(self.in_proj(x), tail, next_tail, ctx)
        u, B, C = joined.split(spec.widths, -1)
        dt = step_sizes(self.dt_proj(x), self.dt_bias)
        if spec.dt_low > 0 or spec.dt_high is not None:
            dt = dt.clamp(spec.dt_low, spec.dt_high)
        y, h = ssd_scan(
            self.tap(ctx, "u", u.unflatten(-1, (spec.n_heads, spec.head_dim))),
            self.tap(ctx, "dt", dt),
            -torch.exp(at_least_fp32(self.A_log)),
            B.unflatten(-1, (spec.n_groups, spec.d_state)),
            C.unflatten(-1, (spec.n_groups, spec.d_state)),
            self.D,
            state=h,
            resets=breaks.resets,
            real=breaks.real,
            into=next_h,
        )
        if part is not None:
            part.update(tail, h)
        return self.out_proj(self.norm(self.tap(ctx, "y", y).flatten(-2), self.gate_proj(x)))

    def add_state(self, state: State, max_len: int | None) -> None:
        """The convolution's last inputs (B, W - 1, HP + 2GN) in the model's dtype, and h (B, H, P, N) in fp32."""
        spec, like, rows = self.spec, self.conv.weight, state.batch_size
        h = at_least_fp32(like.new_zeros(0)).new_zeros(rows, spec.n_heads, spec.head_dim, spec.d_state)
        state.add(self.path, RecurrentState(like.new_zeros(rows, spec.d_conv - 1, len(like)), h))


class GatedNorm(Part):
    """``rms_norm(y * silu(z)) * weight`` over each group's channels, at least in fp32. arXiv:2405.21060, §7.1."""

    def __init__(self, width: int, groups: int, eps: float) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.empty(width))

    def init_parameters(self, init: InitContext) -> None:
        nn.init.ones_(self.weight)

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        gated = at_least_fp32(y) * F.silu(at_least_fp32(z))
        normed = rms_norm(gated.unflatten(-1, (self.groups, -1)), None, self.eps).flatten(-2)
        return (normed * self.weight).to(y.dtype)


def _flops(spec: Mamba2, width: int, n_keys: int) -> int:
    """The maps, the convolution, and the matrix products of the scan in full chunks of L steps."""
    maps = width * (sum(spec.widths) + spec.inner + spec.n_heads) + spec.inner * width
    inside = min(n_keys, CHUNK) * (spec.n_groups * spec.d_state + spec.inner)
    return 2 * (maps + sum(spec.widths) * spec.d_conv + inside + 2 * spec.inner * spec.d_state)


def _cases() -> list[Mamba2]:
    # Steps as large as those of a trained model, so that what the state holds shows in the output.
    steps = {"dt_min": 0.02, "dt_max": 0.2}
    return [
        Mamba2(n_heads=3, head_dim=8, d_state=5, **steps),
        Mamba2(n_heads=4, head_dim=6, n_groups=2, d_state=4, d_conv=3, bias=True, conv_bias=False, **steps),
        Mamba2(n_heads=2, head_dim=5, d_state=3, d_conv=2, dt_low=0.01, dt_high=0.5, **steps),
    ]


register(Mamba2, module=Mamba2Module, paper="arXiv:2405.21060 §7.1", cases=_cases, flops=_flops)
