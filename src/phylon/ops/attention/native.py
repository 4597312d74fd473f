"""Attention in C++ for CPUs: tiles in registers and caches, both directions, f32 and bf16, any pattern as a tile plan.

FlashAttention-2 (arXiv:2307.08691): no T x S tensor, the backward pass recomputes from the saved log-sum-exp. The
sources are the ``.h`` files beside this one, ``native.cpp`` is the interface. bf16 is multiplied on AMX where the
machine has it, else in f32; sums are in f32 and rounded when they are stored.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phylon.ops.attention.bias import AlibiBias, BucketBias
from phylon.ops.attention.call import AttentionCall
from phylon.ops.attention.distances import distances, too_far
from phylon.ops.attention.native_check import check
from phylon.ops.attention.plan import TilePlan, tile_plan
from phylon.ops.backward import once
from phylon.ops.native import Library, floats, pointer, strided
from phylon.ops.native.amx import AMX, EMULATED, PLAIN
from phylon.patterns import Causal, Full, Pattern, SymmetricWindow, Window

_TILE = 64
_FEW = 16
"""Up to so many queries and heads that share a key head, each key is read once for all of them."""
_FAR = 2**40
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_LAYOUT = Struct("=52q3d18q")
"""Of ``struct Call`` in ``layout.h``."""


class Native:
    """Tiles of 64 queries and 64 keys; only the tiles that the pattern keeps, in time and in memory."""

    name = "native"

    def __init__(self, library: Library | None = None) -> None:
        self._own = library

    @property
    def library(self) -> Library:
        return self._own or LIBRARY

    def available(self) -> str | None:
        return self.library.reason()

    def note(self) -> str:
        """What bf16 is multiplied on."""
        form = self.library.form
        why = f" (AMX: {self.library.against(AMX)})" if form == PLAIN else ""
        return f"bf16 products: {form.name}{why}"

    def supports(self, call: AttentionCall) -> str | None:
        if call.tap is not None:
            return "scores and weights are not visible"
        if not call.q.is_cpu:
            return f"it runs on CPUs, not on {call.q.device.type}"
        if call.q.dtype not in _DTYPES:
            return f"it computes float32 and bfloat16, not {str(call.q.dtype).removeprefix('torch.')}"
        if 0 in call.q.shape or 0 in call.k.shape or 0 in call.v.shape:
            return "an empty dimension"
        if call.bias is not None and not isinstance(call.bias, AlibiBias | BucketBias):
            return f"{type(call.bias).__name__} is not known to depend on distances alone"
        if torch.compiler.is_compiling():
            return "torch.compile cannot see into it"
        return None if _is_few(call) else too_far(call)

    def run(self, call: AttentionCall) -> Tensor:
        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (call.q, call.k, call.v))
        sink = None if call.sink is None else call.sink.float().contiguous()
        if _is_few(call):
            return _few(self.library, q, k, v, sink, call)
        bias, setting = _setting(call)
        if torch.is_grad_enabled() and _learns(q, k, v, sink, bias):
            return _Attention.apply(self.library, setting, q, k, v, sink, bias)
        return _forward(self.library, setting, q, k, v, sink, bias)[0]


class _Setting(NamedTuple):
    """What a call says besides its tensors. ``band``: the least and the greatest visible distance ``query - key``."""

    scale: float
    softcap: float
    dropout: float
    seed: int
    threads: int
    band: tuple[int, int]
    plan: TilePlan | None = None
    bias_first: int = 0
    query_positions: Tensor | None = None
    key_positions: Tensor | None = None


class _Attention(torch.autograd.Function):
    """One node of the graph: keeps q, k, v, the output and the log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        library: Library,
        setting: _Setting,
        *tensors: Any,
    ) -> Tensor:
        out, lse = _forward(library, setting, *tensors)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.library, ctx.setting = library, setting
        return out

    @staticmethod
    @once("attention backend 'native'")
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[bad-override]
        q, k, v, sink, bias, out, lse = ctx.saved_tensors
        d_out = d_out if d_out.stride(3) == 1 else d_out.contiguous()
        dq, dk, dv, delta = _rows_like(q), _rows_like(k), _rows_like(v), torch.empty_like(lse)
        d_sink = sink.new_empty(len(q), len(sink)) if ctx.needs_input_grad[5] else None
        d_bias = bias.new_empty(len(q), *bias.shape) if ctx.needs_input_grad[6] else None
        (rows, heads), strips = (len(q), q.shape[2]), 0 if bias is None else bias.numel()
        views = ((d_out, out), (dq, q), (dk, k), (dv, v))
        gradients = (
            *(part for made, like in views for part in strided(made, like.shape, q.dtype)),
            *(_address(delta, lse.numel()), _address(sink, heads), _address(d_sink, rows * heads)),
            *(_address(bias, strips), _address(d_bias, rows * strips)),
        )
        packed = _pack(q, k, v, out, lse, gradients, bias, ctx.setting)
        ctx.library.attention_backward(packed, _DTYPES[q.dtype])
        sums = (None if x is None else x.sum(0) for x in (d_sink, d_bias))
        return None, None, dq, dk, dv, *sums


