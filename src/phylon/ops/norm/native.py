"""Sum, norm and, backward, the sum of both gradients in one pass each (``phylon.ops.rows``)."""

from typing import Any

import torch
from torch import Tensor

from phylon.ops.backward import once
from phylon.ops.norm.call import NormCall
from phylon.ops.rows import native as rows


class Native:
    """C++ on CPUs. It keeps the total and two numbers a row; fp32 and bf16."""

    name = "native"

    def available(self) -> str | None:
        return rows.LIBRARY.reason()

    def supports(self, call: NormCall) -> str | None:
        added = call.added
        if added is not None and (call.x.dtype, added.dtype) == (torch.bfloat16, torch.float32):
            return "the sum is wider than x"
        return rows.refusal(call.x, added, call.weight, call.bias) or rows.forward_alone()

    def run(self, call: NormCall) -> tuple[Tensor, Tensor]:
        x, added = call.x.contiguous(), None if call.added is None else call.added.contiguous()
        tensors = (x, added, call.weight, call.bias)
        if not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)):
            return rows.norm_forward(x, added, rows.wide(call.weight), rows.wide(call.bias), call.eps, call.centred)[:2]
        total, y = _Norm.apply(*tensors, call.eps, call.centred)
        return total, y


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        added: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        centred: bool,
    ) -> tuple[Tensor, Tensor]:
        w = rows.wide(weight)
        total, y, statistics = rows.norm_forward(x, added, w, rows.wide(bias), eps, centred)
        ctx.save_for_backward(total, w, statistics)
        ctx.centred = centred
        ctx.dtypes = tuple(None if t is None else t.dtype for t in (added, weight, bias))
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    @once("norm backend 'native'")
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:  # type: ignore[bad-override]
        total, weight, statistics = ctx.saved_tensors
        grad_total, grad_y = grad_outputs
        added, w, b = ctx.dtypes
        if grad_y is None:
            return grad_total, None if added is None else grad_total.to(added), None, None, None, None
        grad_total = None if grad_total is None else grad_total.contiguous()
        grad_x, grad_w, grad_b = rows.norm_backward(
            grad_y.contiguous(), grad_total, total, weight, statistics, ctx.centred, b is not None
        )
        return (
            grad_x,
            None if added is None else grad_x.to(added),
            None if grad_w is None else grad_w.to(w),
            None if grad_b is None else grad_b.to(b),
            None,
            None,
        )
