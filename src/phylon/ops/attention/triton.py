"""Attention in Triton for GPUs: FlashAttention-2 over the kept tiles of the plan, forward and backward, any pattern.

Dao (arXiv:2307.08691): no T x S tensor, the backward pass recomputes the weights from the saved log-sum-exp. Sums are
in fp32, in one order: no atomics, the same result every time. The kernels are in ``triton_kernels.py``, which is
imported by the first call that runs. On CPUs only Triton's interpreter runs them, for tests.
"""

from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phylon.ops.attention.bias import AlibiBias, BucketBias
from phylon.ops.attention.call import AttentionCall
from phylon.ops.attention.distances import distances, too_far
from phylon.ops.attention.plan import TilePlan, tile_plan
from phylon.ops.backward import once
from phylon.ops.triton import interpreted, unavailable

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDEST = 256
"""Beyond, the tiles of a program do not fit a GPU's shared memory."""
_TILE_BYTES = 2**15
"""Of one tile of keys and its values."""


class Triton:
    """Only the tiles that the pattern keeps; of ``block`` queries and keys, or as many as the widths allow."""

    name = "triton"
    device = "cuda"

    def __init__(self, block: int | None = None) -> None:
        self.block = block

    def available(self) -> str | None:
        return unavailable()

    def supports(self, call: AttentionCall) -> str | None:
        if call.tap is not None:
            return "scores and weights are not visible"
        if not (call.q.is_cuda or (call.q.is_cpu and interpreted())):
            return f"it runs on GPUs, not on {call.q.device.type}"
        if call.q.dtype not in _DTYPES:
            return f"it computes float32, bfloat16 and float16, not {str(call.q.dtype).removeprefix('torch.')}"
        if 0 in call.q.shape or 0 in call.k.shape or 0 in call.v.shape:
            return "an empty dimension"
        if max(call.q.shape[3], call.v.shape[3]) > _WIDEST:
            return f"heads are wider than {_WIDEST}"
        if call.bias is not None and not isinstance(call.bias, AlibiBias | BucketBias):
            return f"{type(call.bias).__name__} is not known to depend on distances alone"
        if torch.compiler.is_compiling():
            return "torch.compile cannot see into it"
        return too_far(call)

    def run(self, call: AttentionCall) -> Tensor:
        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (call.q, call.k, call.v))
        sink = None if call.sink is None else call.sink.float().contiguous()
        parameter, bias = _bias(call)
        block = self.block or _block(call)
        setting = _Setting(call.factor, call.softcap, call.dropout, call.seed, tile_plan(call, block, block), bias)
        return _Attention.apply(q, k, v, sink, parameter, setting)


class _Bias(NamedTuple):
    """A bias as ``parameter[head, kinds[d]] * factors[d]`` with ``d = query - key - first``, or at the nearer end."""

    first: int
    kinds: Tensor
    factors: Tensor
    query: Tensor
    key: Tensor


class _Setting(NamedTuple):
    """What a call says besides its tensors."""

    scale: float
    softcap: float | None
    dropout: float
    seed: int
    plan: TilePlan
    bias: _Bias | None


