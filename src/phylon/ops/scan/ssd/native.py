"""Mamba-2's scan in C++ (``native.cpp``), forward and backward: fp32 inside, fp32 or bf16 outside."""

from ctypes import POINTER, Structure, byref, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phylon.ops.backward import once
from phylon.ops.native import Library, floats, pointer, strided
from phylon.ops.scan.call import SSDCall
from phylon.ops.scan.native import dense_rows, in_fp32, masks_of, refusal_of, target_of

_BLOCK, _TASKS = 4, 8
"""A thread takes up to 4 heads at once, which share the products of B and C, unless that leaves fewer than 8 pieces."""


class _View(Structure):
    """``View`` in the source: (B, T, heads, width), the last dimension contiguous."""

    _fields_ = (("data", c_void_p), ("row", c_int64), ("step", c_int64), ("head", c_int64), ("half", c_int64))

    @classmethod
    def of(cls, tensor: Tensor, shape: tuple[int, ...]) -> "_View":
        half = tensor.dtype is torch.bfloat16
        return cls(*strided(tensor, shape, torch.bfloat16 if half else torch.float32), half)


class _Scan(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("batch", "length", "heads", "groups", "width", "size", "block", "threads")),
        *((name, _View) for name in ("x", "dt", "B", "C")),
        *((name, c_void_p) for name in ("A", "D", "h0", "resets", "real")),
    )


class _Gradients(Structure):
    _fields_ = (
        *((name, _View) for name in ("y", "x", "dt")),
        *((name, c_void_p) for name in ("h", "B", "C", "A", "D", "h0", "starts")),
    )


class SSDNative:
    """C++ on CPUs, for fp32 and bf16; wider inputs keep their width elsewhere."""

    name = "native"

    def available(self) -> str | None:
        return LIBRARY.reason()

    def supports(self, call: SSDCall) -> str | None:
        return refusal_of((call.x, call.dt, call.B, call.C), (call.A, call.D, call.state))

    def run(self, call: SSDCall) -> tuple[Tensor, Tensor]:
        x, dt, B, C = (dense_rows(t) for t in (call.x, call.dt, call.B, call.C))
        A, D, h = call.A.float().contiguous(), call.D.float().contiguous(), in_fp32(call.state)
        tensors = (x, dt, A, B, C, D, h, *masks_of(call))
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            return _NativeSSD.apply(*tensors)
        y, last = torch.empty(x.shape, dtype=x.dtype, device="cpu"), target_of(call.into, h)
        last = _states(x, B) if last is None else last
        LIBRARY.ssd_forward(byref(_scan(*tensors)), byref(_View.of(y, x.shape)), _address(last, x, B), None)
        return y, last


def _states(x: Tensor, B: Tensor) -> Tensor:
    return floats(len(x), *x.shape[2:], B.shape[3])


def _address(states: Tensor | None, x: Tensor, B: Tensor) -> int | None:
    return pointer(states, x[:, 0].numel() * B.shape[3])


class _NativeSSD(torch.autograd.Function):
    """``x`` (B, T, H, P), ``dt`` (B, T, H), ``A``, ``D`` (H,), ``B``, ``C`` (B, T, G, N), ``h`` (B, H, P, N)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor,
        h: Tensor | None,
        resets: Tensor | None,
        real: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        call = _scan(x, dt, A, B, C, D, h, resets, real)
        y, last = torch.empty(x.shape, dtype=x.dtype, device="cpu"), _states(x, B)
        starts = floats(LIBRARY.ssd_starts(byref(call)))
        ctx.save_for_backward(x, dt, A, B, C, D, h, resets, real, starts)
        ctx.set_materialize_grads(False)
        LIBRARY.ssd_forward(byref(call), byref(_View.of(y, x.shape)), last.data_ptr(), starts.data_ptr())
        return y, last

    @staticmethod
    @once("ssd backend 'native'")
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        *tensors, starts = ctx.saved_tensors
        x, dt, _, B, C, _, h, *_ = tensors
        call = _scan(*tensors)
        grad_y = x.new_zeros(x.shape) if grad_outputs[0] is None else dense_rows(grad_outputs[0])
        grad_last = None if grad_outputs[1] is None else grad_outputs[1].contiguous()
        grad_x, grad_dt = (torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in (x, dt))
        blocks = -(-(x.shape[2] // B.shape[2]) // call.block)
        grad_B, grad_C = (floats(blocks, *B.shape) for _ in range(2))
        grad_A, grad_D = (floats(len(x), x.shape[2]) for _ in range(2))
        grad_h = _states(x, B)
        gradients = _Gradients(
            *(_View.of(t, x.shape) for t in (grad_y, grad_x)),
            *(_View.of(grad_dt[..., None], (*dt.shape, 1)), _address(grad_last, x, B)),
            *(t.data_ptr() for t in (grad_B, grad_C, grad_A, grad_D)),
            *(_address(grad_h, x, B), pointer(starts, LIBRARY.ssd_starts(byref(call)))),
        )
        LIBRARY.ssd_backward(byref(call), byref(gradients))
        grad_B, grad_C = (t.sum(0).to(of.dtype) for t, of in ((grad_B, B), (grad_C, C)))
        return grad_x, grad_dt, grad_A.sum(0), grad_B, grad_C, grad_D.sum(0), None if h is None else grad_h, None, None


def _scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    h: Tensor | None,
    resets: Tensor | None,
    real: Tensor | None,
) -> _Scan:
    (batch, length, heads, width), (groups, size) = x.shape, B.shape[2:]
    maps = (batch, length, groups, size)
    views = ((x, x.shape), (dt[..., None], (*dt.shape, 1)), (B, maps), (C, maps))
    return _Scan(
        *(batch, length, heads, groups, width, size),
        *(min(_BLOCK, max(1, batch * heads // _TASKS)), torch.get_num_threads()),
        *(_View.of(t, shape) for t, shape in views),
        *(pointer(A, heads), pointer(D, heads), _address(h, x, B)),
        *(pointer(mask, batch * length, torch.bool) for mask in (resets, real)),
    )


def _check() -> str | None:
    from phylon.ops.scan.ssd.check import check

    return check()


LIBRARY = Library(
    __name__,
    [
        *(Path(__file__).with_name(name) for name in ("native.cpp", "chunks.h", "forward.h", "backward.h", "check.py")),
        Path(__file__).parents[2] / "native" / "tile.h",
    ],
    {
        "ssd_starts": [POINTER(_Scan)],
        "ssd_forward": [POINTER(_Scan), POINTER(_View), c_void_p, c_void_p],
        "ssd_backward": [POINTER(_Scan), POINTER(_Gradients)],
    },
    _check,
    returns={"ssd_starts": c_int64},
)
