"""Attention in C++ for CPUs: tiles in registers and caches, forward and backward, f32 and bf16, any pattern as a tile plan.

FlashAttention-2 (arXiv:2307.08691): no T x S tensor, the backward recomputes from the saved log-sum-exp. The sources are
the ``.h`` files beside this one; ``native.cpp`` is the interface. bf16 is computed in f32, and rounded when it is stored.
"""

import ctypes
from dataclasses import dataclass, replace
from pathlib import Path
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from phylon.ops.attention.bias import AlibiBias, BucketBias
from phylon.ops.attention.call import AttentionCall
from phylon.ops.attention.reference import Reference
from phylon.ops.native import Library
from phylon.patterns import Causal, Full, Pattern, Records, SymmetricWindow, Window

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_FAR = 2**40
_LAYOUT = Struct("=52q3d10q")
"""Of ``struct Call`` in ``layout.h``."""
_NO_VIEW = (0, 0, 0, 0)


class Native:
    """Tiles of 64 queries and 64 keys; only the tiles that the pattern keeps, in time and in memory."""

    name = "native"

    def available(self) -> str | None:
        return LIBRARY.reason()

    def supports(self, call: AttentionCall) -> str | None:
        if call.tap is not None:
            return "scores and weights are not visible"
        if call.q.device.type != "cpu":
            return f"it runs on CPUs, not on {call.q.device.type}"
        if call.q.dtype not in _DTYPES:
            return f"it computes float32 and bfloat16, not {str(call.q.dtype).removeprefix('torch.')}"
        if 0 in call.q.shape or 0 in call.v.shape or call.k.shape[1] == 0:
            return "an empty dimension"
        if call.bias is not None and not isinstance(call.bias, AlibiBias | BucketBias):
            return f"the score bias {type(call.bias).__name__} is not known to depend on distances alone"
        if call.query is not None or call.key is not None or _band(call.pattern) is None:
            return "no tile plan yet"
        if torch.compiler.is_compiling():
            return "torch.compile cannot see into it"
        return None

    def run(self, call: AttentionCall) -> Tensor:
        band = _band(call.pattern)
        assert band is not None
        bias = None if call.bias is None else _by_distance(call)
        options = _Options(
            scale=call.factor,
            softcap=call.softcap or 0.0,
            dropout=call.dropout,
            seed=call.seed & 0xFFFFFFFF,
            band=band,
            bias_first=1 - call.q.shape[1] if bias is None else _first_distance(call),
            threads=torch.get_num_threads(),
        )
        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (call.q, call.k, call.v))
        sink = None if call.sink is None else call.sink.float().contiguous()
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sink, bias)):
            return _Attention.apply(q, k, v, sink, bias, options)
        return _forward(q, k, v, sink, bias, options)[0]


@dataclass(frozen=True)
class _Options:
    """What a call says besides its tensors."""

    scale: float
    softcap: float
    dropout: float
    seed: int
    band: tuple[int, int]
    bias_first: int
    threads: int


