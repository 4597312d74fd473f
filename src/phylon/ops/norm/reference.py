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
        if call.centred:
            return x, F.layer_norm(x, x.shape[-1:], call.weight, call.bias, call.eps)
        dtype = torch.promote_types(x.dtype, torch.float32)
        if x.dtype == dtype:
            return x, F.rms_norm(x, x.shape[-1:], call.weight, call.eps)
        wide = x.to(dtype)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + call.eps)
        return x, (normed if call.weight is None else normed * call.weight).to(x.dtype)
