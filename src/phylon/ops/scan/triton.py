"""The selective scan in Triton for GPUs: the state stays on the chip, the backward pass recomputes it chunk by chunk.

Mamba (arXiv:2312.00752), section 3.3. No T x D x N tensor: the first state of every chunk is kept, and a chunk has at
least N steps, so that they are B T D numbers at most, as many as ``x`` has. Besides there are the states of one chunk
while its gradients are computed, and the gradients of B and C by blocks of channels for some chunks at a time. All sums
are in one order. On CPUs only Triton's interpreter runs it.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from phylon.ops.backward import once
from phylon.ops.scan.call import ScanCall, cleared, kept, wide
from phylon.ops.triton import interpreted, unavailable

_CHUNK = 64
_PART = 16
"""Chunks of one launch of the backward pass."""
_NUMBERS = 512
"""Of the state, in one program: one warp holds 16 a thread."""
_LARGEST = 256


class ScanTriton:
    """fp32 arithmetic, forward and backward."""

    name = "triton"
    device = "cuda"

    def available(self) -> str | None:
        return unavailable()

    def supports(self, call: ScanCall) -> str | None:
        if not (call.x.is_cuda or (call.x.is_cpu and interpreted())):
            return f"it runs on GPUs, not on {call.x.device.type}"
        tensors = (call.x, call.dt, call.A, call.B, call.C, call.D)
        if any(x.dtype == torch.float64 for x in (*tensors, call.state) if x is not None):
            return "it computes in float32, not in float64"
        if call.A.shape[1] > _LARGEST:
            return f"a channel has more than {_LARGEST} states"
        if torch.compiler.is_compiling():
            return "torch.compile cannot see into it"
        return None

    def run(self, call: ScanCall) -> tuple[Tensor, Tensor]:
        x, dt, A, B, C, D = wide(call.x, call.dt, call.A, call.B, call.C, call.D)
        x, dt, B, C = (cleared(t, call.breaks.real) for t in (x, dt, B, C))
        h = x.new_zeros(len(x), *A.shape) if call.state is None else call.state.to(x.dtype)
        keep = kept(call.breaks.resets, x.dtype)
        y, h = _Scan.apply(*(t.contiguous() for t in (x, dt, A, B, C, D)), h, keep)
        return cleared(y, call.breaks.real).to(call.x.dtype), h


class _Scan(torch.autograd.Function):
    """``x``, ``dt`` (B, T, D), ``A`` (D, N), ``B``, ``C`` (B, T, N), ``D`` (D,), ``h`` (B, D, N), ``keep`` (B, T)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, h: Tensor, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        grid, options = _launch(x, A, keep)
        starts = x.new_empty(len(x), -(-x.shape[1] // options["CHUNK"]), *A.shape)
        starts[:, 0] = h
        y, last = torch.empty_like(x), torch.empty_like(h, memory_format=torch.contiguous_format)
        with torch.cuda.device_of(x):
            _kernels().forward[grid](x=x, dt=dt, a=A, b=B, c=C, d=D, starts=starts, y=y, last=last, **options)
        ctx.save_for_backward(x, dt, A, B, C, D, keep, starts)
        return y, last

    @staticmethod
    @once("scan backend 'triton'")
    def backward(ctx: Any, d_y: Tensor, d_last: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[bad-override]
        x, dt, A, B, C, D, keep, starts = ctx.saved_tensors
        (rows, tokens, _), (grid, options) = x.shape, _launch(x, A, keep)
        d_x, d_dt = torch.empty_like(x), torch.empty_like(x)
        d_a, d_h = x.new_zeros(rows, *A.shape), d_last.clone(memory_format=torch.contiguous_format)
        d_b, d_c, d_d = torch.empty_like(B), torch.empty_like(C), x.new_zeros(rows, len(D))
        length, chunks = options["CHUNK"], starts.shape[1]
        part = min(_PART, chunks) * length
        by_block = tuple(x.new_empty(grid[0] // rows, rows, part, A.shape[1]) for _ in range(2))
        states = x.new_empty(rows, length, *A.shape)
        inputs = {"x": x, "dt": dt, "a": A, "b": B, "c": C, "d": D, "starts": starts, "d_y": d_y.contiguous()}
        gradients = {"d_x": d_x, "d_dt": d_dt, "d_a": d_a, "d_b": by_block[0], "d_c": by_block[1], "d_d": d_d}
        with torch.cuda.device_of(x):
            for first in reversed(range(0, chunks, _PART)):
                last = min(first + _PART, chunks)
                _kernels().backward[grid](
                    **inputs, **gradients, **options, d_h=d_h, states=states, part=part, first=first, last=last
                )
                now = slice(first * length, min(last * length, tokens))
                for whole, made in zip((d_b, d_c), by_block, strict=True):
                    torch.sum(made[:, :, : now.stop - now.start], 0, out=whole[:, now])
        return d_x, d_dt, d_a.sum(0), d_b, d_c, d_d.sum(0), d_h, None


def _launch(x: Tensor, A: Tensor, keep: Tensor | None) -> tuple[tuple[int], dict[str, Any]]:
    """The grid, and what both kernels take."""
    width, size = A.shape
    states = 1 << (size - 1).bit_length()
    channels = min(max(1, _NUMBERS // states), 1 << (width - 1).bit_length())
    options = {
        "keep": x if keep is None else keep,
        "n_tokens": x.shape[1],
        "width": width,
        "size": size,
        "CHUNK": max(_CHUNK, states),
        "CHANNELS": channels,
        "STATES": states,
        "KEEP": keep is not None,
        "num_warps": 1,
    }
    return (len(x) * -(-width // channels),), options


def _kernels() -> Any:
    """The module of the kernels, which is slow to import."""
    return import_module("phylon.ops.scan.triton_kernels")
