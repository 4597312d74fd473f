"""Normalisation over the last dimension, with statistics in at least fp32."""

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight``, rounded once. Zhang and Sennrich (arXiv:1910.07467), equation 4."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.dtype == dtype:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    wide = x.to(dtype)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias``. Ba, Kiros and Hinton (arXiv:1607.06450), section 3."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
