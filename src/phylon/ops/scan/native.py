"""The C++ kernels of this folder (``native.cpp``), forward and backward: fp32 inside, fp32 or bf16 outside."""

import ctypes
from ctypes import POINTER, Structure, byref, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phylon.ops.activation import ACTIVATIONS
from phylon.ops.backward import once
from phylon.ops.native import Library, floats, pointer, strided
from phylon.ops.scan.call import ConvCall, ScanCall, SSDCall

_HELD = (torch.float32, torch.bfloat16)


class _Strided(Structure):
    """``Tensor`` in the source: (B, T, width), the last dimension contiguous."""

    _fields_ = (("data", c_void_p), ("row", c_int64), ("step", c_int64), ("half", c_int64))

    @classmethod
    def of(cls, tensor: Tensor | None, shape: tuple[int, ...]) -> "_Strided":
        if tensor is None:
            return cls()
        half = tensor.dtype is torch.bfloat16
        return cls(*strided(tensor, shape, torch.bfloat16 if half else torch.float32), half)


class _Numbers(Structure):
    """``Numbers`` in the source: dense ones."""

    _fields_ = (("data", c_void_p), ("half", c_int64))

    @classmethod
    def of(cls, tensor: Tensor | None, numbers: int) -> "_Numbers":
        if tensor is None:
            return cls()
        half = tensor.dtype is torch.bfloat16
        return cls(pointer(tensor, numbers, torch.bfloat16 if half else torch.float32), half)


class _Scan(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("batch", "length", "width", "size", "threads")),
        *((name, _Strided) for name in ("x", "dt", "B", "C")),
        *((name, _Numbers) for name in ("A", "D")),
        *((name, c_void_p) for name in ("h0", "resets", "real")),
    )


class _ScanGradients(Structure):
    _fields_ = (
        *((name, _Strided) for name in ("y", "x", "dt")),
        *((name, c_void_p) for name in ("B", "C", "h", "A", "D", "h0", "starts")),
    )


class _Conv(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("batch", "length", "width", "reach", "threads", "silu")),
        *((name, _Strided) for name in ("x", "tail", "weight")),
        *(("bias", _Numbers), ("resets", c_void_p), ("real", c_void_p)),
    )


class _ConvGradients(Structure):
    _fields_ = (
        *((name, _Strided) for name in ("y", "last", "x", "tail")),
        *((name, c_void_p) for name in ("weight", "bias")),
    )


class ScanNative:
    """C++ on CPUs with vectors of 8 or 16 channels, for fp32 and bf16; wider inputs keep their width elsewhere."""

    name = "native"

    def available(self) -> str | None:
        return LIBRARY.reason()

    def supports(self, call: ScanCall) -> str | None:
        return refusal_of((call.x, call.dt, call.B, call.C), (call.A, call.D, call.state))

    def run(self, call: ScanCall) -> tuple[Tensor, Tensor]:
        x, dt, B, C = (dense_rows(t) for t in (call.x, call.dt, call.B, call.C))
        A, D, h = _held(call.A).contiguous(), _held(call.D).contiguous(), in_fp32(call.state)
        breaks = masks_of(call)
        tensors = (x, dt, A, B, C, D, h)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            return _NativeScan.apply(*tensors, *breaks)
        y, last = torch.empty(x.shape, dtype=x.dtype, device="cpu"), target_of(call.into, h)
        last = floats(len(x), *A.shape) if last is None else last
        described = _scan(*tensors, *breaks)
        LIBRARY.scan_forward(byref(described), byref(_Strided.of(y, x.shape)), pointer(last, len(x) * A.numel()), None)
        return y, last


class ConvNative:
    """C++ on CPUs, SiLU in the same pass."""

    name = "native"

    def available(self) -> str | None:
        return LIBRARY.reason()

    def supports(self, call: ConvCall) -> str | None:
        tail = () if call.tail is None else (call.tail,)
        return refusal_of((call.x, *tail), (call.weight, call.bias))

    def run(self, call: ConvCall) -> tuple[Tensor, Tensor]:
        x, tail = dense_rows(call.x), None if call.tail is None else dense_rows(call.tail)
        weight, bias = _held(call.weight), None if call.bias is None else _held(call.bias).contiguous()
        breaks = masks_of(call)
        silu = call.activation == "silu"
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, tail, weight, bias)):
            y, last = _NativeConv.apply(x, weight, bias, tail, silu, *breaks)
        else:
            y, last = torch.empty(x.shape, dtype=x.dtype, device="cpu"), call.into
            if last is None or last is tail or last.dtype not in _HELD or not last.is_contiguous():
                last = x.new_empty(_tails(x, weight))
            described, tails = _conv(x, weight, bias, tail, silu, *breaks), _tails(x, weight)
            LIBRARY.conv_forward(byref(described), byref(_Strided.of(y, x.shape)), byref(_Strided.of(last, tails)))
        return y if call.activation is None or silu else ACTIVATIONS[call.activation](y), last


