"""Rows of an encoder's text: pairs of sentences with a label (BERT's second task), or sentences laid end to end."""

from typing import ClassVar, NamedTuple

import numpy as np

from phylon.data import Draws, TokenStore
from phylon.data.documents import digest
from phylon.spec.base import Mechanism, Slot
from phylon.spec.errors import UserError
from phylon.spec.registry import register
from phylon.text import Tokenizer


class Pairs(Slot):
    """Slot of ``pairs``: how two spans of text are put together, and what is asked about them."""

    head: ClassVar[str] = "nsp"

    def pair(self, chunks: "Chunks", index: int, draws: Draws) -> tuple[np.ndarray, np.ndarray, int]:
        """Two spans of ids, and the class of the pair."""
        raise NotImplementedError


class NextSentence(Mechanism, Pairs, frozen=True, kw_only=True):
    """Does B follow A, or is it from another document? Class 0 and 1. BERT (arXiv:1810.04805), section 3.1, task 2.

    A chunk of consecutive sentences of one document is cut at a random sentence end (in the middle where it is a single
    one); B is the rest of it, or with the chance ``random`` what begins at a random sentence of another document.
    """

    random: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.random <= 1:
            raise UserError(f"random is a chance from 0 to 1, got {self.random}")

    def pair(self, chunks: "Chunks", index: int, draws: Draws) -> tuple[np.ndarray, np.ndarray, int]:
        start, stop = chunks.span(index)
        inside = chunks.ends_within(start, stop)
        cut = int(inside[draws.below(len(inside))]) if len(inside) else (start + stop) // 2
        first, label = chunks.tokens(start, cut), int(draws.chance() < self.random)
        if not label:
            return first, chunks.tokens(cut, stop), 0
        return first, chunks.elsewhere(index, max(1, chunks.room - len(first)), draws), 1


class Chunks:
    """A store's documents cut into chunks of whole sentences: each goes on until it has at least ``room`` tokens.

    As BERT's released code makes its instances, without its random shorter ones. A chunk has at least two tokens.
    """

    def __init__(self, store: TokenStore, room: int) -> None:
        assert store.pieces is not None, "the documents were not cut into sentences"
        self.store, self.room = store, room
        self.pieces = store.pieces
        ends = np.append(self.pieces[1:], store.n_tokens)
        last = np.isin(ends, np.append(store.boundaries[1:], store.n_tokens))
        spans, begin = [], 0
        for end, is_last in zip(ends.tolist(), last.tolist(), strict=True):
            if end - begin >= room or is_last:
                if end - begin >= 2:
                    spans.append((begin, end))
                begin = end
        if not spans:
            raise UserError("the data hold no document of two tokens, so no pair of sentences; give more text")
        self.spans = np.array(spans, dtype=np.int64)
        self.document = np.searchsorted(store.boundaries, self.spans[:, 0], side="right") - 1
        if self.document[0] == self.document[-1]:
            raise UserError("next sentences are drawn from other documents, and the data hold one; give more files")

    def __len__(self) -> int:
        return len(self.spans)

    def span(self, index: int) -> tuple[int, int]:
        start, stop = self.spans[index]
        return int(start), int(stop)

    def ends_within(self, start: int, stop: int) -> np.ndarray:
        """Sentence ends strictly inside of ``[start, stop)``."""
        low, high = np.searchsorted(self.pieces, [start + 1, stop])
        return self.pieces[low:high]

    def tokens(self, start: int, stop: int) -> np.ndarray:
        return self.store.tokens[start:stop].astype(np.int64)

    def elsewhere(self, index: int, length: int, draws: Draws) -> np.ndarray:
        """At most ``length`` tokens from a random sentence of another document on."""
        own = self.document[index]
        low, high = np.searchsorted(self.document, [own, own + 1])
        other = draws.below(len(self) - (high - low))
        start, stop = self.span(other if other < low else other + (high - low))
        places = np.concatenate([[start], self.ends_within(start, stop)])
        begin = int(places[draws.below(len(places))])
        end_of_document = np.append(self.store.boundaries[1:], self.store.n_tokens)[
            np.searchsorted(self.store.boundaries, begin, side="right") - 1
        ]
        return self.tokens(begin, min(begin + length, int(end_of_document)))


class Text(NamedTuple):
    """What a row holds before tokens are hidden: ``tokens``, ``types``, ``segments`` (T,), and which may be hidden."""

    tokens: np.ndarray
    types: np.ndarray
    segments: np.ndarray
    free: np.ndarray
    label: int | None


class Marks(NamedTuple):
    """The ids around the texts of an encoder."""

    cls: int
    sep: int
    pad: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Marks":
        """Those of a vocabulary that has them."""
        first, sep, pad = tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id
        assert first is not None, "no [CLS]"
        assert sep is not None, "no [SEP]"
        assert pad is not None, "no [PAD]"
        return cls(first, sep, pad)


