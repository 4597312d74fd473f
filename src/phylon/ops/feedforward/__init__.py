"""Feed-forward networks, plain and gated, behind one dispatch."""

from torch import Tensor

from phylon.ops.dispatch import Dispatch
from phylon.ops.feedforward.call import FeedForwardCall
from phylon.ops.feedforward.native import Native
from phylon.ops.feedforward.reference import Reference

dispatch: Dispatch[FeedForwardCall] = Dispatch("feedforward", [Native(), Reference()])


def feedforward(
    x: Tensor,
    up: tuple[Tensor, Tensor | None],
    down: tuple[Tensor, Tensor | None],
    gate: tuple[Tensor, Tensor | None] | None = None,
    *,
    activation: str,
    backend: str | None = None,
) -> Tensor:
    """``down(act(up(x)))``, or ``down(act(gate(x)) * up(x))``; a map is a weight (out, in) and a bias or ``None``."""
    call = FeedForwardCall(x, up, down, gate, activation)
    return dispatch.pick(call, backend).run(call)


__all__ = ["FeedForwardCall", "dispatch", "feedforward"]
