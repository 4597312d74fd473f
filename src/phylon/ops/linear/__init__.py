"""Linear maps of one input, behind one dispatch: ``x W^T + b`` for every (W, b)."""

from torch import Tensor

from phylon.ops.dispatch import Dispatch
from phylon.ops.linear.call import LinearCall
from phylon.ops.linear.joined import Joined, is_few
from phylon.ops.linear.reference import Reference

dispatch: Dispatch[LinearCall] = Dispatch("linear", [Joined(), Reference()])


def linears(
    x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...], *, backend: str | None = None
) -> tuple[Tensor, ...]:
    """``x`` (..., K) through each of ``weights`` (N_i, K) and ``biases`` (N_i,): a tuple of (..., N_i)."""
    call = LinearCall(x, weights, biases)
    return dispatch.pick(call, backend).run(call)


__all__ = ["LinearCall", "dispatch", "is_few", "linears"]
