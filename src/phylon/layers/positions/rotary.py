"""Rotary position embedding, and the ways its frequencies are stretched to longer texts."""

import math

import torch
from torch import Tensor

from phylon.layers.context import Context
from phylon.ops.rotary import rotate
from phylon.spec.base import Mechanism, RopeScaling, Slot
from phylon.spec.errors import UserError, check_finite
from phylon.spec.registry import register


class LinearScaling(Mechanism, RopeScaling, frozen=True, kw_only=True):
    """Position interpolation: every frequency divided by ``factor``. Chen et al. (arXiv:2306.15595), equation 4."""

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self.factor)

    def scale(self, inv_freq: Tensor, theta: float) -> tuple[Tensor, float]:
        return inv_freq / self.factor, 1.0


class NTKScaling(Mechanism, RopeScaling, frozen=True, kw_only=True):
    """NTK-aware: theta times ``factor ** (dim / (dim - 2))``. YaRN paper (arXiv:2309.00071), section 3.1."""

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self.factor)

    def scale(self, inv_freq: Tensor, theta: float) -> tuple[Tensor, float]:
        return _stretched(inv_freq, theta, self.factor), 1.0


class DynamicNTKScaling(Mechanism, RopeScaling, frozen=True, kw_only=True):
    """Dynamic NTK, resolved: the theta for texts of ``seq_len`` tokens, whatever the text at hand.

    YaRN paper (arXiv:2309.00071), section 3.3: theta times ``(factor s - (factor - 1)) ** (dim / (dim - 2))`` with
    ``s = max(1, seq_len / original_max_seq_len)``. The published scheme recomputes it as a text grows, so that keys in
    the state were rotated with other frequencies than the queries; a fixed number obeys the law.
    """

    factor: float
    original_max_seq_len: int
    seq_len: int

    def __post_init__(self) -> None:
        _check_factor(self.factor, self.original_max_seq_len)
        if self.seq_len < 1:
            raise UserError(f"seq_len must be at least 1, got {self.seq_len}")

    def scale(self, inv_freq: Tensor, theta: float) -> tuple[Tensor, float]:
        stretch = max(1.0, self.seq_len / self.original_max_seq_len)
        return _stretched(inv_freq, theta, self.factor * stretch - (self.factor - 1)), 1.0


