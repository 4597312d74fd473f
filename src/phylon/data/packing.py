"""Rows of exactly ``seq_len`` tokens: one stream cut into rows, or whole short documents packed into them."""

import bisect
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from phylon.data.documents import digest
from phylon.data.tokens import TokenStore
from phylon.spec.errors import UserError

IGNORE = -100  # a target without a loss


class Row(NamedTuple):
    """``tokens``, ``segments`` and ``targets`` of one row, each ``(T,)`` int64; segment 0 is padding."""

    tokens: np.ndarray
    segments: np.ndarray
    targets: np.ndarray

    @classmethod
    def padding(cls, seq_len: int) -> "Row":
        """A row that holds nothing."""
        nothing = np.zeros(seq_len, np.int64)
        return cls(nothing, nothing, np.full(seq_len, IGNORE, np.int64))


def _targets(tokens: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """The next token where it is of the same document, else IGNORE; by segment alone, never by token id."""
    targets = np.full(tokens.shape, IGNORE, dtype=np.int64)
    same = (segments[1:] == segments[:-1]) & (segments[1:] != 0)
    targets[:-1][same] = tokens[1:][same]
    return targets


class PackedRows:
    """A token stream cut into rows: row ``i`` holds the tokens ``[i * seq_len, (i + 1) * seq_len)``.

    Segments count the documents of a row from 1, and nothing is padding. A document that passes the end of a row goes
    on in the next row as that row's segment 1: its positions start again there, and attention does not reach back
    into the row before. The targets are the next tokens of the same document, also for the last token of a row, whose
    target is the first of the next row; a document's last token has none (``IGNORE``). So over an epoch every token
    is an input exactly once, and every token that does not start a document a target exactly once, except for the
    ``remainder`` tokens at the end of the stream that fill no row (the first of them may still be a target).
    """

    def __init__(self, store: TokenStore, seq_len: int) -> None:
        if seq_len < 1:
            raise UserError(f"seq_len is {seq_len}; it must be at least 1")
        if store.n_tokens < seq_len:
            raise UserError(
                f"seq_len {seq_len} is more than the data ({store.n_tokens} tokens in {store.n_documents} documents); "
                f"give more text or a seq_len of at most {store.n_tokens}"
            )
        self.store, self.seq_len = store, seq_len

    @property
    def remainder(self) -> int:
        return self.store.n_tokens % self.seq_len

    @property
    def fingerprint(self) -> str:
        return digest("stream", self.store.fingerprint, self.seq_len)

    def __len__(self) -> int:
        return self.store.n_tokens // self.seq_len

    def row(self, index: int) -> Row:
        assert 0 <= index < len(self), index
        start = index * self.seq_len
        # One token more than the row, which gives its last token a target.
        tokens = self.store.tokens[start : start + self.seq_len + 1].astype(np.int64)
        boundaries = self.store.boundaries
        low, high = np.searchsorted(boundaries, [start + 1, start + len(tokens)])
        begins = np.zeros(len(tokens), np.int64)
        begins[0] = 1
        begins[boundaries[low:high] - start] = 1
        segments = np.cumsum(begins)
        cut = slice(self.seq_len)
        return Row(tokens[cut], segments[cut], _targets(tokens, segments)[cut])

    def example(self, index: int, epoch: int) -> dict[str, np.ndarray]:
        """The row by name, the same in every epoch; with ``weights`` (T,) of the targets where the store has some."""
        found, weights = self.row(index)._asdict(), self.store.weights
        if weights is None:
            return found
        start = index * self.seq_len + 1
        stop = min(start + self.seq_len, self.store.n_tokens)
        counted = np.zeros(self.seq_len, np.float32)
        counted[: stop - start] = weights.of(start, stop)
        return found | {"weights": np.where(found["targets"] == IGNORE, np.float32(0), counted)}


@dataclass(frozen=True, eq=False, slots=True)
class PackedDocuments:
    """Whole documents in rows: ``tokens`` and ``segments`` ``(N, T)`` int64, padding (token 0, segment 0) at the end.

    ``origin`` ``(N, T)`` says which token of all the documents laid end to end each place holds, -1 at padding, so that
    anything else known for each token (a loss mask, weights, labels) is packed alike with ``gather``.
    """

    tokens: np.ndarray
    segments: np.ndarray
    origin: np.ndarray

    @property
    def seq_len(self) -> int:
        return self.tokens.shape[1]

    @property
    def fingerprint(self) -> str:
        hashed = hashlib.blake2b(digest_size=16)
        for part in (self.tokens, self.segments):
            hashed.update(np.ascontiguousarray(part).data)
        return digest("documents", self.tokens.shape, hashed.hexdigest())

    def __len__(self) -> int:
        return len(self.tokens)

    def row(self, index: int) -> Row:
        assert 0 <= index < len(self), index
        tokens, segments = self.tokens[index], self.segments[index]
        return Row(tokens, segments, _targets(tokens, segments))

    def example(self, index: int, epoch: int) -> dict[str, np.ndarray]:
        """The row by name; the same in every epoch."""
        return self.row(index)._asdict()

    def gather(self, values: Sequence[Sequence[float]], fill: float) -> np.ndarray:
        """Values ``[document][token]``, as the documents were given, in the places of their tokens: ``(N, T)``."""
        flat = np.concatenate([np.asarray(document) for document in values if len(document)])
        assert len(flat) == self.origin.max() + 1, "as many values as tokens were packed"
        return np.where(self.origin >= 0, flat[self.origin], fill)


def pack_documents(
    documents: Sequence[Sequence[int]], seq_len: int, *, longer: Literal["refuse", "cut"] = "refuse"
) -> PackedDocuments:
    """Documents packed whole into as few rows as best-fit-decreasing finds; the result depends on the input alone.

    Longest first, each goes to the fullest row that still has room. Nothing is lost. A document above ``seq_len`` is
    refused with its number, or, with ``longer="cut"``, cut into consecutive pieces that are segments of their own (the
    last token of a piece then has no target). Documents without tokens take no place.
    """
    if seq_len < 1:
        raise UserError(f"seq_len is {seq_len}; it must be at least 1")
    pieces = _cut(documents, seq_len, longer)
    if not pieces:
        raise UserError("there are no tokens to pack")
    bins = _best_fit([stop - start for _, start, stop in pieces], seq_len)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(document) for document in documents])])
    flat = np.concatenate([np.asarray(document, dtype=np.int64) for document in documents])
    segments = np.zeros((len(bins), seq_len), np.int64)
    origin = np.full((len(bins), seq_len), -1, np.int64)
    for row, members in enumerate(bins):
        place = 0
        for segment, member in enumerate(sorted(members), 1):
            document, start, stop = pieces[member]
            end = place + stop - start
            segments[row, place:end] = segment
            origin[row, place:end] = np.arange(offsets[document] + start, offsets[document] + stop)
            place = end
    return PackedDocuments(np.where(origin >= 0, flat[origin], 0), segments, origin)