def _forward(
    library: Library, setting: _Setting, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    b, t, h, _ = q.shape
    out, lse = (
        torch.empty((b, t, h, v.shape[3]), dtype=q.dtype, device="cpu"),
        floats(b, h, t),
    )
    gradients = (*_NONE * 17, _address(sink, h), 0, _address(bias, 0 if bias is None else h * bias.shape[1]), 0)
    library.attention_forward(_pack(q, k, v, out, lse, gradients, bias, setting), _DTYPES[q.dtype])
    return out, lse


def _few(library: Library, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, call: AttentionCall) -> Tensor:
    """A few queries without a gradient: masks and biases of all pairs are small."""
    b, t, h, _ = q.shape
    out = torch.empty((b, t, h, v.shape[3]), dtype=q.dtype, device="cpu")
    band = _aligned_band(call)
    mask = None if band is not None else call.mask()
    scores = call.bias_scores()
    dense = (0,) * 8
    if mask is not None or scores is not None:
        shape = (b, h, t, k.shape[1])
        mask = None if mask is None else mask.expand(shape).contiguous() if mask.stride(-1) != 1 else mask.expand(shape)
        scores = None if scores is None else scores.expand(shape).float()
        scores = scores if scores is None or scores.stride(3) == 1 else scores.contiguous()
        dense = (*_pairs(mask, shape, torch.bool), *_pairs(scores, shape, torch.float32))
    setting = _Setting(call.factor, call.softcap or 0.0, 0.0, 0, torch.get_num_threads(), band or (-_FAR, _FAR))
    gradients = (*_NONE * 17, _address(sink, h), 0, 0, 0)
    library.attention_few(_pack(q, k, v, out, None, gradients, None, setting, dense), _DTYPES[q.dtype])
    return out


_NONE = (0,)


def _pack(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    gradients: tuple[int, ...],
    bias: Tensor | None,
    setting: _Setting,
    dense: tuple[int, ...] = (0,) * 8,
) -> bytes:
    """``struct Call``, field by field."""
    b, t, h, e = q.shape
    _, s, n_kv_heads, ev = v.shape
    scale, softcap, dropout, seed, threads, band, plan, bias_first, query, key = setting
    tiles: tuple[int, ...] = (1, 1, 0, 0, 0, 0)
    if plan is not None:
        kept, lists = len(plan.key_tiles), (plan.row_starts, plan.key_tiles, plan.masks)
        lengths = (plan.batch * plan.heads * plan.n_query_tiles + 1, kept, kept)
        addresses = (_address(x, n, torch.int32) for x, n in zip(lists, lengths, strict=True))
        tiles = (plan.batch, plan.heads, *addresses, _address(plan.bits, plan.bits.numel(), torch.uint8))
    views = ((q, (b, t, h, e)), (k, (b, s, n_kv_heads, e)), (v, (b, s, n_kv_heads, ev)), (out, (b, t, h, ev)))
    rows = tuple(1 if positions is None else len(positions) for positions in (query, key))
    return _LAYOUT.pack(
        *(b, t, s, h, n_kv_heads, e, ev, threads),
        *(part for view, shape in views for part in strided(view, shape, q.dtype)),
        *(_address(lse, b * h * t), *gradients),
        *(bias_first, 0 if bias is None else bias.shape[1]),
        *(_address(query, rows[0] * t, torch.int64), _address(key, rows[1] * s, torch.int64), *rows),
        *(scale, softcap, dropout, seed, int(dropout * 2**32), *band, *tiles, *dense),
    )


def _rows_like(x: Tensor) -> Tensor:
    """Room for a gradient in rows side by side: ``empty_like`` an overlapping view keeps the order of its strides."""
    made = torch.empty_like(x)
    return made if made.stride(3) == 1 else torch.empty(x.shape, dtype=x.dtype, device="cpu")


def _pairs(x: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Address and strides of (B, H, T, S)."""
    return (0,) * 4 if x is None else strided(x, shape, dtype)


def _address(x: Tensor | None, numbers: int, dtype: torch.dtype = torch.float32) -> int:
    return pointer(x, numbers, dtype) or 0


def _learns(*tensors: Any) -> bool:
    return any(x is not None and x.requires_grad for x in tensors)


def _is_few(call: AttentionCall) -> bool:
    """Whether the call is a decoding step, which keeps nothing for a backward pass."""
    if call.q.shape[1] * (call.q.shape[2] // call.k.shape[2]) > _FEW or call.dropout > 0:
        return False
    if not torch.is_grad_enabled():
        return True
    bias = None if call.bias is None else call.bias_scores()
    return not _learns(call.q, call.k, call.v, call.sink, bias)


def _setting(call: AttentionCall) -> tuple[Tensor | None, _Setting]:
    """The bias by distance, and the rest of the call."""
    band = _aligned_band(call)
    plan = None if band is not None else tile_plan(call, _TILE, _TILE)
    bias, first, query, key = None, 0, None, None
    if call.bias is not None:
        first, last = distances(call)
        if call.query is not None or call.key is not None:
            query, key = (side.positions.to(torch.int64).contiguous() for side in call.records())
        assert isinstance(call.bias, AlibiBias | BucketBias)
        bias = call.bias.by_distance(torch.arange(first, last + 1)).float()
        bias = bias.expand(call.q.shape[2], -1).contiguous()
    seed, threads = call.seed & 0xFFFFFFFF, torch.get_num_threads()
    rest = (band or (-_FAR, _FAR), plan, first, query, key)
    return bias, _Setting(call.factor, call.softcap or 0.0, call.dropout, seed, threads, *rest)


def _aligned_band(call: AttentionCall) -> tuple[int, int] | None:
    """The visible distances ``query - key`` where that is all that counts, and positions are indices."""
    return _band(call.pattern) if call.query is None and call.key is None else None


def _band(pattern: Pattern) -> tuple[int, int] | None:
    if isinstance(pattern, Causal):
        return 0, _FAR
    if isinstance(pattern, Window):
        return 0, pattern.size - 1
    if isinstance(pattern, SymmetricWindow):
        return -pattern.radius, pattern.radius
    return (-_FAR, _FAR) if isinstance(pattern, Full) else None


def _checked() -> str | None:
    return check(Native())


_NAMES = (
    "native.cpp",
    "backward.h",
    "few.h",
    "forward.h",
    "widened.h",
    "paired.h",
    "amx.h",
    "scores.h",
    "layout.h",
    "native_check.py",
)
_SOURCES = [*(Path(__file__).with_name(name) for name in _NAMES), Path(__file__).parents[1] / "native" / "tile.h"]
_CALL = [ctypes.c_char_p, ctypes.c_int64]
_FUNCTIONS: dict[str, Sequence[Any]] = dict.fromkeys(
    ("attention_forward", "attention_backward", "attention_few"), _CALL
)
LIBRARY = Library("phylon.ops.attention.native", _SOURCES, _FUNCTIONS, _checked, forms=(EMULATED, AMX, PLAIN))
"""C++ kernels: compiled by the machine's own compiler, beside the run, and used once they are checked."""
