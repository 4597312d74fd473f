"""Mamba: a selective state-space model. Gu and Dao (arXiv:2312.00752), section 3.

The paper's symbols, and what they are called here:

    b  batch (B)      l  length (T)      d  width of the residual stream, ``d_model``
    e  ``expand``     d_in = e d, the inner width (D in the shapes below)
    n  ``d_state`` (N), numbers of state for each inner channel
    r  ``dt_rank`` (R), rank of the step sizes
    A  (D, N)         ``-exp(A_log)``: how fast each number of the state decays
    B  (b, l, N)      how the input enters the state     C  (b, l, N)  how the state is read
    D  (D,)           the skip connection                Δ  (b, l, D)  ``dt``, the step size
    h  (b, D, N)      the state
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phylon.layers.context import Context
from phylon.layers.norms import RMSNorm
from phylon.layers.part import InitContext, Linear, Part, child, hooked, parameter
from phylon.layers.state import RecurrentState, State, boundaries
from phylon.ops.activation import check_activation
from phylon.ops.scan import StepCall, causal_conv, mamba_step, selective_scan
from phylon.spec.base import Mechanism, Mixer, Norm
from phylon.spec.errors import UserError
from phylon.spec.registry import build, register


class Mamba(Mechanism, Mixer, frozen=True, kw_only=True):
    """``out_proj(scan(u) * silu(gate_proj(x)))`` with ``u = act(conv(in_proj(x)))``; the scan's B, C, Δ depend on u.

    ``h_t = exp(Δ_t A) h_{t-1} + Δ_t B_t u_t``, ``y_t = C_t h_t + D u_t``. arXiv:2312.00752, section 3.2, algorithm 2,
    block of section 3.4. Residual x (B, T, d_model). ``inner_norm`` normalises Δ's low-rank form, B and C: Jamba
    (arXiv:2403.19887), section 6.4. ``bias`` is that of the maps into and out of the block, ``conv_bias`` the
    convolution's. ``dt_min``, ``dt_max``: the step sizes of a new model. ``A``, Δ and the state are fp32 at least in
    every model. Cost of a token: the maps, O(D N) for the scan; the state of a row is D (N + W - 1) numbers.

    The released code keeps ``in_proj`` and ``gate_proj`` in one matrix; here they are apart, as q, k and v are.
    ``x_proj`` stays one map, [Δ | B | C], because its parts always go together. ``dt_bias`` is a parameter of the
    mixer, added in fp32, and not the bias of ``dt_proj``, which may run in 16 bits.
    """

    d_state: int = 16
    d_conv: int = 4
    expand: int = 2
    dt_rank: int
    bias: bool = False
    conv_bias: bool = True
    activation: str = "silu"
    inner_norm: Norm | None = None
    dt_min: float = 1e-3
    dt_max: float = 1e-1

    def __post_init__(self) -> None:
        for name in ("d_state", "d_conv", "expand", "dt_rank"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")
        check_step_sizes(self.dt_min, self.dt_max)
        check_activation(self.activation)

    def streams(self) -> str | None:
        return None


class MambaModule(Part):
    def __init__(self, spec: Mamba, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        inner, size, rank = spec.expand * d_model, spec.d_state, spec.dt_rank
        self.in_proj = Linear(d_model, inner, bias=spec.bias)
        self.gate_proj = Linear(d_model, inner, bias=spec.bias)
        self.conv = CausalConv(inner, spec.d_conv, spec.activation, bias=spec.conv_bias)
        self.x_proj = Linear(inner, rank + 2 * size, bias=False)
        self.dt_norm, self.b_norm, self.c_norm = (
            None if spec.inner_norm is None else build(spec.inner_norm, width) for width in (rank, size, size)
        )
        self.dt_proj = StepProjection(rank, inner, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(inner))
        self.A_log = nn.Parameter(torch.empty(inner, size))
        self.D = nn.Parameter(torch.empty(inner))
        self.out_proj = Linear(inner, d_model, bias=spec.bias, role="out")

    def init_parameters(self, init: InitContext) -> None:
        decays = torch.arange(1, self.spec.d_state + 1, dtype=torch.float32).log()
        self.A_log.copy_(decays.expand_as(self.A_log))
        nn.init.ones_(self.D)
        draw_step_bias(self.dt_bias, self.spec.dt_min, self.spec.dt_max, init.generator)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        breaks = boundaries(ctx)
        part = None if ctx.state is None else ctx.state.parts[self.path]
        assert part is None or isinstance(part, RecurrentState)
        if part is not None and self._steps(x, ctx):
            return self.out_proj(self._step(x, part))
        (tail, h), (next_tail, next_h) = ((None, None),) * 2 if part is None else (part.tensors, part.spare)
        u, tail = self.conv(self.in_proj(x), tail, next_tail, ctx)
        dt, B, C = self.x_proj(u).split([self.spec.dt_rank, self.spec.d_state, self.spec.d_state], -1)
        if self.dt_norm is not None and self.b_norm is not None and self.c_norm is not None:
            dt, B, C = self.dt_norm(dt), self.b_norm(B), self.c_norm(C)
        dt, u = self.tap(ctx, "dt", step_sizes(self.dt_proj(dt), self.dt_bias)), self.tap(ctx, "u", u)
        A = -torch.exp(at_least_fp32(self.A_log))
        y, h = selective_scan(u, dt, A, B, C, self.D, state=h, resets=breaks.resets, real=breaks.real, into=next_h)
        if part is not None:
            part.update(tail, h)
        return self.out_proj(self.tap(ctx, "y", y) * F.silu(self.gate_proj(x)))

    def _steps(self, x: Tensor, ctx: Context) -> bool:
        """Whether this is one plain token, of which nobody wants to see the parts, through maps that are only maps."""
        if x.shape[1] != 1 or ctx.taps is not None or not self._has_step:
            return False
        breaks = boundaries(ctx)
        if breaks.resets is not None or breaks.real is not None:
            return False
        used = ((CausalConv, "conv"), (Linear, "x_proj"), (StepProjection, "dt_proj"))
        return all(type(child(self, name)) is kind and not hooked(child(self, name)) for kind, name in used)

    @property
    def _has_step(self) -> bool:
        return self.spec.inner_norm is None and self.spec.activation == "silu"

    def _step(self, x: Tensor, part: RecurrentState) -> Tensor:
        conv = child(self, "conv")
        call = StepCall(
            x=child(self, "in_proj")(x),
            z=child(self, "gate_proj")(x),
            conv_weight=parameter(conv, "weight"),
            conv_bias=parameter(conv, "bias"),
            x_proj=parameter(child(self, "x_proj"), "weight"),
            dt_proj=parameter(child(self, "dt_proj"), "weight"),
            dt_bias=parameter(self, "dt_bias"),
            A_log=parameter(self, "A_log"),
            D=parameter(self, "D"),
            tail=part.tensors[0],
            state=part.tensors[1],
            new_tail=part.spare[0],
            new_state=part.spare[1],
        )
        y = mamba_step(call)
        part.update(*part.spare)
        return y

    def add_state(self, state: State, max_len: int | None) -> None:
        """The convolution's last inputs (B, W - 1, D) in the model's dtype, and h (B, D, N) in fp32."""
        like, rows = self.conv.weight, state.batch_size
        inner = len(like)
        h = at_least_fp32(like.new_zeros(0)).new_zeros(rows, inner, self.spec.d_state)
        state.add(self.path, RecurrentState(like.new_zeros(rows, self.spec.d_conv - 1, inner), h))


class CausalConv(Part):
    """The depthwise convolution over the last ``d_conv`` inputs of each channel: ``weight`` (D, W), the last is now.

    The ``activation`` of that name follows.
    """

    def __init__(self, width: int, d_conv: int, activation: str, *, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        self.weight = nn.Parameter(torch.empty(width, d_conv))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def init_parameters(self, init: InitContext) -> None:
        """Uniform up to ``1 / sqrt(W)``, as PyTorch draws a convolution, which the released code leaves alone."""
        draw_uniform(self.weight, self.weight.shape[1] ** -0.5, init.generator)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, tail: Tensor | None, into: Tensor | None, ctx: Context) -> tuple[Tensor, Tensor]:
        """Outputs, and the new tail, written ``into`` that memory where it is given."""
        breaks = boundaries(ctx)
        return causal_conv(
            x,
            self.weight,
            self.bias,
            activation=self.activation,
            tail=tail,
            resets=breaks.resets,
            real=breaks.real,
            into=into,
        )


class StepProjection(Linear):
    """From Δ's low-rank form to every channel, drawn uniform up to ``R ** -0.5``. arXiv:2312.00752, released code."""

    def init_parameters(self, init: InitContext) -> None:
        draw_uniform(self.weight, self.in_features**-0.5, init.generator)


