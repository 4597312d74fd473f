"""The one description of a rotation that every backend reads."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class RotaryCall:
    """``x`` (B, T, H, E); ``cosine`` and ``sine`` (B or 1, T, 1, half) in fp32, without gradients."""

    x: Tensor
    cosine: Tensor
    sine: Tensor
