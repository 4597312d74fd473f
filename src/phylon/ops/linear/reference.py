"""The oracle: one ``F.linear`` a map."""

from torch import Tensor
from torch.nn import functional as F

from phylon.ops.linear.call import LinearCall


class Reference:
    """PyTorch's linear map, one after the other. Supports everything."""

    name = "reference"

    def available(self) -> str | None:
        return None

    def supports(self, call: LinearCall) -> str | None:
        return None

    def run(self, call: LinearCall) -> tuple[Tensor, ...]:
        return tuple(F.linear(call.x, w, b) for w, b in zip(call.weights, call.biases, strict=True))
