"""A feed-forward network as one node: bias and activation in one pass, the hidden values made again in the backward."""

from typing import Any

import torch
from torch import Tensor

from phylon.ops.backward import once
from phylon.ops.feedforward.call import FeedForwardCall
from phylon.ops.linear.joined import affine, bias_gradient, kept, refusal
from phylon.ops.products import as_given, compute_dtype, operand
from phylon.ops.rows import native as rows


class Native:
    """C++ between PyTorch's products, on CPUs. It keeps the input and what goes into the activation."""

    name = "native"

    def available(self) -> str | None:
        return rows.LIBRARY.reason()

    def supports(self, call: FeedForwardCall) -> str | None:
        if call.activation not in rows.KINDS:
            return f"no kernel for {call.activation}"
        return rows.refusal(call.x, *(t for pair in call.maps for t in pair)) or refusal(
            call.x, tuple(weight for weight, _ in call.maps)
        )

    def run(self, call: FeedForwardCall) -> Tensor:
        gate, gate_bias = (None, None) if call.gate is None else call.gate
        flat = call.x.reshape(-1, call.x.shape[-1])
        dtype = compute_dtype(call.x)
        with as_given(flat):
            made = _FeedForward.apply(flat, *call.up, *call.down, gate, gate_bias, call.activation, dtype)
        return made.view(*call.x.shape[:-1], made.shape[-1])


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up: Tensor,
        up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
        gate: Tensor | None,
        gate_bias: Tensor | None,
        activation: str,
        dtype: torch.dtype,
    ) -> Tensor:
        wide = operand(x, dtype)
        # In the products' own dtype until the end: on machines without bf16 units nothing is rounded in between.
        before_NF = torch.mm(wide, operand(up, dtype).T)
        gate_NF = None if gate is None else torch.mm(wide, operand(gate, dtype).T)
        hidden_NF = _activated(activation, before_NF, up_bias, gate_NF, gate_bias)
        made = affine(hidden_NF, down, down_bias, dtype)
        stored = (kept(before_NF, dtype), None if gate_NF is None else kept(gate_NF, dtype))
        ctx.save_for_backward(kept(x, dtype), up, up_bias, down, gate, gate_bias, *stored)
        ctx.activation, ctx.dtype, ctx.of_x = activation, dtype, x.dtype
        ctx.down_bias = None if down_bias is None else down_bias.dtype
        return made

    @staticmethod
    @once("feedforward backend 'native'")
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # type: ignore[bad-override]
        x, up, up_bias, down, gate, gate_bias, before_NF, gate_NF = ctx.saved_tensors
        dtype, grad = ctx.dtype, grads[0].contiguous()
        need_x, need_up, _, need_down, need_down_bias, need_gate, *_ = ctx.needs_input_grad
        g = operand(grad, dtype)
        grad_NF = torch.mm(g, operand(down, dtype))
        before_NF = operand(before_NF, dtype)
        gate_NF = None if gate_NF is None else operand(gate_NF, dtype)
        made = _gradients(ctx.activation, grad_NF, before_NF, up_bias, gate_NF, gate_bias)
        assert made.y is not None
        grad_down = torch.mm(g.T, made.y).to(down.dtype) if need_down else None
        # Without a gate the activation's argument is up, with one it is the gate.
        of_up, of_up_bias = (made.x, made.bias) if gate is None else (made.up, made.up_bias)
        assert of_up is not None
        wide = operand(x, dtype)
        grad_up = torch.mm(of_up.T, wide).to(up.dtype) if need_up else None
        grad_x = torch.mm(of_up, operand(up, dtype)) if need_x else None
        grad_gate = torch.mm(made.x.T, wide).to(gate.dtype) if need_gate else None
        if gate is not None and grad_x is not None:
            grad_x.addmm_(made.x, operand(gate, dtype))
        return (
            None if grad_x is None else grad_x.to(ctx.of_x),
            grad_up,
            None if of_up_bias is None else of_up_bias.to(up_bias.dtype),
            grad_down,
            bias_gradient(grad, ctx.down_bias) if need_down_bias else None,
            grad_gate,
            None if gate is None or made.bias is None else made.bias.to(gate_bias.dtype),
            None,
            None,
        )


def _activated(
    kind: str, before: Tensor, up_bias: Tensor | None, gate: Tensor | None, gate_bias: Tensor | None
) -> Tensor:
    if gate is None:
        return rows.activation(kind, before, rows.wide(up_bias))
    return rows.activation(kind, gate, rows.wide(gate_bias), before, rows.wide(up_bias))


def _gradients(
    kind: str, grad: Tensor, before: Tensor, up_bias: Tensor | None, gate: Tensor | None, gate_bias: Tensor | None
) -> rows.ActivationGradients:
    if gate is None:
        return rows.ActivationGradients(kind, grad, before, rows.wide(up_bias), None, None, again=True)
    return rows.ActivationGradients(kind, grad, gate, rows.wide(gate_bias), before, rows.wide(up_bias), again=True)
