"""Normalisation over the last dimension, statistics in at least fp32, with the residual sum before it in one op.

Where the squares of a row add up to more than the statistics' dtype holds (fp32: numbers beyond some 1e19) the row is
lost, as in ``torch.nn.functional``: it becomes zeros or NaN, and so does its gradient.
"""

from torch import Tensor

from phylon.ops.dispatch import Dispatch
from phylon.ops.norm.call import NormCall
from phylon.ops.norm.native import Native
from phylon.ops.norm.reference import Reference

dispatch: Dispatch[NormCall] = Dispatch("norm", [Native(), Reference()])


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, backend: str | None = None) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight``, rounded once. Zhang and Sennrich (arXiv:1910.07467), equation 4."""
    call = NormCall(x=x, weight=weight, eps=eps, centred=False)
    return dispatch.pick(call, backend).run(call)[1]


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, backend: str | None = None
) -> Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias``. Ba, Kiros and Hinton (arXiv:1607.06450), section 3."""
    call = NormCall(x=x, weight=weight, bias=bias, eps=eps, centred=True)
    return dispatch.pick(call, backend).run(call)[1]


def add_rms_norm(
    x: Tensor, added: Tensor | None, weight: Tensor | None, eps: float, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """``total = x + added`` (``x`` where there is none) and ``rms_norm(total)``: use both, they share a gradient."""
    call = NormCall(x=x, added=added, weight=weight, eps=eps, centred=False, residual=True)
    return dispatch.pick(call, backend).run(call)


def add_layer_norm(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """``total = x + added`` (``x`` where there is none) and ``layer_norm(total)``."""
    call = NormCall(x=x, added=added, weight=weight, bias=bias, eps=eps, centred=True, residual=True)
    return dispatch.pick(call, backend).run(call)


__all__ = ["NormCall", "add_layer_norm", "add_rms_norm", "dispatch", "layer_norm", "rms_norm"]
