"""Tokens sorted by expert, one product an expert and map, everything between them in C++ (``phylon.ops.rows``).

Only the choices that are dispatched are gathered, so neither padding nor dropped choices cost anything.
"""

from typing import Any

import torch
from torch import Tensor

from phylon.ops.backward import once
from phylon.ops.experts.call import ExpertCall
from phylon.ops.linear.joined import kept
from phylon.ops.products import as_given, operand
from phylon.ops.rows import native as rows


class Native:
    """One node of the graph over PyTorch's products, on CPUs; it keeps what goes into the activation."""

    name = "native"

    def available(self) -> str | None:
        return rows.LIBRARY.reason()

    def supports(self, call: ExpertCall) -> str | None:
        w = call.weights
        if any(bias is not None for bias in w.biases):
            return "no biases"
        if call.dropout:
            return "no dropout"
        if call.activation not in rows.KINDS:
            return f"no kernel for {call.activation}"
        if call.gates.dtype != torch.float32:
            return f"gates must be float32, not {str(call.gates.dtype).removeprefix('torch.')}"
        device = call.x.device.type
        if call.x.dtype == torch.float32 and torch.is_autocast_enabled(device):
            return "under autocast it takes inputs that are cast"
        if call.x.dtype == torch.float32 and any(
            t is not None and t.dtype != torch.float32 for t in (w.up, w.down, w.gate)
        ):
            return "weights are narrower than x"
        return rows.refusal(call.x, w.up, w.down, w.gate) or rows.forward_alone()

    def run(self, call: ExpertCall) -> Tensor:
        token, place, counts = call.sorted()
        sizes = counts.tolist()
        sent = sum(sizes)
        where = torch.full((call.chosen.numel(),), -1, dtype=torch.int64)
        where[place[:sent]] = torch.arange(sent)
        w = call.weights
        plan = _Plan(token[:sent].contiguous(), where.view(call.chosen.shape), sizes, call.activation)
        with as_given(call.x):
            return _Experts.apply(call.x.contiguous(), call.gates.contiguous(), w.up, w.down, w.gate, plan)


class _Plan:
    """``token`` (M,) of every row sent, sorted by expert; ``where`` (N, k) each choice went, or -1; rows an expert."""

    def __init__(self, token: Tensor, where: Tensor, sizes: list[int], activation: str) -> None:
        self.token, self.where, self.sizes, self.activation = token, where, sizes, activation

    def products(self, x: Tensor, weights: Tensor, *, transposed: bool, onto: Tensor | None = None) -> Tensor:
        """Rows of every expert times its matrix: (M, out) of ``x`` (M, in) and (X, out, in) if ``transposed``."""
        out = torch.empty(len(x), weights.shape[1 if transposed else 2], dtype=x.dtype) if onto is None else onto
        first = 0
        for e, size in enumerate(self.sizes):
            if size:
                part, w = slice(first, first + size), weights[e].T if transposed else weights[e]
                if onto is None:
                    torch.mm(x[part], w, out=out[part])
                else:
                    out[part].addmm_(x[part], w)
                first += size
        return out

    def weight_gradient(self, grad: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        """(X, out, in): of every expert ``grad^T x`` over its rows (M, out) and (M, in)."""
        made = torch.empty(weights.shape, dtype=x.dtype)
        first = 0
        for e, size in enumerate(self.sizes):
            part = slice(first, first + size)
            if size:
                torch.mm(grad[part].T, x[part], out=made[e])
            else:
                made[e].zero_()
            first += size
        return made.to(weights.dtype)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, gates_Nk: Tensor, up: Tensor, down: Tensor, gate: Tensor | None, plan: _Plan
    ) -> Tensor:
        dtype = x_ND.dtype
        sent_MD = rows.gather(operand(x_ND, dtype), plan.token)
        up_MF = plan.products(sent_MD, operand(up, dtype), transposed=True)
        gate_MF = None if gate is None else plan.products(sent_MD, operand(gate, dtype), transposed=True)
        hidden_MF = _activated(plan.activation, up_MF, gate_MF)
        out_MD = plan.products(hidden_MF, operand(down, dtype), transposed=True)
        ctx.save_for_backward(
            kept(sent_MD, dtype), gates_Nk, up, down, gate, kept(up_MF, dtype), kept(out_MD, dtype),
            None if gate_MF is None else kept(gate_MF, dtype),
        )  # fmt: skip
        ctx.plan, ctx.dtype = plan, dtype
        return rows.combine(out_MD, plan.where, gates_Nk.detach(), dtype)

    @staticmethod
    @once("experts backend 'native'")
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # type: ignore[bad-override]
        sent_MD, gates_Nk, up, down, gate, up_MF, out_MD, gate_MF = ctx.saved_tensors
        plan, dtype = ctx.plan, ctx.dtype
        _, _, need_up, need_down, need_gate, _ = ctx.needs_input_grad
        sent_MD, up_MF, out_MD = (operand(t, dtype) for t in (sent_MD, up_MF, out_MD))
        gate_MF = None if gate_MF is None else operand(gate_MF, dtype)
        grad_MD, grad_gates = rows.combine_backward(grads[0].contiguous(), out_MD, plan.where, gates_Nk)
        grad_MF = plan.products(grad_MD, operand(down, dtype), transposed=False)
        first, second = (up_MF, None) if gate_MF is None else (gate_MF, up_MF)
        made = rows.ActivationGradients(plan.activation, grad_MF, first, None, second, None, again=True)
        assert made.y is not None
        grad_down = plan.weight_gradient(grad_MD, made.y, down) if need_down else None
        of_up = made.x if made.up is None else made.up
        grad_up = plan.weight_gradient(of_up, sent_MD, up) if need_up else None
        grad_sent = plan.products(of_up, operand(up, dtype), transposed=False)
        grad_gate = plan.weight_gradient(made.x, sent_MD, gate) if need_gate else None
        if gate is not None:
            plan.products(made.x, operand(gate, dtype), transposed=False, onto=grad_sent)
        return rows.combine(grad_sent, plan.where, None, dtype), grad_gates, grad_up, grad_down, grad_gate, None


def _activated(kind: str, up: Tensor, gate: Tensor | None) -> Tensor:
    return rows.activation(kind, up) if gate is None else rows.activation(kind, gate, None, up)
