"""One token through the middle of a Mamba block: convolution, maps to Δ, B and C, scan and gate as one op."""

from ctypes import Structure, byref, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from phylon.ops.products import as_given
from phylon.ops.scan.chunked import step_into
from phylon.ops.scan.native import LIBRARY

_LOW = torch.bfloat16
_HELD = (torch.float32, _LOW)


@dataclass(kw_only=True)
class StepCall:
    """``x``, ``z`` (B, 1, D): what the two maps into the block gave. ``tail`` (B, W - 1, D) and ``state`` (B, D, N)
    came before; ``new_tail`` and ``new_state`` are where the new ones are written. No documents, no padding.

    ``conv_weight`` (D, W), ``conv_bias`` (D,) or ``None``, ``x_proj`` (R + 2 N, D), ``dt_proj`` (D, R), ``dt_bias``,
    ``D`` (D,), ``A_log`` (D, N): the block's parameters.
    """

    x: Tensor
    z: Tensor
    conv_weight: Tensor
    conv_bias: Tensor | None
    x_proj: Tensor
    dt_proj: Tensor
    dt_bias: Tensor
    A_log: Tensor
    D: Tensor
    tail: Tensor
    state: Tensor
    new_tail: Tensor
    new_state: Tensor

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All of them, in the order of the source's pointers."""
        given = (self.x, self.z, self.conv_weight, self.conv_bias, self.x_proj, self.dt_proj, self.dt_bias)
        return (*given, self.A_log, self.D, self.tail, self.state, self.new_tail, self.new_state)

    def learns(self) -> bool:
        """Whether somebody may ask for a gradient."""
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in self.tensors())


class StepComposed:
    """The same from the ops it is made of. It supports everything."""

    name = "reference"

    def available(self) -> str | None:
        return None

    def supports(self, call: StepCall) -> str | None:
        return None

    def run(self, call: StepCall) -> Tensor:
        from phylon.ops.scan import causal_conv, selective_scan

        size = call.A_log.shape[1]
        u, _ = causal_conv(
            call.x, call.conv_weight, call.conv_bias, activation="silu", tail=call.tail, into=call.new_tail
        )
        d, B, C = F.linear(u, call.x_proj.to(u.dtype)).split([len(call.x_proj) - 2 * size, size, size], -1)
        wide = torch.promote_types(u.dtype, torch.float32)
        dt = F.softplus(F.linear(d, call.dt_proj.to(d.dtype)).to(wide) + call.dt_bias.to(wide))
        if call.learns() or call.new_state.dtype != wide:
            A = -torch.exp(call.A_log.to(wide))
            y, _ = selective_scan(u, dt, A, B, C, call.D, state=call.state, into=call.new_state)
        else:
            A = call.new_state.copy_(call.A_log).exp_().neg_()
            with as_given(u):
                y = step_into(A, call.state, *(t.to(wide) for t in (u, dt, B, C, call.D))).to(u.dtype)
        return y * F.silu(call.z)


class StepNative:
    """One C++ call, fp32 inside; inputs, parameters and tails may each be bf16. The output is all it makes."""

    name = "native"

    def available(self) -> str | None:
        return LIBRARY.reason()

    def supports(self, call: StepCall) -> str | None:
        for t in call.tensors():
            if t is not None and (t.dtype not in _HELD or not t.is_cpu or not t.is_contiguous()):
                return "it takes contiguous float32 and bfloat16 on the CPU"
        if call.state.dtype is not torch.float32 or call.new_state.dtype is not torch.float32:
            return "it keeps the state in float32"
        if call.learns() or torch.compiler.is_compiling():
            return "no backward pass, nothing for torch.compile"
        return None

    def run(self, call: StepCall) -> Tensor:
        y = torch.empty_like(call.x)
        batch, width, size, rank, reach = sizes = (
            len(y), y.shape[-1], call.A_log.shape[1], call.dt_proj.shape[1], call.conv_weight.shape[1],
        )  # fmt: skip
        tails, states = batch * (reach - 1) * width, batch * width * size
        numbers = (
            *(batch * width, batch * width, width * reach, width, (rank + 2 * size) * width, width * rank, width),
            *(width * size, width, tails, states, tails, states),
        )
        tensors = call.tensors()
        # A dozen pointers a block and token: that they are dense on the CPU, ``supports`` has seen.
        if any(t is not None and t.numel() != n for t, n in zip(tensors, numbers, strict=True)):
            raise AssertionError(f"a step takes tensors of {numbers} numbers")
        views = (view for t in (*tensors, y) for view in ((None, 0) if t is None else (t.data_ptr(), t.dtype is _LOW)))
        LIBRARY.mamba_step(byref(_Step(*sizes, *views)))
        return y


class _Step(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("batch", "width", "size", "rank", "reach")),
        *(
            (f"{name}{part}", kind)
            for name in (
                *("x", "z", "conv_weight", "conv_bias", "x_proj", "dt_proj", "dt_bias"),
                *("A_log", "D", "tail", "h", "new_tail", "new_h", "y"),
            )
            for part, kind in (("", c_void_p), ("_half", c_int64))
        ),
    )
