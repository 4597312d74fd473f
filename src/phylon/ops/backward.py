"""What every op with a backward of its own asks of it: the arithmetic of its forward, wherever it is called from."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from phylon.ops.checks import transformed
from phylon.ops.products import as_given
from phylon.spec.errors import UserError

Backward = Callable[..., Any]


def as_forward(backward: Backward) -> Backward:
    """``backward`` without autocast: of a region around the call it would round what the forward kept wide.

    The forward runs without it as well; what it is to round by then it has been told.
    """

    @wraps(backward)
    def apart(ctx: Any, *grads: Tensor | None) -> Any:
        with as_given(next((grad for grad in grads if grad is not None), None)):
            return backward(ctx, *grads)

    return apart


def once(what: str, instead: str = "use backend 'reference'") -> Callable[[Backward], Backward]:
    """The same for a backward that is computed once and for one gradient: a second derivative, or several gradients at
    once, are refused, with what to use ``instead``."""

    def decorate(backward: Backward) -> Backward:
        @wraps(backward)
        def alone(ctx: Any, *grads: Tensor | None) -> Any:
            if torch.is_grad_enabled():
                raise UserError(f"{what} has no second derivative: {instead}")
            if transformed(*grads):
                raise UserError(f"{what} takes one gradient at a time, none of torch.func or forward mode: {instead}")
            return backward(ctx, *grads)

        return as_forward(alone)

    return decorate
