"""How often each of several tasks is trained on, and which example comes when: a pure function of the place."""

from collections.abc import Mapping, Sequence

import numpy as np

from phylon.data.buckets import examples_digest
from phylon.data.documents import digest
from phylon.data.loader import permutation
from phylon.spec.errors import UserError

BLOCK = 1024


def mixing_rates(sizes: Sequence[int], cap: int | None, temperature: float) -> np.ndarray:
    """The share of each task: ``r_m = min(e_m, K) / sum of min(e_n, K)``, then ``r_m^(1/T)``, normalised.

    T5 (arXiv:1910.10683), section 3.5.2, examples-proportional mixing with the limit K = ``cap`` (``None``: none) and
    temperature-scaled mixing; ``T = 1`` is proportional to sizes, a large T comes near to equal shares.
    """
    limited = np.array([size if cap is None else min(size, cap) for size in sizes], dtype=np.float64)
    rates = (limited / limited.sum()) ** (1 / temperature)
    return rates / rates.sum()


def quotas(rates: np.ndarray, block: int = BLOCK) -> np.ndarray:
    """How many of ``block`` examples are of each task, int64: the largest remainders are rounded up, none is 0."""
    if len(rates) > block:
        raise UserError(f"{len(rates)} tasks are more than the {block} examples within which their shares hold")
    exact = rates * block
    counts = np.maximum(np.floor(exact).astype(np.int64), 1)
    order = np.argsort(counts - exact, kind="stable")  # who lacks most comes first
    for step in range(int(block - counts.sum())):
        counts[order[step % len(order)]] += 1
    while counts.sum() > block:  # tasks too rare for one in a block have one all the same
        counts[np.argmax(counts)] -= 1
    return counts


class MixedExamples:
    """Tasks mixed in fixed shares: of ``BLOCK`` examples, one epoch of these, each task has exactly its quota.

    A single task is not mixed: its epoch is all of its examples.
    Which task a place has, and which of its examples, is a pure function of (index, epoch): a task's own examples are
    shuffled and walked through again and again, each once before any comes back.
    """

    def __init__(self, tasks: Mapping[str, Sequence[Mapping[str, np.ndarray]]], rates: np.ndarray, seed: int) -> None:
        self.tasks, self.seed = list(tasks.values()), seed
        self.quota = quotas(rates, BLOCK if len(self.tasks) > 1 else len(self.tasks[0]))
        self.task = np.repeat(np.arange(len(self.quota)), self.quota)
        self.within = np.concatenate([np.arange(quota) for quota in self.quota])
        parts = [examples_digest(examples) for examples in self.tasks]
        self._orders: list[dict[int, np.ndarray]] = [{} for _ in self.tasks]
        self.fingerprint = digest("mixed", list(tasks), self.quota.tolist(), parts, seed)

    def __len__(self) -> int:
        return len(self.task)

    def place(self, index: int, epoch: int) -> tuple[int, int]:
        """The task of a place, and the number of the example in it."""
        task = int(self.task[index])
        size = len(self.tasks[task])
        own_epoch, at = divmod(epoch * int(self.quota[task]) + int(self.within[index]), size)
        return task, int(self._order(task, own_epoch)[at])

    def _order(self, task: int, epoch: int) -> np.ndarray:
        """The order of a task's examples in an epoch of its own; each task keeps its last two."""
        kept = self._orders[task]
        if epoch not in kept:
            if len(kept) > 1:
                del kept[next(iter(kept))]
            # Tasks of one size are shuffled apart from each other.
            kept[epoch] = permutation(len(self.tasks[task]), self.seed, epoch << 16 | (task + 1))
        return kept[epoch]

    def example(self, index: int, epoch: int) -> Mapping[str, np.ndarray]:
        task, number = self.place(index, epoch)
        return self.tasks[task][number]
