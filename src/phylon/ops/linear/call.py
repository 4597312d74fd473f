"""The one description of a call of linear maps that every backend reads."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class LinearCall:
    """``x`` (..., K); ``weights`` (N_i, K) and ``biases`` (N_i,) or ``None``."""

    x: Tensor
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
