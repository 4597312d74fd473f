"""The one description of a call of linear maps that every backend reads."""

from dataclasses import dataclass

from torch import Tensor

from phylon.ops.checks import check_map
from phylon.spec.errors import UserError


@dataclass
class LinearCall:
    """``x`` (..., K); ``weights`` (N_i, K) and ``biases`` (N_i,) or ``None``."""

    x: Tensor
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]

    def __post_init__(self) -> None:
        if len(self.weights) != len(self.biases):
            raise UserError(
                f"linear takes a bias or None for every weight, got {len(self.biases)} for {len(self.weights)}"
            )
        for i, pair in enumerate(zip(self.weights, self.biases, strict=True)):
            check_map("linear", f"weight {i}", pair, self.x)
