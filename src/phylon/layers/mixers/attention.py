"""Multi-head attention with grouped keys and values: MHA, MQA and GQA in one."""

import math

import torch
from torch import Tensor

from phylon.layers.context import Context
from phylon.layers.norms import RMSNorm
from phylon.layers.part import Linear, Part, project
from phylon.layers.positions.rotary import Rotary, Rotation
from phylon.layers.positions.score_bias import Alibi, alibi_slopes
from phylon.layers.state import FullKV, KVState, RollingKV, State
from phylon.ops.attention import attention
from phylon.patterns import Causal, Full, Pattern, Records, Window
from phylon.spec.base import Mechanism, Mixer, Norm, ScoreBias
from phylon.spec.errors import UserError, check_finite, check_rate
from phylon.spec.registry import build, register


class Attention(Mechanism, Mixer, frozen=True, kw_only=True):
    """``o_proj(softmax(scale q k^T) v)``, every head over the keys its pattern allows.

    *Attention Is All You Need* (arXiv:1706.03762), section 3.2.2; multi-query (K = 1): arXiv:1911.02150; grouped
    (1 < K < H): arXiv:2305.13245; QK-norm over the head: arXiv:2302.05442; ``qkv_clip`` bounds what the maps give
    (MPT, released code). Residual x (B, T, D); q (B, T, H, E);
    k, v (B, T, K, E). ``scale`` defaults to ``E ** -0.5``. ``qkv_bias`` and ``out_bias`` say whether those biases
    exist. Cost of a token: ``2 D E (2 H + 2 K)`` for the maps and ``4 S H E`` for S keys.
    """

    label = "attn"

    n_heads: int
    n_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    pattern: Pattern = Causal()
    rotary: Rotation | None = None
    score_bias: ScoreBias | None = None
    qk_norm: Norm | None = None
    qkv_clip: float | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("n_heads", "n_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.n_heads % self.n_kv_heads:
            raise UserError(f"n_heads {self.n_heads} must be a multiple of n_kv_heads {self.n_kv_heads}")
        if self.pattern.heads not in (1, self.n_heads):
            raise UserError(f"the pattern is for {self.pattern.heads} heads, the mixer has {self.n_heads}")
        check_rate("dropout", self.dropout)
        if self.rotary is not None:
            self.rotary.check(self.head_dim)
        check_finite("scale", self.scale)
        check_finite("softcap", self.softcap, above=0)
        if self.qkv_clip is not None and not self.qkv_clip > 0:
            raise UserError(f"qkv_clip must be above 0, got {self.qkv_clip}")

    def streams(self) -> str | None:
        if self.pattern.streams:
            return None
        if self.pattern.needs_lengths:
            return f"its pattern {type(self.pattern).__name__} depends on how long the text will be"
        return f"its pattern {type(self.pattern).__name__} lets tokens look ahead"


class AttentionModule(Part):
    def __init__(self, spec: Attention, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        heads, kv_heads, width = spec.n_heads, spec.n_kv_heads, spec.head_dim
        self.q_proj = Linear(d_model, heads * width, bias=spec.qkv_bias)
        self.k_proj = Linear(d_model, kv_heads * width, bias=spec.qkv_bias)
        self.v_proj = Linear(d_model, kv_heads * width, bias=spec.qkv_bias)
        self.o_proj = Linear(heads * width, d_model, bias=spec.out_bias, role="out")
        self.q_norm = None if spec.qk_norm is None else build(spec.qk_norm, width)
        self.k_norm = None if spec.qk_norm is None else build(spec.qk_norm, width)
        self.score_bias = None if spec.score_bias is None else build(spec.score_bias, heads)
        self.scale = 1 / math.sqrt(width) if spec.scale is None else spec.scale

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        spec = self.spec
        q, k, v = project(x, self.q_proj, self.k_proj, self.v_proj)
        q = q.unflatten(-1, (spec.n_heads, spec.head_dim))
        k, v = (t.unflatten(-1, (spec.n_kv_heads, spec.head_dim)) for t in (k, v))
        if spec.qkv_clip is not None:
            q, k, v = (t.clamp(-spec.qkv_clip, spec.qkv_clip) for t in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            # Under autocast a norm answers in fp32.
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        if spec.rotary is not None:
            q, k = spec.rotary.turn(q, ctx), spec.rotary.turn(k, ctx)
        q, k, v = self.tap(ctx, "q", q), self.tap(ctx, "k", k), self.tap(ctx, "v", v)
        query: Records | None = None if ctx.aligned else ctx.records
        key = query
        if ctx.state is not None:
            part = ctx.state.parts[self.path]
            assert isinstance(part, KVState)
            k, v, key = part.append(k, v, ctx.state)
            query = None if key is None else ctx.records
        dropout = spec.dropout if self.training else 0.0
        z = attention(
            q,
            k,
            v,
            pattern=spec.pattern,
            query=query,
            key=key,
            bias=None if self.score_bias is None else self.score_bias(ctx),
            scale=self.scale,
            softcap=spec.softcap,
            dropout=dropout,
            seed=int(torch.randint(2**31, ())) if dropout else 0,
            tap=self.score_tap(ctx),
        )
        return self.o_proj(self.tap(ctx, "z", z).flatten(-2))

    def add_state(self, state: State, max_len: int | None) -> None:
        """Give ``state`` this mixer's part: rolling where the pattern bounds how far a query reaches back."""
        spec, like = self.spec, self.k_proj.weight
        widths, reach = (spec.head_dim, spec.head_dim), spec.pattern.reach
        part: KVState
        if reach is None or (max_len is not None and max_len <= reach):
            part, reach = FullKV(state.batch_size, spec.n_kv_heads, widths, max_len, like), None
        else:
            part = RollingKV(state.batch_size, spec.n_kv_heads, widths, reach, like)
        state.add_keys(self.path, part, reach)


def _flops(spec: Attention, width: int, n_keys: int) -> int:
    maps = 2 * width * spec.head_dim * (2 * spec.n_heads + 2 * spec.n_kv_heads)
    return maps + 4 * n_keys * spec.n_heads * spec.head_dim


def _cases() -> list[Attention]:
    grouped = Attention(n_heads=4, n_kv_heads=2, head_dim=8, rotary=Rotary())
    return [
        Attention(n_heads=4, n_kv_heads=4, head_dim=8, qkv_bias=True, out_bias=True),
        Attention(n_heads=3, n_kv_heads=1, head_dim=10, rotary=Rotary()),
        grouped.replace(rotary=Rotary(dim=4), pattern=Window(size=4)),
        grouped.replace(softcap=5.0, scale=0.3),
        grouped.replace(rotary=None, score_bias=Alibi(slopes=alibi_slopes(4))),
        grouped.replace(qk_norm=RMSNorm()),
        grouped.replace(qkv_clip=0.7),
        grouped.replace(rotary=None, pattern=Full()),
    ]


register(Attention, module=AttentionModule, paper="arXiv:1706.03762 §3.2.2", cases=_cases, flops=_flops)
