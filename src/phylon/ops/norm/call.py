"""The one description of a norm call that every backend reads."""

from dataclasses import dataclass

from torch import Tensor

from phylon.ops.checks import check_floats, check_shapes
from phylon.spec.errors import UserError


@dataclass(kw_only=True)
class NormCall:
    """``x`` (..., D), ``added`` like it or ``None``; ``weight``, ``bias`` (D,); ``centred``: the mean is taken off.

    A backend returns ``(x + added, normed)``; the first counts only where ``residual`` says so.
    """

    x: Tensor
    weight: Tensor | None
    eps: float
    centred: bool
    bias: Tensor | None = None
    added: Tensor | None = None
    residual: bool = False

    def __post_init__(self) -> None:
        x, added = self.x, self.added
        if x.ndim == 0 or x.shape[-1] == 0:
            raise UserError(f"a norm takes (..., D) with D at least 1, got {tuple(x.shape)}")
        check_floats("a norm", x=x, added=added, weight=self.weight, bias=self.bias)
        width = x.shape[-1:]
        check_shapes("norm", added=(added, x.shape), weight=(self.weight, width), bias=(self.bias, width))
