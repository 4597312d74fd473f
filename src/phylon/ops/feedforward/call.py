"""The one description of a feed-forward call that every backend reads."""

from dataclasses import dataclass

from torch import Tensor

from phylon.ops.activation import check_activation

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

    @property
    def maps(self) -> tuple[Map, ...]:
        return (self.up, self.down) if self.gate is None else (self.up, self.down, self.gate)
