"""PyTorch's grouped matrix product: all experts in one call, without asking the device how many tokens each got."""

import torch
from torch import Tensor

from phylon.ops.experts.call import ExpertCall

_ALIGNED = 16
"""Bytes that every row of an operand must be a multiple of."""


class Grouped:
    """``torch._grouped_mm`` over the tokens sorted by expert."""

    name = "grouped"

    def available(self) -> str | None:
        return None if hasattr(torch, "_grouped_mm") else "this PyTorch has no grouped matrix product"

    def supports(self, call: ExpertCall) -> str | None:
        if any(bias is not None for bias in call.weights.biases):
            return "no biases in the grouped product"
        if not call.x.is_cuda:
            return "off CUDA a loop too, no faster than the reference"
        if torch.is_autocast_enabled(call.x.device.type):
            return "the grouped product does not cast under autocast"
        if call.x.dtype != torch.bfloat16 or call.weights.up.dtype != torch.bfloat16:
            return f"no grouped product of {call.x.dtype} with {call.weights.up.dtype}, only of bfloat16"
        if any(size * call.x.element_size() % _ALIGNED for size in call.weights.up.shape[1:]):
            return f"its rows must be multiples of {_ALIGNED} bytes"
        if call.x.numel() == 0:
            return "an empty dimension"
        return None

    def run(self, call: ExpertCall) -> Tensor:
        token, place, counts = call.sorted()
        ends, weights = counts.cumsum(0).to(torch.int32), call.weights
        # Rows beyond the last group come out of the product, and of its backward, as they were in memory.
        sent = (torch.arange(len(place), device=place.device) < counts.sum())[:, None]
        rows = torch.where(sent, call.x.index_select(0, token), 0)
        gate = None if weights.gate is None else torch._grouped_mm(rows, weights.gate.mT, offs=ends)
        hidden = torch.where(sent, call.hidden(torch._grouped_mm(rows, weights.up.mT, offs=ends), gate), 0)
        out = torch.where(sent, torch._grouped_mm(hidden, weights.down.mT, offs=ends), 0)
        return call.combine(out, token, place)