class _Attention(torch.autograd.Function):
    """One node of the graph: keeps q, k, v, the output and the log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, bias: Tensor | None, options: _Options
    ) -> Tensor:
        out, lse = _forward(q, k, v, sink, bias, options)
        ctx.save_for_backward(q, k, v, sink, bias, out, lse)
        ctx.options = options
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, bias, out, lse = ctx.saved_tensors
        d_out = d_out if d_out.stride(3) == 1 else d_out.contiguous()
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
        rows, heads = q.shape[0], q.shape[2]
        d_sink = sink.new_empty(rows, heads) if ctx.needs_input_grad[3] else None
        d_bias = bias.new_empty(rows, *bias.shape) if ctx.needs_input_grad[4] else None
        gradients = (d_out, dq, dk, dv, torch.empty_like(lse), d_sink, d_bias)
        packed = _pack(q, k, v, out, lse, sink, bias, ctx.options, gradients)
        LIBRARY.attention_backward(packed, _DTYPES[q.dtype])
        return (
            dq,
            dk,
            dv,
            None if d_sink is None else d_sink.sum(0),
            None if d_bias is None else d_bias.sum(0),
            None,
        )


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, bias: Tensor | None, options: _Options
) -> tuple[Tensor, Tensor]:
    b, t, h, _ = q.shape
    out, lse = q.new_empty(b, t, h, v.shape[3]), torch.empty(b, h, t)
    LIBRARY.attention_forward(_pack(q, k, v, out, lse, sink, bias, options, None), _DTYPES[q.dtype])
    return out, lse


def _pack(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sink: Tensor | None,
    bias: Tensor | None,
    options: _Options,
    gradients: tuple[Any, ...] | None,
) -> bytes:
    """``struct Call``, field by field."""
    b, t, h, e = q.shape
    _, s, n_kv_heads, ev = v.shape
    if gradients is None:
        views, delta, d_sink, d_bias = (*_NO_VIEW * 4,), 0, 0, 0
    else:
        d_out, dq, dk, dv, delta, d_sink, d_bias = gradients
        views = (*_view(d_out), *_view(dq), *_view(dk), *_view(dv))
        delta, d_sink, d_bias = _address(delta), _address(d_sink), _address(d_bias)
    return _LAYOUT.pack(
        *(b, t, s, h, n_kv_heads, e, ev, options.threads),
        *_view(q),
        *_view(k),
        *_view(v),
        *_view(out),
        lse.data_ptr(),
        *views,
        *(delta, _address(sink), d_sink, _address(bias), d_bias),
        *(options.bias_first, 0 if bias is None else bias.shape[1], 0, 0, 1, 1),
        *(options.scale, options.softcap, options.dropout, options.seed, int(options.dropout * 2**32)),
        *options.band,
        *(1, 1, 0, 0, 0, 0),
    )


def _view(x: Tensor) -> tuple[int, int, int, int]:
    batch, token, head, _ = x.stride()
    return x.data_ptr(), batch, token, head


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _band(pattern: Pattern) -> tuple[int, int] | None:
    """The least and the greatest distance ``query - key`` that the pattern allows, where it is a band."""
    if isinstance(pattern, Causal):
        return 0, _FAR
    if isinstance(pattern, Window):
        return 0, pattern.size - 1
    if isinstance(pattern, SymmetricWindow):
        return -pattern.radius, pattern.radius
    return (-_FAR, _FAR) if isinstance(pattern, Full) else None


def _first_distance(call: AttentionCall) -> int:
    return 1 - call.q.shape[1]


def _by_distance(call: AttentionCall) -> Tensor:
    """The bias of every distance ``query - key`` from the first to the last that occurs: (H, distances), f32."""
    t, s = call.q.shape[1], call.k.shape[1]
    first, last = s - t - (s - 1), s - 1
    distance = Records(torch.arange(first, last + 1)[None])
    zero = Records(torch.zeros(1, 1, dtype=torch.int64))
    assert call.bias is not None
    return call.bias.scores(distance.as_queries(), zero.as_keys())[0, :, :, 0].float().contiguous()


def _check() -> str | None:
    """A few calls on awkward sizes against the reference, in both directions: ``None``, or what differs."""
    generator = torch.Generator().manual_seed(0)
    for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
        for t, s, e, ev, h, n_kv in ((1, 7, 8, 8, 2, 2), (100, 130, 32, 40, 2, 1), (130, 130, 64, 64, 1, 1)):
            q, k, v = (
                torch.randn(2, n, heads, width, generator=generator).to(dtype).requires_grad_()
                for n, heads, width in ((t, h, e), (s, n_kv, e), (s, n_kv, ev))
            )
            for pattern in (Full(), Causal(), Window(size=70)):
                call = AttentionCall(q=q, k=k, v=v, pattern=pattern)
                wide = replace(call, q=q.float(), k=k.float(), v=v.float())
                ours, theirs = Native().run(call), Reference().run(wide)
                weights = torch.randn(ours.shape, generator=generator)
                pairs = [(ours, theirs)]
                pairs += zip(
                    torch.autograd.grad((ours * weights).sum(), (q, k, v)),
                    torch.autograd.grad((theirs * weights).sum(), (q, k, v)),
                    strict=True,
                )
                for name, (mine, other) in zip(("output", "dq", "dk", "dv"), pairs, strict=True):
                    error = float((mine.float() - other.float()).detach().norm() / other.float().detach().norm())
                    if not error <= limit:
                        return f"{name} of {pattern} on {t} x {s} in {dtype} is off by {error:.1e}"
    return None


SOURCES = [
    Path(__file__).with_name(f) for f in ("native.cpp", "backward.h", "forward.h", "scores.h", "layout.h", "tile.h")
]
LIBRARY = Library(
    "phylon.ops.attention.native",
    SOURCES,
    {"attention_forward": [ctypes.c_char_p, ctypes.c_int64], "attention_backward": [ctypes.c_char_p, ctypes.c_int64]},
    _check,
)