class _Attention(torch.autograd.Function):
    """One node of the graph: keeps q, k, v, the output and the log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, parameter: Tensor | None, setting: _Setting
    ) -> Tensor:
        kernels, (b, t, h, _), ev = _kernels(), q.shape, v.shape[3]
        out, lse = q.new_empty(b, t, h, ev), q.new_empty(b, h, t, dtype=torch.float32)
        options = _options(q, k, v, parameter, setting, columns=False)
        grid = (setting.plan.n_query_tiles * b * h,)
        with torch.cuda.device_of(q):
            kernels.forward[grid](out=out, lse=lse, sink=_or(sink, lse), SINK=sink is not None, **options)
        ctx.save_for_backward(q, k, v, sink, parameter, out, lse)
        ctx.setting = setting
        return out

    @staticmethod
    @once("attention backend 'triton'")
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[bad-override]
        kernels = _kernels()
        q, k, v, sink, parameter, out, lse = ctx.saved_tensors
        setting, (b, _, h, _) = ctx.setting, q.shape
        saved = {"lse": lse, "d_out": d_out.contiguous(), "delta": torch.empty_like(lse)}
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        learns = setting.bias is not None and ctx.needs_input_grad[4]
        kinds = _power(parameter.shape[1]) if learns else 1
        d_bias = lse.new_empty((b, h, setting.plan.n_query_tiles, kinds) if learns else 1)
        tables = (lse, lse) if setting.bias is None else (setting.bias.kinds, setting.bias.factors)
        with torch.cuda.device_of(q):
            # First, since it writes delta, which the other one reads.
            kernels.backward_queries[(setting.plan.n_query_tiles * b * h,)](
                out=out,
                dq=dq,
                d_bias=d_bias,
                kinds=tables[0],
                factors=tables[1],
                KINDS=kinds,
                **saved,
                **_options(q, k, v, parameter, setting, columns=False),
            )
            if any(ctx.needs_input_grad[1:3]):
                kernels.backward_keys[(setting.plan.n_key_tiles * b * k.shape[2],)](
                    dk=dk, dv=dv, **saved, **_options(q, k, v, parameter, setting, columns=True)
                )
        d_sink = None
        if sink is not None and ctx.needs_input_grad[3]:
            # Its weight in every row times what the output lost to it; delta is 0 where a row sees nothing.
            d_sink = -(torch.exp(sink[:, None] - lse) * saved["delta"]).sum((0, 2))
        d_parameter = d_bias.sum((0, 2))[:, : parameter.shape[1]] if learns else None
        return dq, dk, dv, d_sink, d_parameter, None


def _kernels() -> Any:
    """The module of the kernels, which is slow to import."""
    return import_module("phylon.ops.attention.triton_kernels")


def _options(
    q: Tensor, k: Tensor, v: Tensor, parameter: Tensor | None, setting: _Setting, *, columns: bool
) -> dict[str, Any]:
    """What all kernels take; ``columns``: the plan by key tiles."""
    plan, bias = setting.plan, setting.bias
    options: dict[str, Any] = {"q": q, "k": k, "v": v}
    for name, x in (("q", q), ("k", k), ("v", v)):
        options |= {f"{name}_{part}": x.stride(d) for d, part in enumerate(("batch", "token", "head"))}
    starts, tiles, places = plan.columns if columns else (plan.row_starts, plan.key_tiles, plan.masks)
    unseen = plan.unseen
    table = q if parameter is None or bias is None else parameter[:, bias.kinds] * bias.factors
    return options | {
        "n_heads": q.shape[2],
        "n_groups": q.shape[2] // k.shape[2],
        "n_queries": q.shape[1],
        "n_keys": k.shape[1],
        "width": q.shape[3],
        "value_width": v.shape[3],
        "starts": starts,
        "tiles": tiles,
        "places": places,
        "bits": plan.bits,
        "unseen": plan.bits if unseen is None else unseen.view(torch.uint8),
        "map_batch": plan.heads if plan.batch > 1 else 0,
        "map_head": 1 if plan.heads > 1 else 0,
        "bias": table,
        "n_bias": table.shape[-1],
        "bias_first": 0 if bias is None else bias.first,
        "query_positions": starts if bias is None else bias.query,
        "key_positions": starts if bias is None else bias.key,
        "query_batch": 0 if bias is None or len(bias.query) == 1 else bias.query.shape[1],
        "key_batch": 0 if bias is None or len(bias.key) == 1 else bias.key.shape[1],
        "scale": setting.scale,
        "cap": setting.softcap or 0.0,
        "seed": setting.seed & 0xFFFFFFFF,
        "threshold": int(setting.dropout * 2**32),
        "keep_factor": 1 / (1 - setting.dropout),
        "BLOCK_Q": plan.block_q,
        "BLOCK_K": plan.block_k,
        "E": _power(q.shape[3]),
        "EV": _power(v.shape[3]),
        "BIAS": bias is not None,
        "CAP": setting.softcap is not None,
        "DROPOUT": setting.dropout > 0,
        "UNSEEN": unseen is not None,
        "num_warps": 4 if max(q.shape[3], v.shape[3]) <= 64 else 8,
        "num_stages": 2,
    }


def _bias(call: AttentionCall) -> tuple[Tensor | None, _Bias | None]:
    """The bias's parameters (H, kinds) in fp32, with their graph, and how a distance reads them."""
    bias = call.bias
    if bias is None:
        return None, None
    assert isinstance(bias, AlibiBias | BucketBias)
    query, key = (side.positions.int().contiguous() for side in call.records())
    first, last = distances(call)
    distance = torch.arange(first, last + 1, device=call.q.device)
    if isinstance(bias, AlibiBias):
        kinds, factors = torch.zeros_like(distance), -distance.abs().float()
        return bias.slopes[:, None].float(), _Bias(first, kinds.int(), factors, query, key)
    kinds = bias.buckets(-distance)
    return bias.table.T.float(), _Bias(first, kinds.int(), torch.ones_like(kinds, dtype=torch.float32), query, key)


def _block(call: AttentionCall) -> int:
    """64, fewer for wide heads; 32 in fp32, whose products are unrolled: 64 would compile for a minute."""
    row = (_power(call.q.shape[3]) + _power(call.v.shape[3])) * call.q.element_size()
    fits = max(16, min(128 // call.q.element_size(), _TILE_BYTES // row))
    return 1 << (fits.bit_length() - 1)


def _power(width: int) -> int:
    """What a tile's side is filled up to: a power of two, at least a matrix unit's."""
    return max(16, 1 << (width - 1).bit_length())


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    return other if x is None else x