class PairedTexts:
    """Rows ``[CLS] A [SEP] B [SEP]``, types 0 and 1; what is too long is cut from the longer one, at a random side."""

    def __init__(self, store: TokenStore, seq_len: int, marks: Marks, pairs: Pairs) -> None:
        self.seq_len, self.marks, self.pairs = seq_len, marks, pairs
        self.chunks = Chunks(store, seq_len - 3)
        self.fingerprint = digest("pairs", store.fingerprint, seq_len, list(marks), repr(pairs))

    def __len__(self) -> int:
        return len(self.chunks)

    def text(self, index: int, draws: Draws) -> Text:
        first, second, label = self.pairs.pair(self.chunks, index, draws)
        first, second = truncated(first, second, self.seq_len - 3, draws)
        cls, sep, pad = self.marks
        tokens = np.concatenate([[cls], first, [sep], second, [sep]])
        free = np.ones(len(tokens), bool)
        free[[0, len(first) + 1, -1]] = False
        types = np.repeat([0, 1], [len(first) + 2, len(second) + 1])
        return _padded(tokens, types, free, self.seq_len, pad, label)


class FullSentences:
    """Rows of whole sentences that go on over document ends, ``[CLS] … [SEP] … [SEP]`` with a [SEP] at every end.

    RoBERTa (arXiv:1907.11692), section 4.2, FULL-SENTENCES. A sentence that does not fit in a row of its own is cut.
    """

    def __init__(self, store: TokenStore, seq_len: int, marks: Marks) -> None:
        assert store.pieces is not None, "the documents were not cut into sentences"
        self.store, self.seq_len, self.marks = store, seq_len, marks
        self.rows = np.array(_full_rows(store, seq_len - 2), dtype=np.int64).reshape(-1, 2)
        self.fingerprint = digest("full", store.fingerprint, seq_len, list(marks))

    def __len__(self) -> int:
        return len(self.rows)

    def text(self, index: int, draws: Draws) -> Text:
        start, stop = map(int, self.rows[index])
        low, high = np.searchsorted(self.store.boundaries, [start + 1, stop])
        ends = self.store.boundaries[low:high] - start
        inner = self.store.tokens[start:stop].astype(np.int64)
        cls, sep, pad = self.marks
        tokens = np.concatenate([[cls], np.insert(inner, ends, sep), [sep]])
        free = np.concatenate([[False], np.insert(np.ones(len(inner), bool), ends, False), [False]])
        return _padded(tokens, np.zeros(len(tokens), np.int64), free, self.seq_len, pad, None)


def truncated(first: np.ndarray, second: np.ndarray, most: int, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    """Two spans of at most ``most`` tokens together: one by one from the front or the back of the longer one."""
    excess = max(0, len(first) + len(second) - most)
    front, back = [0, 0], [len(first), len(second)]
    for at_front in draws.uniform(excess) < 0.5:
        longer = 0 if back[0] - front[0] > back[1] - front[1] else 1
        if at_front:
            front[longer] += 1
        else:
            back[longer] -= 1
    return first[front[0] : back[0]], second[front[1] : back[1]]


def _full_rows(store: TokenStore, room: int) -> list[tuple[int, int]]:
    """Token ranges of rows of at most ``room`` places, a document's end inside of one counting one."""
    assert store.pieces is not None
    document_starts = set(store.boundaries.tolist())
    rows: list[tuple[int, int]] = []
    begin, used = 0, 0
    for start, stop in zip(store.pieces.tolist(), [*store.pieces[1:].tolist(), store.n_tokens], strict=True):
        mark = int(start in document_starts and start > begin)
        if used and used + mark + stop - start > room:
            rows.append((begin, start))
            begin, used, mark = start, 0, 0
        used += mark + stop - start
        while used > room:  # a sentence longer than a row: only ever the first of its row
            rows.append((begin, begin + room))
            begin, used = begin + room, used - room
    if used:
        rows.append((begin, store.n_tokens))
    return rows


def _padded(tokens: np.ndarray, types: np.ndarray, free: np.ndarray, length: int, pad: int, label: int | None) -> Text:
    left = length - len(tokens)
    assert left >= 0, (len(tokens), length)
    segments = np.concatenate([np.ones(len(tokens), np.int64), np.zeros(left, np.int64)])
    filled = np.concatenate([tokens, np.full(left, pad)]).astype(np.int64)
    return Text(filled, np.pad(types, (0, left)).astype(np.int64), segments, np.pad(free, (0, left)), label)


register(NextSentence, paper="arXiv:1810.04805 §3.1", cases=lambda: [NextSentence(), NextSentence(random=0.3)])
