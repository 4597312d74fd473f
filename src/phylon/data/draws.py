"""Random numbers that are a pure function of a place, so that an example is the same whoever makes it and when."""

import numpy as np

_CHUNK = 16


class Draws:
    """Numbers drawn in order for one place, such as (seed, epoch, index): always the same ones.

    From the counter-based generator Philox (Salmon et al. 2011), whose raw bits NumPy promises for all its versions.
    ``stream`` keeps uses of the same place apart (held-out masks from training masks).
    """

    def __init__(self, seed: int, epoch: int, index: int, stream: int = 0) -> None:
        key = np.array([seed, stream], dtype=np.uint64)
        self._bits = np.random.Philox(key=key, counter=np.array([0, epoch, index, 0], dtype=np.uint64))
        self._left = np.empty(0, np.uint64)

    def raw(self, count: int) -> np.ndarray:
        """``(count,)`` uint64, 64 random bits each."""
        if count > len(self._left):
            fresh = self._bits.random_raw(max(count - len(self._left), _CHUNK))
            self._left = np.concatenate([self._left, fresh])
        found, self._left = self._left[:count], self._left[count:]
        return found

    def uniform(self, count: int) -> np.ndarray:
        """``(count,)`` float64, evenly in [0, 1)."""
        return (self.raw(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def chance(self) -> float:
        """One number, evenly in [0, 1)."""
        return float(self.uniform(1)[0])

    def below(self, bound: int) -> int:
        """A whole number from 0 to ``bound - 1``."""
        assert bound >= 1, bound
        return int(self.chance() * bound)

    def integers(self, bound: int, count: int) -> np.ndarray:
        """``(count,)`` int64 from 0 to ``bound - 1``."""
        return (self.uniform(count) * bound).astype(np.int64)

    def permutation(self, count: int) -> np.ndarray:
        """The numbers 0 to ``count - 1`` in a random order, int64."""
        return np.argsort(self.raw(count), kind="stable")

    def subset(self, count: int, of: int) -> np.ndarray:
        """``count`` different numbers below ``of``, sorted."""
        return np.sort(self.permutation(of)[:count])
