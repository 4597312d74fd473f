"""Loss spikes: how one is recognised, and what a recipe does about it.

A loss is a spike when it lies ``threshold`` robust standard deviations above the median of the last ``window`` good
ones. ``1.4826 MAD`` (the median of the distances to the median) stands for the deviation, at least 1 % of the median:
a calm run does not take noise for one.
"""

from statistics import median

import msgspec

from phylon.spec.base import Mechanism, Slot
from phylon.spec.errors import UserError, check_size
from phylon.spec.registry import register

LEAST_DEVIATION = 0.01


class SpikePolicy(Slot):
    """Slot of ``run.on_spike``."""

    @property
    def window(self) -> int:
        """Steps that are looked back on."""
        raise NotImplementedError

    @property
    def threshold(self) -> float:
        """Robust standard deviations above the median from which a loss is a spike."""
        raise NotImplementedError


class SkipBatch(Mechanism, SpikePolicy, frozen=True, kw_only=True):
    """The update of a spiking batch is left out. For data with a few bad batches."""

    window: int = 64
    threshold: float = 8.0

    def __post_init__(self) -> None:
        _check(self)


class RollBack(Mechanism, SpikePolicy, frozen=True, kw_only=True):
    """Back to the last good checkpoint, past the data since then, more slowly for a while.

    PaLM (arXiv:2204.02311), section 5.1: restart from a checkpoint before the spike (there about 100 steps) and skip
    the batches seen before and during it. The checkpoint must be ``margin`` steps old, since weights are spoiled before
    the loss shows it; the learning rate is multiplied by ``slow`` for the next ``slow_steps`` updates; after ``most``
    times the run stops. Where no checkpoint is old enough yet, the batch is skipped.
    """

    window: int = 64
    threshold: float = 8.0
    margin: int = 10
    slow: float = 0.5
    slow_steps: int = 100
    most: int = 5

    def __post_init__(self) -> None:
        _check(self)
        check_size("margin", self.margin)
        check_size("slow_steps", self.slow_steps, 0)
        check_size("most", self.most)
        if not 0 < self.slow <= 1:
            raise UserError(f"slow is a share of the learning rate, above 0 and at most 1; got {self.slow}")


class SpikeState(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a run remembers: the last good losses, batches passed over, and until which step it goes slowly.

    ``good_until``: the step it went back to last, whose checkpoint needs no ``margin`` to be trusted. The batch of step
    s is number ``s + passed``.
    """

    losses: list[float] = []
    passed: int = 0
    rollbacks: int = 0
    good_until: int = 0
    slow_until: int = 0

    def accept(self, loss: float, policy: SpikePolicy) -> None:
        """Remember a loss that was no spike."""
        self.losses = [*self.losses, loss][-policy.window :]

    def z_score(self, loss: float, policy: SpikePolicy) -> float | None:
        """The robust z-score of ``loss`` if that makes it a spike; ``None`` while half the window is still empty."""
        if len(self.losses) < max(4, policy.window // 2):
            return None
        middle = median(self.losses)
        spread = 1.4826 * median(abs(x - middle) for x in self.losses)
        score = (loss - middle) / max(spread, LEAST_DEVIATION * abs(middle), 1e-12)
        return score if score > policy.threshold else None


def _check(policy: SpikePolicy) -> None:
    check_size("window", policy.window, 8)
    if not policy.threshold > 0:
        raise UserError(f"threshold must be above 0, got {policy.threshold}")


register(SkipBatch, paper="none", cases=lambda: [SkipBatch()])
register(RollBack, paper="arXiv:2204.02311 §5.1", cases=lambda: [RollBack(), RollBack(margin=3, slow=1.0)])
