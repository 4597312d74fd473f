"""Absolute positions added to the embeddings: sinusoids and a learned table."""

import torch
from torch import Tensor, nn

from phylon.layers.part import InitContext, Part
from phylon.spec.base import Mechanism, Position
from phylon.spec.errors import UserError, check_finite
from phylon.spec.registry import register


class LearnedPositions(Mechanism, Position, frozen=True, kw_only=True):
    """A trained vector for each of ``max_seq_len`` positions. BERT (arXiv:1810.04805), section 3; GPT (2018).

    Parameter ``weight`` (offset + max_seq_len, D). A text longer than the table is refused. ``offset`` is the row of
    position 0, a convention of checkpoints: 0, or RoBERTa's padding id + 1 (arXiv:1907.11692, released code), whose
    first rows no token uses.
    """

    max_seq_len: int
    offset: int = 0

    def __post_init__(self) -> None:
        if self.max_seq_len < 1:
            raise UserError(f"max_seq_len must be at least 1, got {self.max_seq_len}")
        if self.offset < 0:
            raise UserError(f"offset must be at least 0, got {self.offset}")


class Sinusoids(Mechanism, Position, frozen=True, kw_only=True):
    """``sin(pos / theta^(2i/D))`` and the cosine. *Attention Is All You Need* (arXiv:1706.03762), section 3.5.

    ``layout`` places them: "interleaved" (sin, cos, sin, cos, … as the paper writes) or "halves" (all sines, then all
    cosines, as the released code and Marian do). No parameters; any length; computed in fp64.
    """

    theta: float = 10_000.0
    layout: str = "interleaved"

    def __post_init__(self) -> None:
        check_finite("theta", self.theta, above=1)
        if self.layout not in ("interleaved", "halves"):
            raise UserError(f"layout must be 'interleaved' or 'halves', got '{self.layout}'")


class LearnedPositionsModule(Part):
    def __init__(self, spec: LearnedPositions, width: int) -> None:
        super().__init__()
        self.max_seq_len, self.offset = spec.max_seq_len, spec.offset
        self.weight = nn.Parameter(torch.empty(spec.offset + spec.max_seq_len, width))

    def init_parameters(self, init: InitContext) -> None:
        init.draw(self.weight, "embed")

    def forward(self, positions: Tensor) -> Tensor:
        # On a GPU the look-up itself traps, and asking would cost a synchronisation.
        if positions.device.type == "cpu" and positions.numel():
            first, last = (int(p) for p in torch.aminmax(positions))
            if first < 0:
                raise UserError(f"position {first} is negative")
            if last >= self.max_seq_len:
                raise UserError(f"position {last} is beyond the {self.max_seq_len} the model has; shorten the text")
        return nn.functional.embedding(positions + self.offset if self.offset else positions, self.weight)


class SinusoidsModule(Part):
    def __init__(self, spec: Sinusoids, width: int) -> None:
        super().__init__()
        self.spec, self.width = spec, width

    def forward(self, positions: Tensor) -> Tensor:
        """(B or 1, T, D) in fp32."""
        device = positions.device
        # MPS has no fp64.
        positions = positions.cpu() if device.type == "mps" else positions
        pairs = torch.arange((self.width + 1) // 2, dtype=torch.float64, device=positions.device)
        angles = positions.double()[..., None] * self.spec.theta ** (-pairs * 2 / self.width)
        if self.spec.layout == "halves":
            table = torch.cat([angles.sin(), angles.cos()[..., : self.width // 2]], dim=-1)
        else:
            table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., : self.width]
        return table.to(torch.float32).to(device)


register(
    LearnedPositions,
    module=LearnedPositionsModule,
    paper="arXiv:1810.04805 §3",
    cases=lambda: [LearnedPositions(max_seq_len=64), LearnedPositions(max_seq_len=64, offset=2)],
    flops=lambda spec, width, n_keys: 0,
)
register(
    Sinusoids,
    module=SinusoidsModule,
    paper="arXiv:1706.03762 §3.5",
    cases=lambda: [Sinusoids(), Sinusoids(layout="halves")],
    flops=lambda spec, width, n_keys: 0,
)
