"""The one description of a norm call that every backend reads."""

from dataclasses import dataclass

from torch import Tensor


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
