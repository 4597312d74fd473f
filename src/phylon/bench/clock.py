"""Timing that holds on a shared machine: interleaved rounds, those in which others took CPU dropped, medians."""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FOREIGN = 0.12
"""Cores that other processes may take in a round."""
_SHORTEST = 0.2
"""Seconds of one side's turn in a round: calls are repeated until then."""


@dataclass(frozen=True)
class Timing:
    """Seconds a call of one side in every kept round, and how many rounds were dropped."""

    seconds: tuple[float, ...]
    calls: int

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """The fastest and the slowest round."""
        return min(self.seconds), max(self.seconds)


@dataclass(frozen=True)
class Rounds:
    """What ``measure`` found; ``clean`` is false where no round was undisturbed, or disturbances cannot be seen."""

    timings: Mapping[str, Timing]
    dropped: int
    clean: bool

    def ratio(self, name: str, base: str) -> float:
        """How many times faster ``name`` is than ``base``: the median over rounds, each of them a pair."""
        pairs = zip(self.timings[base].seconds, self.timings[name].seconds, strict=True)
        return statistics.median(theirs / own for theirs, own in pairs)


def measure(sides: Mapping[str, Callable[[], Any]], *, rounds: int = 5, seconds: float = 30.0) -> Rounds:
    """Time all sides in turns, A B A B, until ``rounds`` rounds are clean or ``seconds`` are over.

    A round in which other processes took more than an eighth of a core is dropped and repeated after a pause; where
    every round is disturbed, the disturbed ones count and the result says so.
    """
    good: list[dict[str, tuple[float, int]]] = []
    bad: list[dict[str, tuple[float, int]]] = []
    start = time.perf_counter()
    while len(good) < rounds and (time.perf_counter() - start < seconds or not (good or bad)):
        turn, quiet = {}, True
        for name, call in sides.items():
            turn[name], alone = _turn(call)
            quiet = quiet and alone
        (good if quiet else bad).append(turn)
        if not quiet:
            time.sleep(0.5)
    kept = good or bad
    timings = {
        name: Timing(tuple(turn[name][0] for turn in kept), sum(turn[name][1] for turn in kept)) for name in sides
    }
    return Rounds(timings, len(bad) if good else 0, bool(good) and _busy() is not None)


def _turn(call: Callable[[], Any]) -> tuple[tuple[float, int], bool]:
    """``(seconds a call, calls)``, and whether the machine was left alone meanwhile."""
    busy, own, start, calls = _busy(), time.process_time(), time.perf_counter(), 0
    while True:
        call()
        _wait()
        calls += 1
        wall = time.perf_counter() - start
        if wall >= _SHORTEST:
            break
    after = _busy()
    if busy is None or after is None:
        return (wall / calls, calls), True
    foreign = (after - busy - (time.process_time() - own)) / wall
    return (wall / calls, calls), foreign <= _FOREIGN + 0.02 / wall


def _wait() -> None:
    """A call on an accelerator is over when its work is."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _busy() -> float | None:
    """CPU seconds that all processes and the hypervisor took since the start, or ``None`` where that is not told."""
    try:
        line = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, line)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
