"""The one description of a rotation that every backend reads."""

from dataclasses import dataclass

from torch import Tensor

from phylon.ops.checks import check_floats
from phylon.spec.errors import UserError


@dataclass
class RotaryCall:
    """``x`` (B, T, H, E); ``cosine`` and ``sine`` (B or 1, T, 1, half) in fp32, without gradients."""

    x: Tensor
    cosine: Tensor
    sine: Tensor

    def __post_init__(self) -> None:
        if self.x.ndim != 4:
            raise UserError(f"a rotation takes (B, T, H, E), got {tuple(self.x.shape)}")
        check_floats("a rotation", x=self.x, cosine=self.cosine)
        (batch, length, _, width), shape = self.x.shape, self.cosine.shape
        if self.sine.shape != shape or self.cosine.dtype != self.sine.dtype:
            raise UserError(f"cosines {tuple(shape)} and sines {tuple(self.sine.shape)} must be of one shape and dtype")
        if len(shape) != 4 or shape[0] not in (1, batch) or shape[1:3] != (length, 1) or 2 * shape[3] > width:
            raise UserError(f"rotary tables {tuple(shape)} do not fit {tuple(self.x.shape)}")
