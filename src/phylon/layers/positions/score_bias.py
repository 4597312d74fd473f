"""Positions as a bias on the scores: ALiBi, T5's buckets, and the reference to a module that a stack shares."""

import torch
from torch import nn

from phylon.layers.context import Context
from phylon.layers.part import InitContext, Part
from phylon.ops.attention import AlibiBias, BucketBias
from phylon.spec.base import Mechanism, ScoreBias, Shared
from phylon.spec.errors import UserError, check_finite
from phylon.spec.registry import register


class Alibi(Mechanism, ScoreBias, frozen=True, kw_only=True):
    """``-slope_h * (query - key)`` on the scores of head h: no positions anywhere else.

    Press, Smith and Lewis (arXiv:2108.12409), section 3. ``slopes`` are numbers, one a head (``alibi_slopes`` gives the
    paper's); they stay fp32 whatever the model is cast to. Cost: O(1) a score.
    """

    slopes: tuple[float, ...]

    def __post_init__(self) -> None:
        for slope in self.slopes:
            check_finite("a slope", slope)


def alibi_slopes(n_heads: int) -> tuple[float, ...]:
    """The paper's slopes ``2^(-8 i / n)``; beyond a power of two, every second one of the next power."""
    if n_heads < 1:
        raise UserError(f"n_heads must be at least 1, got {n_heads}")
    power = 2 ** (n_heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    between = [2 ** (-8 * (i + 1) / (2 * power)) for i in range(2 * power)][::2]
    return tuple(slopes + between[: n_heads - power])


class SharedRef(Mechanism, ScoreBias, frozen=True, kw_only=True):
    """The bias module that the stack shares as ``name``; never a T x S tensor. arXiv:1910.10683, section 2.1."""

    name: str


class T5Bias(Mechanism, Shared, frozen=True, kw_only=True):
    """A learned bias per head and bucket of relative position, shared by all blocks of a stack.

    T5 (arXiv:1910.10683), section 2.1. Parameter ``weight`` (n_buckets, H). ``direction`` "both" tells earlier keys
    from later ones (encoder), "past" looks back only (decoder). Cost: O(1) a score.
    """

    n_heads: int
    n_buckets: int = 32
    max_distance: int = 128
    direction: str = "both"

    def __post_init__(self) -> None:
        if self.direction not in ("both", "past"):
            raise UserError(f"direction must be 'both' or 'past', got '{self.direction}'")
        if self.n_heads < 1:
            raise UserError(f"n_heads must be at least 1, got {self.n_heads}")
        exact = self.n_buckets // (4 if self.direction == "both" else 2)
        if exact < 1 or self.max_distance <= exact:
            raise UserError(f"n_buckets {self.n_buckets} does not fit max_distance {self.max_distance}")


class AlibiModule(Part):
    def __init__(self, spec: Alibi, n_heads: int) -> None:
        super().__init__()
        if len(spec.slopes) != n_heads:
            raise UserError(f"{len(spec.slopes)} ALiBi slopes do not fit {n_heads} heads")
        self.slopes = spec.slopes

    def forward(self, ctx: Context) -> AlibiBias:
        device = ctx.records.positions.device
        return ctx.memo(self.slopes, lambda: AlibiBias(torch.tensor(self.slopes, dtype=torch.float32, device=device)))


class SharedRefModule(Part):
    def __init__(self, spec: SharedRef, n_heads: int) -> None:
        super().__init__()
        self.name, self.n_heads = spec.name, n_heads

    def forward(self, ctx: Context) -> BucketBias:
        if self.name not in ctx.shared:
            raise UserError(
                f"{self.path}: the stack shares no '{self.name}' (it has {', '.join(ctx.shared) or 'none'})"
            )
        return ctx.shared[self.name](ctx)


class T5BiasModule(Part):
    def __init__(self, spec: T5Bias, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.n_buckets, spec.n_heads))

    def init_parameters(self, init: InitContext) -> None:
        init.draw(self.weight, "embed")

    def forward(self, ctx: Context) -> BucketBias:
        return BucketBias(self.weight, self.spec.max_distance, self.spec.direction == "both")


register(
    Alibi,
    module=AlibiModule,
    paper="arXiv:2108.12409 §3",
    cases=lambda: [Alibi(slopes=alibi_slopes(4)), Alibi(slopes=alibi_slopes(3))],
)
register(SharedRef, module=SharedRefModule, paper="arXiv:1910.10683 §2.1", cases=lambda: [SharedRef(name="rel_bias")])
register(
    T5Bias,
    module=T5BiasModule,
    paper="arXiv:1910.10683 §2.1",
    cases=lambda: [T5Bias(n_heads=4, n_buckets=8, max_distance=10, direction="past")],
    flops=lambda spec, width, n_keys: 0,
)