def _cut(
    documents: Sequence[Sequence[int]], seq_len: int, longer: Literal["refuse", "cut"]
) -> list[tuple[int, int, int]]:
    """The pieces to pack as (document, start, stop)."""
    pieces = []
    for index, document in enumerate(documents):
        if len(document) > seq_len and longer == "refuse":
            raise UserError(
                f"document {index} has {len(document)} tokens, more than seq_len {seq_len}; "
                'give a larger seq_len, leave it out, or say longer="cut"'
            )
        pieces += [(index, at, min(at + seq_len, len(document))) for at in range(0, len(document), seq_len)]
    return pieces


def _best_fit(lengths: list[int], room: int) -> list[list[int]]:
    """Which lengths share a row: each, longest first, into the fullest row that takes it."""
    bins: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of by_room that have rows, sorted
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        at = bisect.bisect_left(rooms, lengths[index])
        if at == len(rooms):
            bins.append([])
            row, left = len(bins) - 1, room
        else:
            left = rooms[at]
            row = by_room[left].pop()
            if not by_room[left]:
                del by_room[left], rooms[at]
        bins[row].append(index)
        left -= lengths[index]
        if left:
            if left not in by_room:
                by_room[left] = []
                bisect.insort(rooms, left)
            by_room[left].append(row)
    return bins
