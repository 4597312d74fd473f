"""Multi-head latent attention: keys and values are linear maps of one small latent, which is all that is kept."""

import torch
from torch import Tensor

from phylon.layers.context import Context
from phylon.layers.norms import RMSNorm
from phylon.layers.part import Linear, Part, is_map
from phylon.layers.positions.rotary import Rotary, Rotation
from phylon.layers.state import FullKV, KVState, RollingKV, State
from phylon.ops.attention import attention
from phylon.patterns import Causal, Pattern, Records, Window
from phylon.spec.base import Mechanism, Mixer, Norm
from phylon.spec.errors import UserError, check_finite, check_rate
from phylon.spec.registry import build, register


class MLA(Mechanism, Mixer, frozen=True, kw_only=True, tag="mla"):
    """Attention whose keys and values come from a latent ``c = norm(x W_a)``; a small key, shared by heads, rotates.

    DeepSeek-V2 (arXiv:2405.04434), section 2.1, equations 9 to 19; the same in DeepSeek-V3 (arXiv:2412.19437), 2.1.1.
    x (B, T, D); c (B, T, r), ``r = kv_lora_rank``; a head's query and key are ``qk_nope_head_dim`` (n) features that do
    not rotate and ``qk_rope_head_dim`` (R) that do, of the key the same for all heads; values are ``v_head_dim`` (v)
    wide. Queries come from a latent of their own, or straight from x where ``q_lora_rank`` is ``None``. ``norm`` is
    that of both latents; ``bias`` says whether the maps to latents and shared key, and the map out, have biases.
    ``scale`` defaults to ``(n + R) ** -0.5``. The state keeps c and the turned shared key: r + R numbers a token.

    Two forms give the same: keys and values expanded from the latents, 2 S H r (n + v) more for S keys, or *absorbed*
    (section 2.1.2): the maps from the latent move into the query and behind the sum, and all heads attend over c
    itself, as multi-query attention of width r + R. Steps and short chunks onto a state take the absorbed form.
    """

    label = "attn"

    n_heads: int
    kv_lora_rank: int
    q_lora_rank: int | None = None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rotary: Rotation = Rotary()
    norm: Norm = RMSNorm()
    pattern: Pattern = Causal()
    bias: bool = False
    scale: float | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        sizes = ("n_heads", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        for name in sizes:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")
        self.rotary.check(self.qk_rope_head_dim)
        check_finite("scale", self.scale)
        if self.pattern.heads not in (1, self.n_heads):
            raise UserError(f"the pattern is for {self.pattern.heads} heads, the mixer has {self.n_heads}")
        check_rate("dropout", self.dropout)

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def streams(self) -> str | None:
        if self.pattern.streams:
            return None
        return f"its pattern {type(self.pattern).__name__} lets tokens look ahead"


class MLAModule(Part):
    def __init__(self, spec: MLA, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        heads, rank, q_rank = spec.n_heads, spec.kv_lora_rank, spec.q_lora_rank
        if q_rank is None:
            self.q_proj = Linear(d_model, heads * spec.qk_head_dim, bias=False)
        else:
            self.q_a_proj = Linear(d_model, q_rank, bias=spec.bias)
            self.q_a_norm = build(spec.norm, q_rank)
            self.q_b_proj = Linear(q_rank, heads * spec.qk_head_dim, bias=False)
        self.kv_a_proj = Linear(d_model, rank, bias=spec.bias)
        self.kv_a_norm = build(spec.norm, rank)
        self.k_rope_proj = Linear(d_model, spec.qk_rope_head_dim, bias=spec.bias)
        self.k_b_proj = Linear(rank, heads * spec.qk_nope_head_dim, bias=False)
        self.v_b_proj = Linear(rank, heads * spec.v_head_dim, bias=False)
        self.o_proj = Linear(heads * spec.v_head_dim, d_model, bias=spec.bias, role="out")
        self.scale = spec.qk_head_dim**-0.5 if spec.scale is None else spec.scale

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        spec = self.spec
        q = self.q_proj(x) if spec.q_lora_rank is None else self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        q_nope, q_rope = q.unflatten(-1, (spec.n_heads, -1)).split([spec.qk_nope_head_dim, spec.qk_rope_head_dim], -1)
        q_rope, k_rope = (spec.rotary.turn(t, ctx) for t in (q_rope, self.k_rope_proj(x)[:, :, None]))
        # Under autocast a norm answers in fp32.
        c = self.kv_a_norm(self.kv_a_proj(x))[:, :, None].to(k_rope.dtype)
        query: Records | None = None if ctx.aligned else ctx.records
        key = query
        if ctx.state is not None:
            part = ctx.state.parts[self.path]
            assert isinstance(part, KVState)
            c, k_rope, key = part.append(c, k_rope, ctx.state)
            query = None if key is None else ctx.records
            maps = ctx.taps is None and is_map(self.k_b_proj) and is_map(self.v_b_proj)
            if maps and self.absorbing_pays(x.shape[1], c.shape[1]):
                return self.o_proj(self.absorbed(q_nope, q_rope, c, k_rope, query, key).flatten(-2))
        z = self.expanded(q_nope, q_rope, c, k_rope, query, key, ctx)
        return self.o_proj(self.tap(ctx, "z", z).flatten(-2))

    def absorbing_pays(self, n_queries: int, n_keys: int) -> bool:
        """Whether the absorbed form takes fewer multiplications; it does for steps and short chunks."""
        spec, rank = self.spec, self.spec.kv_lora_rank
        maps, width = rank * (spec.qk_nope_head_dim + spec.v_head_dim), spec.qk_head_dim + spec.v_head_dim
        absorbed = n_queries * (maps + n_keys * (2 * rank + spec.qk_rope_head_dim))
        return absorbed < n_keys * (maps + n_queries * width)

    def expanded(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        c: Tensor,
        k_rope: Tensor,
        query: Records | None,
        key: Records | None,
        ctx: Context,
    ) -> Tensor:
        """(B, T, H, v): every key's latent c (B, S, 1, r) becomes keys and values of all heads."""
        spec = self.spec
        k_nope = self.k_b_proj(c[:, :, 0]).unflatten(-1, (spec.n_heads, spec.qk_nope_head_dim))
        k = torch.cat([k_nope, k_rope.expand(-1, -1, spec.n_heads, -1)], -1)
        v = self.v_b_proj(c[:, :, 0]).unflatten(-1, (spec.n_heads, spec.v_head_dim))
        q = self.tap(ctx, "q", torch.cat([q_nope, q_rope], -1))
        dropout = spec.dropout if self.training else 0.0
        return attention(
            q,
            self.tap(ctx, "k", k),
            self.tap(ctx, "v", v),
            pattern=spec.pattern,
            query=query,
            key=key,
            scale=self.scale,
            dropout=dropout,
            seed=int(torch.randint(2**31, ())) if dropout else 0,
            tap=self.score_tap(ctx),
        )

    def absorbed(
        self, q_nope: Tensor, q_rope: Tensor, c: Tensor, k_rope: Tensor, query: Records | None, key: Records | None
    ) -> Tensor:
        """(B, T, H, v): ``q_nope W_k`` meets the latents themselves, ``W_v`` follows their sum."""
        spec = self.spec
        w_k = self.k_b_proj.weight.unflatten(0, (spec.n_heads, spec.qk_nope_head_dim))
        w_v = self.v_b_proj.weight.unflatten(0, (spec.n_heads, spec.v_head_dim))
        q_latent = torch.einsum("bthn,hnr->bthr", q_nope, w_k)
        z = attention(
            torch.cat([q_latent, q_rope], -1),
            torch.cat([c, k_rope], -1),
            c,
            pattern=spec.pattern,
            query=query,
            key=key,
            scale=self.scale,
        )
        return torch.einsum("bthr,hvr->bthv", z, w_v)

    def add_state(self, state: State, max_len: int | None) -> None:
        """Latents and shared keys: all of them, or the last window where the pattern bounds how far a query reaches."""
        spec, like = self.spec, self.kv_a_proj.weight
        widths, reach = (spec.kv_lora_rank, spec.qk_rope_head_dim), spec.pattern.reach
        part: KVState
        if reach is None or (max_len is not None and max_len <= reach):
            part, reach = FullKV(state.batch_size, 1, widths, max_len, like), None
        else:
            part = RollingKV(state.batch_size, 1, widths, reach, like)
        state.add_keys(self.path, part, reach)


def _flops(spec: MLA, width: int, n_keys: int) -> int:
    """The expanded form of a whole pass."""
    heads, rank, q_rank = spec.n_heads, spec.kv_lora_rank, spec.q_lora_rank
    queries = width * heads * spec.qk_head_dim if q_rank is None else q_rank * (width + heads * spec.qk_head_dim)
    latents = width * (rank + spec.qk_rope_head_dim) + rank * heads * (spec.qk_nope_head_dim + spec.v_head_dim)
    maps = queries + latents + heads * spec.v_head_dim * width
    return 2 * maps + 2 * n_keys * heads * (spec.qk_head_dim + spec.v_head_dim)


def _cases() -> list[MLA]:
    plain = MLA(n_heads=3, kv_lora_rank=9, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=7)
    return [
        plain,
        plain.replace(q_lora_rank=10, bias=True, scale=0.4, kv_lora_rank=24),
        plain.replace(pattern=Window(size=4)),
    ]


register(MLA, module=MLAModule, paper="arXiv:2405.04434 §2.1", cases=_cases, flops=_flops)
