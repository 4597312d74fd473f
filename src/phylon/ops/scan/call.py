"""The descriptions of scan and convolution calls that every backend reads."""

from dataclasses import dataclass

import torch
from torch import Tensor

from phylon.ops.activation import ACTIVATIONS, check_activation
from phylon.ops.checks import check_floats, check_rank, check_shapes
from phylon.spec.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Breaks:
    """Where a row's tokens are no plain continuation, boolean (B, T) each, or ``None`` where nothing is.

    ``resets``: the token starts a document, so that nothing before it counts. ``real``: the token is not padding;
    a padding step may hold anything, leaves the state as it is, and yields zero.
    """

    resets: Tensor | None = None
    real: Tensor | None = None

    def checked(self, batch: int, length: int) -> "Breaks":
        """These, if their shapes fit. No document starts at padding, which leaves the state exactly as it is."""
        for name, mask in (("resets", self.resets), ("real", self.real)):
            if mask is not None and (mask.shape != (batch, length) or mask.dtype != torch.bool):
                raise UserError(f"{name} must be boolean ({batch}, {length}), got {tuple(mask.shape)} {mask.dtype}")
        both = self.resets is not None and self.real is not None
        return Breaks(resets=self.resets & self.real, real=self.real) if both else self


@dataclass(kw_only=True)
class ScanCall:
    """``x``, ``dt`` (B, T, D), ``A`` (D, N), ``B``, ``C`` (B, T, N), ``D`` (D,), ``state`` (B, D, N) or ``None``.

    ``into``, like ``state``, is memory for the last state; a backend may use it.
    """

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    state: Tensor | None
    breaks: Breaks
    into: Tensor | None = None

    def __post_init__(self) -> None:
        check_rank("a scan", self.x, 3, "x (B, T, D)")
        batch, length, width = self.x.shape
        check_rank("a scan", self.A, 2, "A (D, N)")
        size = self.A.shape[1]
        check_floats("a scan", x=self.x, dt=self.dt, A=self.A, B=self.B, C=self.C, D=self.D, state=self.state)
        check_floats("a scan", into=self.into)
        check_shapes(
            "scan",
            dt=(self.dt, (batch, length, width)),
            A=(self.A, (width, size)),
            B=(self.B, (batch, length, size)),
            C=(self.C, (batch, length, size)),
            D=(self.D, (width,)),
            state=(self.state, (batch, width, size)),
            into=(self.into, (batch, width, size)),
        )
        self.breaks = self.breaks.checked(batch, length)


@dataclass(kw_only=True)
class SSDCall:
    """``x`` (B, T, H, P), ``dt`` (B, T, H), ``A``, ``D`` (H,), ``B``, ``C`` (B, T, G, N), ``state`` (B, H, P, N).

    Head h reads group ``h // (H / G)``.
    """

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    state: Tensor | None
    breaks: Breaks
    into: Tensor | None = None

    def __post_init__(self) -> None:
        check_rank("a scan", self.x, 4, "x (B, T, H, P)")
        check_rank("a scan", self.B, 4, "B (B, T, G, N)")
        batch, length, heads, width = self.x.shape
        groups, size = self.B.shape[2:]
        check_floats("a scan", x=self.x, dt=self.dt, A=self.A, B=self.B, C=self.C, D=self.D, state=self.state)
        check_floats("a scan", into=self.into)
        if heads % groups:
            raise UserError(f"{heads} heads are no multiple of {groups} groups")
        check_shapes(
            "scan",
            dt=(self.dt, (batch, length, heads)),
            A=(self.A, (heads,)),
            B=(self.B, (batch, length, groups, size)),
            C=(self.C, (batch, length, groups, size)),
            D=(self.D, (heads,)),
            state=(self.state, (batch, heads, width, size)),
            into=(self.into, (batch, heads, width, size)),
        )
        self.breaks = self.breaks.checked(batch, length)


@dataclass(kw_only=True)
class ConvCall:
    """``x`` (B, T, D), ``weight`` (D, W), ``bias`` (D,) or ``None``, ``tail``, ``into`` (B, W - 1, D) or ``None``.

    ``activation`` is the name of what follows; ``into`` is memory for the new tail; a backend may use it.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    tail: Tensor | None
    breaks: Breaks
    activation: str | None = None
    into: Tensor | None = None

    def __post_init__(self) -> None:
        check_rank("a convolution", self.x, 3, "x (B, T, D)")
        batch, length, width = self.x.shape
        check_rank("a convolution", self.weight, 2, "weight (D, W)")
        reach = self.weight.shape[1]
        check_floats("a convolution", x=self.x, weight=self.weight, bias=self.bias, tail=self.tail, into=self.into)
        check_shapes(
            "convolution",
            weight=(self.weight, (width, reach)),
            bias=(self.bias, (width,)),
            tail=(self.tail, (batch, reach - 1, width)),
            into=(self.into, (batch, reach - 1, width)),
        )
        if self.activation is not None:
            check_activation(self.activation)
        self.breaks = self.breaks.checked(batch, length)

    def start(self) -> Tensor:
        """The tail that came before, in the dtype of ``x``; zeros where there is none."""
        batch, _, width = self.x.shape
        if self.tail is None:
            return self.x.new_zeros(batch, self.weight.shape[1] - 1, width)
        return self.tail.to(self.x.dtype)

    def activated(self, z: Tensor) -> Tensor:
        """What follows the convolution."""
        return z if self.activation is None else ACTIVATIONS[self.activation](z)


def wide(*tensors: Tensor) -> list[Tensor]:
    """Every tensor in one dtype, fp32 at least: the dtype of the state."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return [tensor.to(dtype) for tensor in tensors]


def cleared(tensor: Tensor, real: Tensor | None) -> Tensor:
    """``tensor`` (B, T, …) with zeros at padding. A step of ``dt = 0`` leaves the state exactly as it is."""
    if real is None:
        return tensor
    return tensor.masked_fill(~real.reshape(*real.shape, *[1] * (tensor.ndim - 2)), 0)


def kept(resets: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The factor (B, T) on what came before each step: 0 where a document starts, else 1."""
    return None if resets is None else (~resets).to(dtype)
