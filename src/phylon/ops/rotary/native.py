"""One pass that reads ``x`` where it is and writes the turned heads; the backward turns back."""

from typing import Any

import torch
from torch import Tensor

from phylon.ops.backward import once
from phylon.ops.rotary.call import RotaryCall
from phylon.ops.rows import native as rows


class Native:
    """C++ on CPUs; fp32 and bf16."""

    name = "native"

    def available(self) -> str | None:
        return rows.LIBRARY.reason()

    def supports(self, call: RotaryCall) -> str | None:
        if call.cosine.requires_grad or call.sine.requires_grad:
            return "it gives no gradient to the tables"
        if call.cosine.dtype != torch.float32:
            return "the tables must be float32"
        return rows.refusal(call.x, call.cosine, call.sine)

    def run(self, call: RotaryCall) -> Tensor:
        return _Rotary.apply(call.x, call.cosine.squeeze(2).contiguous(), call.sine.squeeze(2).contiguous())


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.tables = (cosine, sine)
        return rows.rotary(_dense_heads(x), cosine, sine, 1.0)

    @staticmethod
    @once("rotary backend 'native'")
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # type: ignore[bad-override]
        cosine, sine = ctx.tables
        return rows.rotary(_dense_heads(grads[0]), cosine, sine, -1.0), None, None


def _dense_heads(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
