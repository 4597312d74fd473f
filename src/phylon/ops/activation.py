"""The named activations of feed-forward networks."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from phylon.spec.errors import UserError, did_you_mean

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
}
"""relu: Glorot et al. 2011; gelu, exact and by tanh: arXiv:1606.08415; silu: arXiv:1606.08415 and 1702.03118."""


def check_activation(name: str) -> None:
    """Refuse an unknown name with the nearest known one."""
    if name not in ACTIVATIONS:
        raise UserError(f"unknown activation '{name}'{did_you_mean(name, ACTIVATIONS)}")
