"""Attention: one public function, a reference, and backends behind one dispatch."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from phylon.ops.attention.bias import AlibiBias, BucketBias
from phylon.ops.attention.call import AttentionCall, ScoreBias
from phylon.ops.attention.flex import Flex
from phylon.ops.attention.native import Native
from phylon.ops.attention.online import Online
from phylon.ops.attention.reference import Reference
from phylon.ops.attention.sdpa import Sdpa, plain_flag
from phylon.ops.attention.triton import Triton
from phylon.ops.dispatch import Dispatch, Reason
from phylon.patterns import Full, Pattern, Records

_FEW = 16
"""Queries below which a tile of ``triton`` would be mostly empty: a decoding step."""


def _first(call: AttentionCall) -> str | None:
    """On a GPU, ``triton`` wherever PyTorch's fused kernel would need a dense mask or cannot do the call.

    Not measured yet, since no GPU was at hand: ``benchmarks/attention/gpu.py`` measures it.
    """
    if not call.q.is_cuda or call.q.shape[1] < _FEW:
        return None
    fused = plain_flag(call) is not None and dispatch.backends["sdpa"].supports(call) is None
    return None if fused else "triton"


dispatch: Dispatch[AttentionCall] = Dispatch(
    "attention", [Native(), Sdpa(), Online(), Triton(), Flex(), Reference()], first=_first
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern | None = None,
    query: Records | None = None,
    key: Records | None = None,
    bias: ScoreBias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    tap: Callable[[str, Tensor], Tensor] | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attention of ``q`` (B, T, H, E) over ``k`` (B, S, K, E) and ``v`` (B, S, K, Ev): returns (B, T, H, Ev).

    arXiv:1706.03762, section 3.2.1; grouped heads: arXiv:2305.13245. ``scale`` defaults to ``E ** -0.5``. ``pattern``
    says who may look at whom (default: everybody); padding and foreign documents are out whenever ``query`` or ``key``
    carry segments. Without records, queries and keys are one document aligned bottom-right. A query that may see
    nothing yields zero, and zero gradient. ``backend`` forces one; if it refuses, ``UserError`` gives its reason.
    """
    call = AttentionCall(
        q=q,
        k=k,
        v=v,
        pattern=Full() if pattern is None else pattern,
        query=query,
        key=key,
        bias=bias,
        scale=scale,
        softcap=softcap,
        sink=sink,
        dropout=dropout,
        seed=seed,
        tap=tap,
    )
    return dispatch.pick(call, backend).run(call)


def explain(
    q: Tensor, k: Tensor, v: Tensor, *, pattern: Pattern | None = None, backend: str | None = None, **options: Any
) -> list[Reason]:
    """Which backend would run this call, and why each other one would not; the options are those of ``attention``."""
    call = AttentionCall(q=q, k=k, v=v, pattern=Full() if pattern is None else pattern, **options)
    return dispatch.explain(call, backend)


__all__ = ["AlibiBias", "AttentionCall", "BucketBias", "ScoreBias", "attention", "dispatch", "explain"]
