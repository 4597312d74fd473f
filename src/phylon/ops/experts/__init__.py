"""Experts: many feed-forward networks of which every token uses a few, behind one dispatch."""

from typing import Any

from torch import Tensor

from phylon.ops.dispatch import Dispatch, Reason
from phylon.ops.experts.call import ExpertCall, ExpertWeights
from phylon.ops.experts.grouped import Grouped
from phylon.ops.experts.native import Native
from phylon.ops.experts.reference import Reference

dispatch: Dispatch[ExpertCall] = Dispatch("experts", [Native(), Grouped(), Reference()])


def experts(
    x: Tensor,
    chosen: Tensor,
    gates: Tensor,
    weights: ExpertWeights,
    *,
    activation: str = "silu",
    dropout: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """``sum over j of gates[n, j] * FFN of expert chosen[n, j] (x[n])``: (N, D). arXiv:1701.06538, equation 1.

    ``x`` (N, D), ``chosen`` (N, k) int64 with -1 where a choice is not dispatched (padding, dropped: it adds zero),
    ``gates`` (N, k). The product with the gates and the sum over choices are in the gates' dtype where that is wider.
    ``backend`` forces one; if it refuses, ``UserError`` gives its reason.
    """
    call = ExpertCall(x=x, chosen=chosen, gates=gates, weights=weights, activation=activation, dropout=dropout)
    return dispatch.pick(call, backend).run(call)


def explain(
    x: Tensor, chosen: Tensor, gates: Tensor, weights: ExpertWeights, *, backend: str | None = None, **options: Any
) -> list[Reason]:
    """Which backend would run this call, and why each other one would not; the options are those of ``experts``."""
    return dispatch.explain(ExpertCall(x=x, chosen=chosen, gates=gates, weights=weights, **options), backend)


__all__ = ["ExpertCall", "ExpertWeights", "dispatch", "experts", "explain"]