def masks_of(call: ScanCall | SSDCall | ConvCall) -> tuple[Tensor | None, Tensor | None]:
    resets, real = call.breaks.resets, call.breaks.real
    return None if resets is None else resets.contiguous(), None if real is None else real.contiguous()


def target_of(into: Tensor | None, state: Tensor | None) -> Tensor | None:
    """``into`` if the kernel can write the last state there."""
    usable = into is not None and into is not state and into.dtype is torch.float32 and into.is_contiguous()
    return into if usable else None


def refusal_of(held: tuple[Tensor, ...], wide: tuple[Tensor | None, ...]) -> str | None:
    """Why the kernels cannot take inputs ``held`` in their own dtype, and parameters and a state ``wide`` in fp32."""
    for tensor in held:
        if tensor.device.type != "cpu":
            return f"it runs on the CPU, not on {tensor.device.type}"
        if type(tensor) is not Tensor:
            return f"it takes plain tensors, not {type(tensor).__name__}"
        if tensor.dtype not in _HELD:
            return f"it takes float32 and bfloat16, not {str(tensor.dtype).removeprefix('torch.')}"
    if any(t is not None and t.dtype is torch.float64 for t in wide):
        return "it computes in float32, and a parameter or the state is float64"
    if torch.compiler.is_compiling():
        return "torch.compile cannot look into it"
    return None


def dense_rows(tensor: Tensor) -> Tensor:
    """``tensor`` with its last dimension contiguous; slices of a wider one are left where they are."""
    return tensor if tensor.stride(-1) == 1 else tensor.clone(memory_format=torch.contiguous_format)


def _held(tensor: Tensor) -> Tensor:
    """A parameter as the kernels read it: as it is, or in fp32."""
    return tensor if tensor.dtype in _HELD else tensor.float()


def _tails(x: Tensor, weight: Tensor) -> tuple[int, int, int]:
    return len(x), weight.shape[1] - 1, x.shape[2]


