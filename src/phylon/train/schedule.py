"""Learning-rate schedules: pure functions of the step, as shares of the peak rate ``optim.lr``.

Every schedule is a registered spec with ``ratio(step, total)``: ``step`` counts updates from 0, ``total`` is how many
there will be. A warmup of W updates rises linearly and is at 1 at step W; what decays reaches its end value at
``total``, one past the last update, so that no update is wasted on a rate of 0.
"""

import math

from phylon.spec.base import Mechanism, Slot
from phylon.spec.errors import UserError
from phylon.spec.registry import register


class Schedule(Slot):
    """The share of the peak learning rate at each step."""

    @property
    def warmup(self) -> int:
        """Updates until the rate is at its peak."""
        raise NotImplementedError

    @property
    def total(self) -> int | None:
        """The length of the schedule, where it is not that of the run."""
        raise NotImplementedError

    def ratio(self, step: int, total: int) -> float:
        """The share of the peak at ``step`` (from 0) of ``total``."""
        raise NotImplementedError


class Constant(Mechanism, Schedule, frozen=True, kw_only=True):
    """Warmup, then 1."""

    warmup: int = 0
    total: int | None = None

    def __post_init__(self) -> None:
        _check(self.warmup, self.total)

    def ratio(self, step: int, total: int) -> float:
        return _rise(step, self.warmup)


class WarmupCosine(Mechanism, Schedule, frozen=True, kw_only=True):
    """Warmup, then half a cosine from 1 to ``min_ratio``. GPT-3 (arXiv:2005.14165), appendix B (to 0.1).

    ``min_ratio + (1 - min_ratio) (1 + cos(pi t)) / 2`` with ``t = (step - W) / (total - W)``.
    """

    warmup: int = 0
    min_ratio: float = 0.1
    total: int | None = None

    def __post_init__(self) -> None:
        _check(self.warmup, self.total, self.min_ratio)

    def ratio(self, step: int, total: int) -> float:
        if step < self.warmup:
            return _rise(step, self.warmup)
        done = _share(step, self.warmup, total)
        return self.min_ratio + (1 - self.min_ratio) * (1 + math.cos(math.pi * done)) / 2


class Linear(Mechanism, Schedule, frozen=True, kw_only=True):
    """Warmup, then a straight line from 1 to ``min_ratio``. BERT (arXiv:1810.04805), appendix A.2 (down to 0)."""

    warmup: int = 0
    min_ratio: float = 0.0
    total: int | None = None

    def __post_init__(self) -> None:
        _check(self.warmup, self.total, self.min_ratio)

    def ratio(self, step: int, total: int) -> float:
        if step < self.warmup:
            return _rise(step, self.warmup)
        return 1 - (1 - self.min_ratio) * _share(step, self.warmup, total)


class InverseSqrt(Mechanism, Schedule, frozen=True, kw_only=True):
    """``min(n / W, sqrt(W / n))`` with ``n = step + 1``. *Attention Is All You Need* (arXiv:1706.03762), equation 3.

    The paper's rate is this times a peak of ``d_model^-0.5 W^-0.5``, which is ``optim.lr`` here. It has no end.
    """

    warmup: int = 4000
    total: int | None = None

    def __post_init__(self) -> None:
        _check(self.warmup, self.total)
        if self.warmup < 1:
            raise UserError(f"warmup of inverse_sqrt is {self.warmup}; it must be at least 1")

    def ratio(self, step: int, total: int) -> float:
        n = step + 1
        return min(n / self.warmup, math.sqrt(self.warmup / n))


class WSD(Mechanism, Schedule, frozen=True, kw_only=True):
    """Warmup, a stable phase at 1, a decay over the last share. MiniCPM (arXiv:2404.06395), section 4.2.

    In the last ``decay`` (a share of ``total``) the ratio is ``min_ratio^t``, ``t`` from 0 to 1: the paper's
    exponential annealing.
    """

    warmup: int = 0
    decay: float = 0.1
    min_ratio: float = 0.1
    total: int | None = None

    def __post_init__(self) -> None:
        _check(self.warmup, self.total, self.min_ratio)
        if not 0 < self.decay <= 1:
            raise UserError(f"decay is the share of the run that decays, above 0 and at most 1; got {self.decay}")
        if self.min_ratio == 0:
            raise UserError("min_ratio of wsd must be above 0: its decay is exponential")

    def ratio(self, step: int, total: int) -> float:
        start = max(self.warmup, round(total * (1 - self.decay)))
        if step < self.warmup:
            return _rise(step, self.warmup)
        return 1.0 if step < start else self.min_ratio ** _share(step, start, total)


def _rise(step: int, warmup: int) -> float:
    return min(1.0, (step + 1) / (warmup + 1))


def _share(step: int, start: int, total: int) -> float:
    """How much of the way from ``start`` to ``total`` is done, 0 to 1."""
    return min(1.0, (step - start) / max(1, total - start))


def _check(warmup: int, total: int | None, min_ratio: float = 0.0) -> None:
    if warmup < 0:
        raise UserError(f"warmup is a number of steps and cannot be {warmup}")
    if total is not None and total < 1:
        raise UserError(f"total is a number of steps and cannot be {total}")
    if total is not None and warmup >= total:
        raise UserError(f"warmup {warmup} must be less than the total of {total} steps")
    if not 0 <= min_ratio <= 1:
        raise UserError(f"min_ratio is a share of the peak rate, 0 to 1; got {min_ratio}")


register(Constant, paper="none", cases=lambda: [Constant(), Constant(warmup=3)])
register(WarmupCosine, paper="arXiv:2005.14165 app. B", cases=lambda: [WarmupCosine(), WarmupCosine(warmup=3)])
register(Linear, paper="arXiv:1810.04805 app. A.2", cases=lambda: [Linear(warmup=3), Linear(min_ratio=0.2)])
register(InverseSqrt, paper="arXiv:1706.03762 eq. 3", cases=lambda: [InverseSqrt(warmup=4)])
register(WSD, paper="arXiv:2404.06395 §4.2", cases=lambda: [WSD(warmup=3, decay=0.3)])
