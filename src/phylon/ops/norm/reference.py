"""The oracle: PyTorch's norms, and sums in at least fp32."""

import torch
from torch import Tensor
from torch.nn import functional as F

from phylon.ops.norm.call import NormCall


class Reference:
    """PyTorch's own ops, one after the other. Supports everything."""

    name = "reference"

    def available(self) -> str | None:
        return None

    def supports(self, call: NormCall) -> str | None:
        return None

    def run(self, call: NormCall) -> tuple[Tensor, Tensor]:
        x = call.x if call.added is None else call.x + call.added
        dtype, given = torch.promote_types(x.dtype, torch.float32), (call.weight, call.bias)
        if call.centred:
            if all(t is None or t.dtype == x.dtype for t in given):
                return x, F.layer_norm(x, x.shape[-1:], *given, call.eps)
            # PyTorch refuses parameters of another dtype: all of it in the wider one.
            weight, bias = (None if t is None else t.to(dtype) for t in given)
            return x, F.layer_norm(x.to(dtype), x.shape[-1:], weight, bias, call.eps).to(x.dtype)
        if x.dtype == dtype:
            return x, F.rms_norm(x, x.shape[-1:], call.weight, call.eps).to(dtype)
        wide = x.to(dtype)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + call.eps)
        return x, (normed if call.weight is None else normed * call.weight).to(x.dtype)
