"""The oracle: both halves turned and put together."""

import torch
from torch import Tensor

from phylon.ops.rotary.call import RotaryCall


class Reference:
    """Four products, two sums, and the copy that joins them. Supports everything."""

    name = "reference"

    def available(self) -> str | None:
        return None

    def supports(self, call: RotaryCall) -> str | None:
        return None

    def run(self, call: RotaryCall) -> Tensor:
        x, cos, sin = call.x, call.cosine, call.sine
        half = cos.shape[-1]
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
        return turned if rest.shape[-1] == 0 else torch.cat([turned, rest], dim=-1)
