"""The oracle: two or three linear maps and an activation."""

from torch import Tensor
from torch.nn import functional as F

from phylon.ops.activation import ACTIVATIONS
from phylon.ops.feedforward.call import FeedForwardCall


class Reference:
    """PyTorch's own ops, one after the other. Supports everything."""

    name = "reference"

    def available(self) -> str | None:
        return None

    def supports(self, call: FeedForwardCall) -> str | None:
        return None

    def run(self, call: FeedForwardCall) -> Tensor:
        act, up = ACTIVATIONS[call.activation], F.linear(call.x, *call.up)
        hidden = act(up) if call.gate is None else act(F.linear(call.x, *call.gate)) * up
        return F.linear(hidden, *call.down)
