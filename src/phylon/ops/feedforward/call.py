"""The one description of a feed-forward call that every backend reads."""

from dataclasses import dataclass

from torch import Tensor

from phylon.ops.activation import check_activation
from phylon.ops.checks import check_map, check_shapes

Map = tuple[Tensor, Tensor | None]


@dataclass
class FeedForwardCall:
    """``x`` (..., D); ``up`` and ``gate`` of (F, D) and (F,), ``down`` of (D, F) and (D,)."""

    x: Tensor
    up: Map
    down: Map
    gate: Map | None
    activation: str

    def __post_init__(self) -> None:
        check_activation(self.activation)
        hidden, width = self.up[0].shape if self.up[0].ndim == 2 else (-1, -1)
        check_map("feedforward", "up", self.up, self.x)
        check_map("feedforward", "down", self.down, None, hidden)
        if self.gate is not None:
            check_map("feedforward", "gate", self.gate, self.x)
            check_shapes("feedforward", gate=(self.gate[0], (hidden, width)))

    @property
    def maps(self) -> tuple[Map, ...]:
        return (self.up, self.down) if self.gate is None else (self.up, self.down, self.gate)