class YarnScaling(Mechanism, RopeScaling, frozen=True, kw_only=True):
    """NTK by parts and an attention temperature. YaRN (arXiv:2309.00071), section 3.2 (ramp) and 3.4 (temperature).

    A pair that turns more than ``beta_fast`` times over the original length keeps its frequency, one that turns less
    than ``beta_slow`` times is divided by ``factor``, linear in between. Cosines and sines are multiplied by
    ``attention_factor`` (``None``: ``0.1 ln(factor) + 1``). ``round_ramp`` is the convention of whether the ends of the
    ramp are rounded outwards to whole pairs, as the released code does.
    """

    factor: float
    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    round_ramp: bool = True

    def __post_init__(self) -> None:
        _check_factor(self.factor, self.original_max_seq_len)
        check_finite("beta_fast", self.beta_fast)
        check_finite("attention_factor", self.attention_factor)
        if not self.beta_fast > self.beta_slow > 0:
            raise UserError(f"beta_fast {self.beta_fast} must be above beta_slow {self.beta_slow}, and that above 0")

    def scale(self, inv_freq: Tensor, theta: float) -> tuple[Tensor, float]:
        dim = 2 * len(inv_freq)

        def pair_turning(turns: float) -> float:
            return dim * math.log(self.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair_turning(self.beta_fast), pair_turning(self.beta_slow)
        if self.round_ramp:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        pairs = torch.arange(len(inv_freq), dtype=torch.float64, device=inv_freq.device)
        ramp = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
        factor = self.attention_factor
        if factor is None:
            factor = 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0
        return inv_freq / self.factor * ramp + inv_freq * (1 - ramp), factor


class Llama3Scaling(Mechanism, RopeScaling, frozen=True, kw_only=True):
    """By wavelength: long ones divided by ``factor``, short ones kept, smooth between.

    Llama 3 (arXiv:2407.21783), section 3.4.2, in the form of the released code.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int

    def __post_init__(self) -> None:
        _check_factor(self.factor, self.original_max_seq_len)
        check_finite("low_freq_factor", self.low_freq_factor)
        check_finite("high_freq_factor", self.high_freq_factor)
        if self.high_freq_factor <= self.low_freq_factor:
            raise UserError(
                f"high_freq_factor {self.high_freq_factor} must be above low_freq_factor {self.low_freq_factor}"
            )

    def scale(self, inv_freq: Tensor, theta: float) -> tuple[Tensor, float]:
        turns = self.original_max_seq_len * inv_freq / (2 * math.pi)
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = smooth.clamp(0, 1)
        return (1 - smooth) * inv_freq / self.factor + smooth * inv_freq, 1.0


class FrequencyFactors(Mechanism, RopeScaling, frozen=True, kw_only=True):
    """Each frequency divided by a number of its own, as GGUF stores it. LongRoPE (arXiv:2402.13753), section 3.2."""

    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        for factor in self.factors:
            _check_factor(factor)

    def scale(self, inv_freq: Tensor, theta: float) -> tuple[Tensor, float]:
        if len(self.factors) != len(inv_freq):
            raise UserError(f"{len(self.factors)} frequency factors do not fit {len(inv_freq)} rotary pairs")
        return inv_freq / torch.tensor(self.factors, dtype=torch.float64, device=inv_freq.device), 1.0


def _check_factor(factor: float, original_max_seq_len: int = 1) -> None:
    if not 0 < factor < math.inf:
        raise UserError(f"the scaling factor must be above 0, got {factor}")
    if original_max_seq_len < 1:
        raise UserError(f"original_max_seq_len must be at least 1, got {original_max_seq_len}")


class Rotation(Slot):
    """The slot of a mixer for a rotation of queries and keys."""

    def check(self, head_dim: int) -> None:
        """Raise ``UserError`` where heads of ``head_dim`` cannot be turned."""
        raise NotImplementedError

    def turn(self, x: Tensor, ctx: Context) -> Tensor:
        """``x`` (B, T, H, E) turned by the positions of this call."""
        raise NotImplementedError


class Rotary(Mechanism, Rotation, frozen=True, kw_only=True):
    """Rotates pairs (i, i + dim/2) of queries and keys by ``position x theta^(-2i/dim)``: scores see distances only.

    RoFormer (arXiv:2104.09864), section 3.2.2, in the half-split layout. ``dim`` is the number of leading features
    that turn (``None``: all of the head). Angles are computed from the spec in fp64 and never cast with the model.
    ``x`` (B, T, H, E). Cost: O(E) a token and head.
    """

    theta: float = 10_000.0
    dim: int | None = None
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        check_finite("theta", self.theta, above=1)
        if self.dim is not None and (self.dim < 2 or self.dim % 2):
            raise UserError(f"rotary dim must be even and at least 2, got {self.dim}")

    def width(self, head_dim: int) -> int:
        """How many features turn in a head of ``head_dim``."""
        width = head_dim if self.dim is None else self.dim
        if width > head_dim or width % 2:
            raise UserError(f"rotary dim {width} does not fit a head of {head_dim}: it must be even and no larger")
        return width

    def check(self, head_dim: int) -> None:
        self.width(head_dim)

    def turn(self, x: Tensor, ctx: Context) -> Tensor:
        return rotate(x, self.in_context(ctx, x.shape[-1]))

    def tables(self, positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines (B or 1, T, 1, dim / 2) in fp32, at integer ``positions`` (B or 1, T)."""
        device = positions.device
        # MPS has no fp64.
        positions = positions.cpu() if device.type == "mps" else positions
        inv_freq, factor = self.frequencies(head_dim, positions.device)
        angles = positions.double()[..., None, None] * inv_freq
        cos, sin = angles.cos() * factor, angles.sin() * factor
        return cos.to(torch.float32).to(device), sin.to(torch.float32).to(device)

    def frequencies(self, head_dim: int, device: torch.device | str = "cpu") -> tuple[Tensor, float]:
        """Inverse frequencies (dim / 2,) in fp64, and the factor on cosines and sines."""
        inv_freq = _frequencies(self.theta, self.width(head_dim), torch.device(device))
        return (inv_freq, 1.0) if self.scaling is None else self.scaling.scale(inv_freq, self.theta)

    def in_context(self, ctx: Context, head_dim: int) -> tuple[Tensor, Tensor]:
        """The tables at this call's positions, computed once per forward pass."""
        return ctx.memo((self, head_dim), lambda: self.tables(ctx.records.positions, head_dim))


def _frequencies(theta: float, dim: int, device: torch.device) -> Tensor:
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)


def _stretched(inv_freq: Tensor, theta: float, factor: float) -> Tensor:
    """Frequencies of ``theta x factor ** (dim / (dim - 2))``: the last is divided by ``factor``, the first kept."""
    dim = 2 * len(inv_freq)
    if dim == 2:
        raise UserError("NTK scaling needs a rotary dim of at least 4")
    return _frequencies(theta * factor ** (dim / (dim - 2)), dim, inv_freq.device)


_LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8)
_YARN = YarnScaling(factor=4.0, original_max_seq_len=8)
_DYNAMIC = DynamicNTKScaling(factor=2.0, original_max_seq_len=8, seq_len=32)

register(LinearScaling, paper="arXiv:2306.15595 eq. 4", cases=lambda: [LinearScaling(factor=2.0)])
register(NTKScaling, paper="arXiv:2309.00071 §3.1", cases=lambda: [NTKScaling(factor=2.0)])
register(DynamicNTKScaling, paper="arXiv:2309.00071 §3.3", cases=lambda: [_DYNAMIC])
register(YarnScaling, paper="arXiv:2309.00071 §3.2, 3.4", cases=lambda: [_YARN, _YARN.replace(round_ramp=False)])
register(Llama3Scaling, paper="arXiv:2407.21783 §3.4.2", cases=lambda: [_LLAMA3])
register(
    FrequencyFactors, paper="arXiv:2402.13753 §3.2", cases=lambda: [FrequencyFactors(factors=(1.0, 2.0, 4.0, 8.0))]
)
register(
    Rotary, paper="arXiv:2104.09864 §3.2.2", cases=lambda: [Rotary(), Rotary(dim=4), Rotary(theta=500.0, scaling=_YARN)]
)
