"""Matrix products of the ops that write their own backward, and what a bf16 product is made of on this machine."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

from phylon.ops.native.library import features

_UNITS = {"avx512_bf16", "amx_bf16", "avx512_fp16", "bf16", "sve_bf16"}


@cache
def bf16_units() -> bool:
    """Whether the processor multiplies bf16 in hardware.

    Without, PyTorch's bf16 product takes 3 to 4 times as long as its fp32 one (``benchmarks/train/README.md``). With
    them oneDNN multiplies, on AMX where there is such a thing. What cannot be known is taken to have them.
    """
    found = features()
    return not found or bool(_UNITS & found)


def widened(x: Tensor) -> bool:
    """Whether low-precision products of tensors like ``x`` are made in fp32, each result rounded once."""
    return x.device.type == "cpu" and not bf16_units()


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype products of ``x`` are to have: autocast's, or that of ``x``."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype


def as_given(x: Tensor | None) -> AbstractContextManager[object]:
    """Without autocast, which would round the factors of a product that are wide on purpose."""
    device = "cpu" if x is None else x.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def operand(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` as a factor of a product in ``dtype``: widened where the machine has no units for that."""
    return x.to(torch.float32 if dtype is torch.bfloat16 and widened(x) else dtype)
