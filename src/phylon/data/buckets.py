"""Batches by token count: examples of about one length together; the order is a pure function of (seed, step)."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from phylon.data.documents import digest
from phylon.data.loader import Batch, BatchOrder, Example, Examples, Loader, Position, epoch_permutation
from phylon.data.packing import IGNORE
from phylon.spec.errors import UserError

WINDOW = 32  # batches of a shuffled order that are sorted by length together
BUCKET = 8  # lengths that differ by less are mixed freely, and counted as the longest of them
NOWHERE = -1  # the span of a token that is no part of a text
FILLS = {"targets": IGNORE, "spans": NOWHERE}  # padding by the end of a name, where it is not 0
_BATCHES = 1 << 63  # keys the order of the batches apart from that of the examples


class TokenBatches:
    """Which examples make up each batch: all of an epoch once, at most ``max_tokens`` a batch with its padding.

    *Attention Is All You Need* (arXiv:1706.03762), section 5.1: pairs of about one length together. ``lengths`` is
    ``(N,)`` or ``(N, k)``: with several texts an example the longest counts, so that ``max_tokens`` bounds each of
    them. An epoch shuffles the examples, sorts them by length rounded up to ``bucket``, cuts the list where a batch is
    full, and shuffles the batches. The rounded lengths in order are the same in every epoch, and so is the number of
    batches: any step is found without walking there.
    """

    def __init__(self, lengths: np.ndarray, max_tokens: int, seed: int, *, bucket: int = BUCKET) -> None:
        if not 0 <= seed < 1 << 63:
            raise UserError(f"the data seed is {seed}; it must lie between 0 and 2^63 - 1")
        longest = lengths if lengths.ndim == 1 else lengths.max(1)
        assert len(longest), "there are no examples to make batches of"
        if int(longest.max()) > max_tokens:
            raise UserError(
                f"an example has {int(longest.max())} tokens, more than the {max_tokens} of a batch; "
                "raise max_tokens, or leave out or cut what is longer"
            )
        self.max_tokens, self.seed, self.bucket = max_tokens, seed, bucket
        # A bucket's bound may pass what a batch takes although its examples do not.
        self._rounded = np.minimum(-(-longest.astype(np.int64) // bucket) * bucket, max_tokens)
        self._starts = _cut(np.sort(self._rounded), max_tokens)
        self._memo: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._starts) - 1

    @property
    def n_examples(self) -> int:
        return len(self._rounded)

    def place(self, step: int) -> tuple[int, int]:
        """The epoch of batch ``step`` and its number in it."""
        assert step >= 0, step
        return divmod(step, len(self))

    def rows(self, step: int) -> np.ndarray:
        """The numbers of the examples of batch ``step``, int64."""
        epoch, index = self.place(step)
        if self._memo is None or self._memo[0] != epoch:
            shuffled = epoch_permutation(self.n_examples, self.seed, epoch)
            self._memo = (epoch, shuffled[np.argsort(self._rounded[shuffled], kind="stable")])
        which = int(epoch_permutation(len(self), self.seed, epoch | _BATCHES)[index])
        return self._memo[1][self._starts[which] : self._starts[which + 1]]


class BucketLoader(Position):
    """Training batches by token count over ``examples``, each a mapping of arrays ``(T,)`` by name.

    A batch is what ``padded`` makes of its examples.
    """

    def __init__(self, examples: Sequence[Example], max_tokens: int, seed: int) -> None:
        self.examples = examples
        lengths = np.array([max(len(array) for array in example.values()) for example in examples])
        self.order = TokenBatches(lengths, max_tokens, seed)
        self.step = 0
        self._identity: dict[str, Any] = {
            "seed": seed,
            "max_tokens": max_tokens,
            "n_examples": len(examples),
            "data": examples_digest(examples),
        }

    @property
    def steps_per_epoch(self) -> int:
        """Batches that hold every example once."""
        return len(self.order)

    def heaviest(self) -> Batch:
        """The batch of an epoch that is largest with its padding; of equal ones the one of the longest examples."""
        return max((self.batch(step) for step in range(len(self.order))), key=_area)

    def batch(self, step: int) -> Batch:
        """Batch ``step``, which depends on the examples, ``max_tokens``, the seed and the step alone."""
        return padded([self.examples[int(row)] for row in self.order.rows(step)])


class PaddedLoader(Loader):
    """A ``Loader`` of examples of unequal lengths: a batch of rows is what ``padded`` makes of them."""

    def collate(self, examples: Sequence[Example]) -> Batch:
        return padded(examples)

    def heaviest(self) -> Batch:
        """A batch that holds the longest example, as one of every epoch does, and is padded to it."""
        numbers = range(len(self.rows))
        longest = max(numbers, key=lambda index: sum(map(np.size, self.rows.example(index, 0).values())))
        others = [self.rows.example(index % len(numbers), 0) for index in range(self.order.batch_size - 1)]
        return self.collate([self.rows.example(longest, 0), *others])


class Measured(Examples, Protocol):
    """Numbered examples whose lengths are known and stay."""

    @property
    def lengths(self) -> Sequence[int]: ...


@dataclass(frozen=True, eq=False)
class LengthOrder(BatchOrder):
    """Batches of rows of about one length: every epoch holds every row once, as ``BatchOrder``'s does.

    The shuffled rows of an epoch are taken ``WINDOW`` batches at a time and sorted by length; the batches of each
    window are shuffled. Rows that fill up the last batch of the epoch before, or begin one that the next epoch fills
    up, are of any length.
    """

    lengths: np.ndarray
    _memo: dict[int, np.ndarray] = field(default_factory=dict)

    def epoch(self, number: int) -> np.ndarray:
        if number not in self._memo:
            self._memo.clear()
            self._memo[number] = self._sorted(number)
        return self._memo[number]

    def _sorted(self, number: int) -> np.ndarray:
        shuffled, size = BatchOrder.epoch(self, number).copy(), self.batch_size
        begin = -number * self.n_rows % size  # the rows that the last batch of the epoch before still takes
        end = begin + max(0, self.n_rows - begin) // size * size
        for start in range(begin, end, WINDOW * size):
            rows = shuffled[start : min(start + WINDOW * size, end)]
            batches = rows[np.argsort(self.lengths[rows], kind="stable")].reshape(-1, size)
            order = epoch_permutation(len(batches), self.seed, number << 32 | start + 1 | _BATCHES)
            rows[:] = batches[order].reshape(-1)
        return shuffled


class LengthLoader(PaddedLoader):
    """A ``PaddedLoader`` whose batches hold examples of about one length, the longest array of each."""

    def __init__(self, rows: Measured, batch_size: int, seed: int) -> None:
        super().__init__(rows, batch_size, seed)
        self.order = LengthOrder(len(rows), batch_size, seed, np.array(rows.lengths, np.int64))
        self._identity["window"] = WINDOW


def _area(batch: Batch) -> tuple[int, int]:
    """Numbers in a batch, and in a row of it."""
    total = sum(tensor.numel() for tensor in batch.values())
    return total, total // len(next(iter(batch.values())))


def padded(examples: Sequence[Example]) -> Batch:
    """Examples as one batch: arrays ``(T, …)`` padded on the right to the longest of their name, others stacked.

    Padding is 0, segment 0, no target and no part of a text: names that end in ``targets`` are filled with ``IGNORE``,
    those that end in ``spans`` with ``NOWHERE``. ``segments`` come with the examples (1 where a token is real).
    """
    found: dict[str, Tensor] = {}
    for name in examples[0]:
        arrays = [example[name] for example in examples]
        if arrays[0].ndim == 0 or len({array.shape for array in arrays}) == 1:
            found[name] = torch.from_numpy(np.stack(arrays))
            continue
        fill = next((value for end, value in FILLS.items() if name.endswith(end)), 0)
        shape = (len(arrays), max(map(len, arrays)), *arrays[0].shape[1:])
        whole = np.full(shape, fill, arrays[0].dtype)
        for row, array in zip(whole, arrays, strict=True):
            row[: len(array)] = array
        found[name] = torch.from_numpy(whole)
    return found


def examples_digest(examples: Sequence[Example]) -> str:
    """A hash of every value of the examples."""
    hashed = hashlib.blake2b(digest_size=16)
    for example in examples:
        for name, array in example.items():
            hashed.update(f"{name}{array.shape}{array.dtype.str}".encode())
            hashed.update(np.ascontiguousarray(array).data)
    return digest("examples", len(examples), hashed.hexdigest())


def _cut(lengths: np.ndarray, max_tokens: int) -> np.ndarray:
    """Where batches begin in a list sorted by length, its end included: as many as fit when padded to the last."""
    starts, values = [0], lengths.tolist()
    for index, length in enumerate(values):
        if length * (index + 1 - starts[-1]) > max_tokens:
            starts.append(index)
    return np.array([*starts, len(values)])