def at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def step_sizes(dt: Tensor, bias: Tensor) -> Tensor:
    """``softplus(dt + bias)`` in at least fp32. arXiv:2312.00752, section 3.6."""
    return F.softplus(at_least_fp32(dt) + at_least_fp32(bias))


def check_step_sizes(least: float, most: float) -> None:
    if not 0 < least <= most < math.inf:
        raise UserError(f"step sizes need 0 < dt_min <= dt_max, got {least} and {most}")


def draw_uniform(weight: Tensor, most: float, generator: torch.Generator) -> None:
    weight.copy_(torch.empty(weight.shape).uniform_(-most, most, generator=generator))


def draw_step_bias(bias: Tensor, least: float, most: float, generator: torch.Generator) -> None:
    """Step sizes log-uniform in [least, most], as the bias that softplus turns into them. arXiv:2312.00752, §3.6."""
    logs = torch.empty(bias.shape).uniform_(math.log(least), math.log(most), generator=generator)
    dt = logs.exp()
    bias.copy_(dt + torch.log(-torch.expm1(-dt)))


def _flops(spec: Mamba, width: int, n_keys: int) -> int:
    """The maps, the convolution and ``C h``; the recurrence itself is elementwise (about 6 D N more)."""
    inner = spec.expand * width
    maps = 3 * width * inner + inner * (spec.dt_rank + 2 * spec.d_state) + spec.dt_rank * inner
    return 2 * (maps + inner * spec.d_conv + inner * spec.d_state)


def _cases() -> list[Mamba]:
    # Steps as large as those of a trained model, so that what the state holds shows in the output.
    steps = {"dt_min": 0.2, "dt_max": 2.0}
    return [
        Mamba(dt_rank=2, d_state=5, **steps),
        Mamba(dt_rank=3, d_state=4, d_conv=3, bias=True, conv_bias=False, inner_norm=RMSNorm(), **steps),
        Mamba(dt_rank=1, d_state=1, d_conv=1, expand=1, activation="gelu", **steps),
    ]


register(Mamba, module=MambaModule, paper="arXiv:2312.00752 §3", cases=_cases, flops=_flops)
