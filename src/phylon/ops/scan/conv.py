"""The causal depthwise convolution before a scan, with the tail of the tokens before and document boundaries."""

import torch
from torch import Tensor
from torch.nn import functional as F

from phylon.ops.scan.call import ConvCall, cleared


class ConvShifted:
    """PyTorch's convolution where rows are plain; a sum of W shifted products where documents or padding break them."""

    name = "shifted"

    def available(self) -> str | None:
        return None

    def supports(self, call: ConvCall) -> str | None:
        return None

    def run(self, call: ConvCall) -> tuple[Tensor, Tensor]:
        real, resets = call.breaks.real, call.breaks.resets
        x = cleared(call.x, real)
        if real is None:
            y, tail = _contiguous(x, call, resets, None)
            return call.activated(y), tail
        # Real tokens first, in order: then the tail is right before them, and gaps are gone.
        order = torch.argsort((~real).to(torch.uint8), dim=1, stable=True)
        back = (real.cumsum(1) - 1).clamp(min=0)
        x = x.gather(1, order[..., None].expand_as(x))
        resets = None if resets is None else resets.gather(1, order)
        y, tail = _contiguous(x, call, resets, real.sum(1))
        return cleared(call.activated(y.gather(1, back[..., None].expand_as(y))), real), tail


def _contiguous(x: Tensor, call: ConvCall, resets: Tensor | None, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs, and the tail after the first ``counts`` (B,) tokens of each row (default: all)."""
    reach, length = call.weight.shape[1], x.shape[1]
    joined = torch.cat([call.start(), x], 1)  # (B, W - 1 + T, D)
    if resets is None:
        y = _convolve(joined, call)
        starts = None
    else:
        # The place where each token's document starts; before the tail, where it goes on from there.
        index = torch.arange(length, device=x.device)
        starts = torch.where(resets, index, -reach).cummax(1).values
        weight = call.weight.to(x.dtype)
        y = x * weight[:, -1] if call.bias is None else torch.addcmul(call.bias.to(x.dtype), x, weight[:, -1])
        for back in range(1, reach):
            shifted = joined[:, reach - 1 - back : reach - 1 - back + length]
            foreign = (index - back < starts)[..., None]
            y = y + shifted.masked_fill(foreign, 0) * weight[:, -1 - back]
    return y, _tail(joined, starts, counts, reach)


def _convolve(joined: Tensor, call: ConvCall) -> Tensor:
    weight = call.weight.to(joined.dtype)
    bias = None if call.bias is None else call.bias.to(joined.dtype)
    if joined.shape[1] == weight.shape[1]:
        y = (joined * weight.T).sum(1, keepdim=True)
        return y if bias is None else y + bias
    return F.conv1d(joined.mT, weight[:, None], bias, groups=len(weight)).mT


def _tail(joined: Tensor, starts: Tensor | None, counts: Tensor | None, reach: int) -> Tensor:
    """The last W - 1 inputs of each row, zero where they are of an earlier document."""
    batch, total, width = joined.shape
    length = total - (reach - 1)
    if starts is None and counts is None:
        return joined[:, length:]
    counts = torch.full((batch,), length, device=joined.device) if counts is None else counts
    place = counts[:, None] + torch.arange(reach - 1, device=joined.device)
    tail = joined.gather(1, place[..., None].expand(-1, -1, width))
    if starts is None:
        return tail
    last = starts.gather(1, (counts - 1).clamp(min=0)[:, None]).masked_fill(counts[:, None] == 0, -reach)
    return tail.masked_fill((place - (reach - 1) < last)[..., None], 0)
