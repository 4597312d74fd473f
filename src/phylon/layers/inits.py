"""How the weights of a new model are drawn. Biases start at 0 and norm gains at 1; their modules see to that."""

import math

import torch
from torch import Tensor

from phylon.spec.base import Init, Mechanism, Role
from phylon.spec.errors import check_finite
from phylon.spec.registry import register


def _normal(weight: Tensor, std: float, generator: torch.Generator) -> None:
    drawn = torch.empty(weight.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
    with torch.no_grad():
        weight.copy_(drawn)


class NormalInit(Mechanism, Init, frozen=True, kw_only=True):
    """Every weight from a normal distribution of one ``std``. BERT (arXiv:1810.04805), released code: 0.02."""

    std: float = 0.02

    def __post_init__(self) -> None:
        check_finite("std", self.std, above=0)

    def draw(self, weight: Tensor, role: Role, n_branches: int, generator: torch.Generator) -> None:
        _normal(weight, self.std, generator)


class DepthScaledInit(Mechanism, Init, frozen=True, kw_only=True):
    """Normal, the last map of every residual branch divided by ``sqrt(n_branches)``. GPT-2 report, section 2.3."""

    std: float = 0.02

    def __post_init__(self) -> None:
        check_finite("std", self.std, above=0)

    def draw(self, weight: Tensor, role: Role, n_branches: int, generator: torch.Generator) -> None:
        _normal(weight, self.std / math.sqrt(n_branches) if role == "out" else self.std, generator)


class FanInInit(Mechanism, Init, frozen=True, kw_only=True):
    """Normal with ``gain / sqrt(fan_in)``, embeddings with 1: scores spread, so that tests see errors.

    LeCun et al., Efficient BackProp (1998), section 4.6.
    """

    gain: float = 1.0

    def __post_init__(self) -> None:
        check_finite("gain", self.gain, above=0)

    def draw(self, weight: Tensor, role: Role, n_branches: int, generator: torch.Generator) -> None:
        _normal(weight, 1.0 if role == "embed" else self.gain / math.sqrt(weight.shape[-1]), generator)


register(NormalInit, paper="arXiv:1810.04805", cases=lambda: [NormalInit()])
register(DepthScaledInit, paper="GPT-2 report §2.3", cases=lambda: [DepthScaledInit()])
register(FanInInit, paper="LeCun et al. 1998 §4.6", cases=lambda: [FanInInit(gain=2.0)])
