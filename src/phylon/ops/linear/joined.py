"""Maps of one input as one node of the graph: gradients of the input are added up inside the products.

Nothing is copied together. Under bf16 on a machine without bf16 units the products are made in fp32 and rounded once,
which is nearer to the truth than rounding the weights first, and here three times as fast.
"""

from typing import Any

import torch
from torch import Tensor

from phylon.ops.backward import once
from phylon.ops.linear.call import LinearCall
from phylon.ops.products import as_given, compute_dtype, operand, widened
from phylon.ops.rows import native as rows

FEW_ROWS = 32
_FLOATS = (torch.float32, torch.float64, torch.bfloat16)


def is_few(x: Tensor) -> bool:
    """Whether ``x`` (..., K) has so few rows that asking for a backend costs more than it could gain."""
    return x.numel() < FEW_ROWS * x.shape[-1]


def refusal(x: Tensor, weights: tuple[Tensor, ...]) -> str | None:
    """Why maps of ``x`` by ``weights`` are better left to PyTorch, or must be."""
    if is_few(x):
        return f"fewer than {FEW_ROWS} rows"
    if x.device.type != "cpu":
        return f"it runs on the CPU, not on {x.device.type}"
    if torch.compiler.is_compiling():
        return "torch.compile does it itself"
    dtype = compute_dtype(x)
    for tensor in (x, *weights):
        if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
            return f"it takes plain tensors, not {type(tensor).__name__}"
        if tensor.dtype not in _FLOATS:
            return f"it takes float32, float64 and bfloat16, not {str(tensor.dtype).removeprefix('torch.')}"
        if dtype is not torch.bfloat16 and tensor.dtype != dtype:
            return "dtypes differ"
    if dtype not in _FLOATS:
        return f"no product in {str(dtype).removeprefix('torch.')}"
    low = dtype is torch.bfloat16 and widened(x)
    if not low and not (torch.is_grad_enabled() and (x.requires_grad or any(w.requires_grad for w in weights))):
        return "without gradients there is nothing to join"
    return None


class Joined:
    """Plain CPU tensors of fp32, fp64 and bf16, with or without autocast to bf16."""

    name = "joined"

    def available(self) -> str | None:
        return None

    def supports(self, call: LinearCall) -> str | None:
        return refusal(call.x, call.weights)

    def run(self, call: LinearCall) -> tuple[Tensor, ...]:
        dtype = compute_dtype(call.x)
        flat = call.x.reshape(-1, call.x.shape[-1])
        with as_given(flat):
            made = _Linears.apply(flat, dtype, len(call.weights), *call.weights, *call.biases)
        return tuple(y.view(*call.x.shape[:-1], y.shape[-1]) for y in made)


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NK: Tensor, dtype: torch.dtype, count: int, *maps: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = maps[:count], maps[count:]
        wide = operand(x_NK, dtype)
        made = tuple(affine(wide, w, b, dtype) for w, b in zip(weights, biases, strict=True))  # type: ignore[arg-type]
        ctx.save_for_backward(kept(x_NK, dtype), *weights)
        ctx.dtype, ctx.of_x = dtype, x_NK.dtype
        ctx.biases = tuple(None if b is None else b.dtype for b in biases)
        ctx.set_materialize_grads(False)
        return made

    @staticmethod
    @once("linear backend 'joined'")
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[bad-override]
        x, *weights = ctx.saved_tensors
        count = len(weights)
        need_x, need_w, need_b = (
            ctx.needs_input_grad[0],
            ctx.needs_input_grad[3 : 3 + count],
            ctx.needs_input_grad[3 + count :],
        )
        wide = operand(x, ctx.dtype) if any(need_w) else None
        grad_x: Tensor | None = None
        grad_w: list[Tensor | None] = [None] * count
        grad_b: list[Tensor | None] = [None] * count
        for i, (grad, w) in enumerate(zip(grads, weights, strict=True)):
            if grad is None:
                continue
            if need_b[i]:
                grad_b[i] = bias_gradient(grad, ctx.biases[i])
            g = operand(grad, ctx.dtype)
            if need_w[i]:
                assert wide is not None
                grad_w[i] = torch.mm(g.T, wide).to(w.dtype)
            if need_x:
                w = operand(w, ctx.dtype)
                grad_x = torch.mm(g, w) if grad_x is None else grad_x.addmm_(g, w)
        return (None if grad_x is None else grad_x.to(ctx.of_x), None, None, *grad_w, *grad_b)


def affine(wide: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``wide W^T + b`` of an operand, as ``dtype``."""
    w = operand(weight, dtype)
    made = torch.mm(wide, w.T)
    # Added afterwards: addmm spreads the bias over the result first, and that costs up to a quarter more.
    return (made if bias is None else made.add_(bias)).to(dtype)


def kept(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What is kept of an input for the backward: bf16 where that is what it computes in."""
    return x.to(dtype) if dtype is torch.bfloat16 else x


def bias_gradient(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over rows of ``grad`` (N, F), by the kernel where it is there."""
    if rows.LIBRARY.reason() is None and rows.refusal(grad) is None:
        return rows.row_sum(grad.contiguous()).to(dtype)
    return grad.sum(0, dtype=torch.promote_types(grad.dtype, torch.float32)).to(dtype)
