"""How many CPU threads a run computes with: as told, or measured, since busy cores make every barrier wait."""

import time
from collections.abc import Callable

import torch


def faster_threads(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> int:
    """All of PyTorch's threads or one, whichever does ``work`` sooner now; the number is left set.

    Where other programs keep the cores busy, two threads can take ten times as long as one.
    """
    every = torch.get_num_threads()
    if every == 1:
        return 1
    took = {}
    for threads in (1, every):
        torch.set_num_threads(threads)
        work()  # the first time pays for warming up
        begun = clock()
        work()
        took[threads] = clock() - begun
    best = min(took, key=lambda threads: took[threads])
    torch.set_num_threads(best)
    return best