def in_fp32(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float().contiguous()


class _NativeScan(torch.autograd.Function):
    """``x``, ``dt`` (B, T, D), ``A`` (D, N), ``B``, ``C`` (B, T, N), ``D`` (D,), ``h`` (B, D, N) or ``None``."""

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
        y, last = torch.empty(x.shape, dtype=x.dtype, device="cpu"), floats(len(x), *A.shape)
        starts = floats(LIBRARY.scan_starts(*x.shape, A.shape[1]))
        ctx.save_for_backward(x, dt, A, B, C, D, h, resets, real, starts)
        ctx.set_materialize_grads(False)
        LIBRARY.scan_forward(byref(call), byref(_Strided.of(y, x.shape)), last.data_ptr(), starts.data_ptr())
        return y, last

    @staticmethod
    @once("scan backend 'native'")
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        x, dt, A, B, C, D, h, resets, real, starts = ctx.saved_tensors
        grad_y = x.new_zeros(x.shape) if grad_outputs[0] is None else dense_rows(grad_outputs[0])
        grad_last = None if grad_outputs[1] is None else grad_outputs[1].contiguous()
        grad_x, grad_dt = (torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in (x, dt))
        grad_B, grad_C = (floats(*t.shape) for t in (B, C))
        grad_A, grad_h = (floats(len(x), *A.shape) for _ in range(2))
        grad_D = floats(len(x), len(A))
        dense = (grad_B, grad_C, grad_last, grad_A, grad_D, grad_h, starts)
        states = len(x) * A.numel()
        sizes = (B.numel(), C.numel(), states, states, len(x) * len(A), states, starts.numel())
        gradients = _ScanGradients(
            *(_Strided.of(t, x.shape) for t in (grad_y, grad_x, grad_dt)),
            *(pointer(t, n) for t, n in zip(dense, sizes, strict=True)),
        )
        LIBRARY.scan_backward(byref(_scan(x, dt, A, B, C, D, h, resets, real)), byref(gradients))
        sums = (grad_A.sum(0), grad_B, grad_C, grad_D.sum(0))
        wide = (made.to(t.dtype) for made, t in zip(sums, (A, B, C, D), strict=True))
        return grad_x, grad_dt, *wide, None if h is None else grad_h, None, None


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
    (batch, length, width), size = x.shape, A.shape[1]
    maps = (batch, length, size)
    return _Scan(
        *(batch, length, width, size, torch.get_num_threads()),
        *(_Strided.of(t, shape) for t, shape in ((x, x.shape), (dt, x.shape), (B, maps), (C, maps))),
        *(_Numbers.of(A, width * size), _Numbers.of(D, width), pointer(h, batch * width * size)),
        *(pointer(mask, batch * length, torch.bool) for mask in (resets, real)),
    )


class _NativeConv(torch.autograd.Function):
    """``x`` (B, T, D), ``weight`` (D, W), ``bias`` (D,) or ``None``, ``tail`` (B, W - 1, D) or ``None``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tail: Tensor | None,
        silu: bool,
        resets: Tensor | None,
        real: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        y, last = torch.empty(x.shape, dtype=x.dtype, device="cpu"), x.new_empty(_tails(x, weight))
        call = _conv(x, weight, bias, tail, silu, resets, real)
        LIBRARY.conv_forward(byref(call), byref(_Strided.of(y, x.shape)), byref(_Strided.of(last, last.shape)))
        ctx.save_for_backward(x, weight, bias, tail, resets, real)
        ctx.silu = silu
        ctx.set_materialize_grads(False)
        return y, last

    @staticmethod
    @once("conv backend 'native'")
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        x, weight, bias, tail, resets, real = ctx.saved_tensors
        grad_y = x.new_zeros(x.shape) if grad_outputs[0] is None else dense_rows(grad_outputs[0])
        grad_last = None if grad_outputs[1] is None else dense_rows(grad_outputs[1])
        grad_x = torch.empty(x.shape, dtype=x.dtype, device="cpu")
        grad_tail = None if tail is None else torch.empty(tail.shape, dtype=tail.dtype, device="cpu")
        grad_weight, grad_bias = (floats(len(x), *shape) for shape in (weight.mT.shape, weight.shape[:1]))
        tails = _tails(x, weight)
        views = ((grad_y, x.shape), (grad_last, tails), (grad_x, x.shape), (grad_tail, tails))
        gradients = _ConvGradients(
            *(_Strided.of(t, shape) for t, shape in views),
            *(t.data_ptr() for t in (grad_weight, grad_bias)),
        )
        LIBRARY.conv_backward(byref(_conv(x, weight, bias, tail, ctx.silu, resets, real)), byref(gradients))
        of_bias = None if bias is None else grad_bias.sum(0).to(bias.dtype)
        return grad_x, grad_weight.sum(0).mT.to(weight.dtype), of_bias, grad_tail, None, None, None


def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor | None,
    silu: bool,
    resets: Tensor | None,
    real: Tensor | None,
) -> _Conv:
    (batch, length, width), reach = x.shape, weight.shape[1]
    # One tap after the other: the kernel reads them one by one, wherever they are.
    taps = _Strided.of(weight[..., None], (width, reach, 1))
    return _Conv(
        *(batch, length, width, reach, torch.get_num_threads(), silu),
        *(_Strided.of(t, shape) for t, shape in ((x, x.shape), (tail, _tails(x, weight)))),
        *(taps, _Numbers.of(bias, width)),
        *(pointer(mask, batch * length, torch.bool) for mask in (resets, real)),
    )


def _check() -> str | None:
    from phylon.ops.scan.check import check

    return check()


LIBRARY = Library(
    __name__,
    [
        Path(__file__).with_name(name)
        for name in ("native.cpp", "vectors.h", "selective.h", "selective_backward.h", "conv.h", "step.h", "check.py")
    ],
    {
        "scan_starts": [c_int64] * 4,
        "scan_forward": [POINTER(_Scan), POINTER(_Strided), c_void_p, c_void_p],
        "scan_backward": [POINTER(_Scan), POINTER(_ScanGradients)],
        "mamba_step": [c_void_p],
        "conv_forward": [POINTER(_Conv), POINTER(_Strided), POINTER(_Strided)],
        "conv_backward": [POINTER(_Conv), POINTER(_ConvGradients)],
    },
    _check,
    returns={"scan_starts": ctypes.c_int64},
)
