"""Cross-attention: a decoder's queries over the encoder's output."""

import torch
from torch import Tensor

from phylon.layers.context import Context
from phylon.layers.part import Linear, Part
from phylon.layers.state import CrossKV, State
from phylon.ops.attention import attention
from phylon.patterns import Full
from phylon.spec.base import Mechanism, Mixer
from phylon.spec.errors import UserError, check_finite, check_rate
from phylon.spec.registry import register


class CrossAttention(Mechanism, Mixer, frozen=True, kw_only=True):
    """``o_proj(softmax(scale q k^T) v)`` with queries from the residual stream and keys, values from the memory.

    *Attention Is All You Need* (arXiv:1706.03762), section 3.2.3, encoder-decoder attention. x (B, T, D), memory
    (B, S, D); every query sees all real source tokens of its own document. Keys and values are computed once and
    kept in the state. Cost: ``4 D H E`` a target token for q and o, as much a source token for k and v, and
    ``4 S H E`` a target token for S source tokens.
    """

    label = "cross_attn"

    n_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    scale: float | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.n_heads < 1 or self.head_dim < 1:
            raise UserError(f"n_heads and head_dim must be at least 1, got {self.n_heads} and {self.head_dim}")
        check_finite("scale", self.scale)
        check_rate("dropout", self.dropout)

    def streams(self) -> str | None:
        return None


class CrossAttentionModule(Part):
    def __init__(self, spec: CrossAttention, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        width = spec.n_heads * spec.head_dim
        self.q_proj = Linear(d_model, width, bias=spec.qkv_bias)
        self.k_proj = Linear(d_model, width, bias=spec.qkv_bias)
        self.v_proj = Linear(d_model, width, bias=spec.qkv_bias)
        self.o_proj = Linear(width, d_model, bias=spec.out_bias, role="out")

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        spec, shape = self.spec, (self.spec.n_heads, self.spec.head_dim)
        q = self.tap(ctx, "q", self.q_proj(x).unflatten(-1, shape))
        k, v = self._keys(ctx)
        dropout = spec.dropout if self.training else 0.0
        z = attention(
            q,
            k,
            v,
            pattern=Full(),
            query=None if ctx.aligned else ctx.records,
            key=ctx.memory_records,
            scale=spec.scale,
            dropout=dropout,
            seed=int(torch.randint(2**31, ())) if dropout else 0,
            tap=self.score_tap(ctx),
        )
        return self.o_proj(self.tap(ctx, "z", z).flatten(-2))

    def _keys(self, ctx: Context) -> tuple[Tensor, Tensor]:
        part = None if ctx.state is None else ctx.state.parts[self.path]
        if ctx.memory is None:
            assert isinstance(part, CrossKV)
            return part.k, part.v
        shape = (self.spec.n_heads, self.spec.head_dim)
        k = self.tap(ctx, "k", self.k_proj(ctx.memory).unflatten(-1, shape))
        v = self.tap(ctx, "v", self.v_proj(ctx.memory).unflatten(-1, shape))
        if isinstance(part, CrossKV):
            part.fill(k, v)
        return k, v

    def add_state(self, state: State, max_len: int | None) -> None:
        state.add(self.path, CrossKV(state.batch_size, self.spec.n_heads, self.spec.head_dim, self.k_proj.weight))


def _flops(spec: CrossAttention, width: int, n_keys: int) -> int:
    # One source token for every target token, as accounts charge them.
    return 8 * width * spec.n_heads * spec.head_dim + 4 * n_keys * spec.n_heads * spec.head_dim


register(
    CrossAttention,
    module=CrossAttentionModule,
    paper="arXiv:1706.03762 §3.2.3",
    cases=lambda: [
        CrossAttention(n_heads=4, head_dim=6, qkv_bias=True, out_bias=True),
        CrossAttention(n_heads=1, head_dim=10),
    ],
    flops=_flops,
)
