"""Batches in a shuffled order that is a pure function of (seed, step), so that a run resumes exactly anywhere."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from phylon.data.packing import IGNORE
from phylon.spec.errors import UserError

Batch = dict[str, Tensor]
Example = Mapping[str, np.ndarray]


class Examples(Protocol):
    """What a loader needs: numbered examples, arrays by name, and a hash of all of them.

    An example that is drawn anew every epoch is a pure function of its index and the epoch. The arrays of one name have
    one shape over the examples.
    """

    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...

    def example(self, index: int, epoch: int) -> Example: ...


class Batches(Protocol):
    """What training needs of a loader: batch ``step`` as a pure function, and what the order depends on."""

    step: int

    def batch(self, step: int) -> Batch: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@lru_cache(maxsize=2)
def epoch_permutation(n_rows: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the rows in one epoch, ``(n_rows,)`` int64: a pure function of its arguments.

    Rows are sorted by 64 random bits each, from the counter-based generator Philox under the key (seed, epoch)
    (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). NumPy promises the raw bits for all its
    versions, which it does not promise for ``Generator.permutation``.
    """
    keys = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(n_rows)
    order = np.argsort(keys, kind="stable")
    order.flags.writeable = False
    return order


@dataclass(frozen=True)
class BatchOrder:
    """Which rows make up each batch, for ever: epoch follows epoch without a gap, so a batch may hold the end of one
    and the start of the next, no row is left out of an epoch, and a batch may be larger than the data."""

    n_rows: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"batch_size is {self.batch_size}; it must be at least 1")
        if not 0 <= self.seed < 1 << 64:
            raise UserError(f"the data seed is {self.seed}; it must lie between 0 and 2^64 - 1")
        assert self.n_rows >= 1, self.n_rows

    def rows(self, step: int) -> np.ndarray:
        """The row numbers of batch ``step``, ``(batch_size,)`` int64."""
        return np.array([index for index, _ in self.places(step)], dtype=np.int64)

    def places(self, step: int) -> list[tuple[int, int]]:
        """The ``(row number, epoch)`` of every row of batch ``step``."""
        assert step >= 0, step
        numbers = range(step * self.batch_size, (step + 1) * self.batch_size)
        found = [divmod(number, self.n_rows) for number in numbers]
        return [(int(self.epoch(epoch)[index]), epoch) for epoch, index in found]

    def epoch(self, number: int) -> np.ndarray:
        """The rows of an epoch in order, ``(n_rows,)``."""
        return epoch_permutation(self.n_rows, self.seed, number)

    def place(self, step: int) -> tuple[int, int]:
        """The epoch and the index in it at which batch ``step`` begins."""
        return divmod(step * self.batch_size, self.n_rows)


class Position:
    """The next step of an order, saved and put back; ``order.place(step)`` says for the reader where that is."""

    order: Any
    step: int
    _identity: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        """The next step (with its epoch and index, for the reader) and what the order depends on, as plain JSON."""
        epoch, index = self.order.place(self.step)
        return {"step": self.step, "epoch": epoch, "index": index, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position; another seed, batch size or data is refused with every difference named."""
        changed = [
            f"{name} was {state.get(name)!r} and is now {value!r}"
            for name, value in self._identity.items()
            if state.get(name) != value
        ]
        if changed:
            raise UserError(f"the data position cannot be resumed: {'; '.join(changed)}")
        self.step = int(state["step"])


class Loader(Position):
    """An endless iterator of training batches over examples (rows), and the same batches by number.

    A batch holds the examples' arrays stacked, ``(B, …)`` on the CPU: rows of tokens give ``{"tokens", "segments",
    "targets"}``. ``batch(step)`` depends on the examples, the batch size, the seed and the step alone; iterating only
    counts steps.
    """

    def __init__(self, rows: Examples, batch_size: int, seed: int) -> None:
        self.rows = rows
        self.order = BatchOrder(len(rows), batch_size, seed)
        self.step = 0
        shapes = ", ".join(f"{name} {array.shape}" for name, array in rows.example(0, 0).items())
        self._identity = {
            "seed": seed,
            "batch_size": batch_size,
            "n_rows": len(rows),
            "shapes": shapes,
            "data": rows.fingerprint,
        }

    @property
    def steps_per_epoch(self) -> int:
        """Batches that hold every example at least once."""
        return -(-self.order.n_rows // self.order.batch_size)

    def batch(self, step: int, *, part: int = 0, of: int = 1) -> Batch:
        """Batch ``step``, or one of ``of`` equal consecutive parts of it (a process of several, a micro-batch).

        The parts in order are the whole batch, so the order of the data does not depend on how many share it.
        """
        if self.order.batch_size % of:
            raise UserError(
                f"batch_size {self.order.batch_size} cannot be shared equally by {of}; give a multiple of {of}"
            )
        assert 0 <= part < of, (part, of)
        size = self.order.batch_size // of
        places = self.order.places(step)[part * size : (part + 1) * size]
        return self.collate([self.rows.example(*place) for place in places])

    def collate(self, examples: Sequence[Example]) -> Batch:
        """The batch of these examples."""
        return stack(examples)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self.batch(self.step)
        self.step += 1
        return batch


def evaluation_batches(rows: Examples, batch_size: int, fill: Example | None = None) -> Iterator[Batch]:
    """Every example once, in order, as in epoch 0; the last batch is filled up with ``fill``, or stays smaller."""
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}; it must be at least 1")
    for start in range(0, len(rows), batch_size):
        real = [rows.example(index, 0) for index in range(start, min(start + batch_size, len(rows)))]
        yield stack(real if fill is None else real + [fill] * (batch_size - len(real)))


def next_token_targets(tokens: Tensor, segments: Tensor) -> Tensor:
    """Targets ``(B, T)`` int64 for next-token prediction within the rows given: -100 at padding (segment 0, on any
    side) and at each document's last token.

    Places are chosen by segment, never by token id: a real end token keeps its label also where padding has its id.
    """
    assert tokens.shape == segments.shape, (tokens.shape, segments.shape)
    targets = torch.full_like(tokens, IGNORE, dtype=torch.int64)
    same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
    targets[:, :-1] = torch.where(same, tokens[:, 1:].to(torch.int64), IGNORE)
    return targets


def stack(examples: Sequence[Example]) -> Batch:
    """Examples of equal shapes as one batch."""
    return {name: torch.from_numpy(np.stack([example[name] for example in examples])) for name in examples[0]}
