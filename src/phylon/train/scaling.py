"""Loss scaling for fp16, which lifts small gradients into its range. Micikevicius et al. (arXiv:1710.03740), §3.2."""

import msgspec

FIRST, GROW_EVERY, LEAST = 2.0**16, 2000, 1.0


class LossScale(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``value`` multiplies the loss; it halves when a gradient overflows and doubles after many good steps."""

    value: float = FIRST
    good: int = 0

    def succeeded(self) -> None:
        self.good += 1
        if self.good >= GROW_EVERY:
            self.value, self.good = self.value * 2, 0

    def overflowed(self) -> None:
        self.value, self.good = max(LEAST, self.value / 2), 0
