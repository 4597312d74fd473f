"""From a piece of raw text to what a model reads and what it must say: the unsupervised objectives that T5 compares.

Raffel et al. (arXiv:1910.10683), section 3.3 and table 3, each a component of one slot. Marks of hidden spans
("sentinels") are ``<extra_id_0>``, ``<extra_id_1>``, … in the order of the text.
"""

from typing import NamedTuple

import numpy as np

from phylon.data import Draws
from phylon.spec.base import Mechanism, Slot
from phylon.spec.errors import UserError
from phylon.spec.registry import register


class Lengths(NamedTuple):
    """Tokens of raw text, and of the longest source and target made of it, their end tokens included."""

    raw: int
    source: int
    target: int


class Ids(NamedTuple):
    """The special ids a corruption writes, and the ordinary ones that it may draw."""

    sentinels: tuple[int, ...]
    eos: int
    ordinary: np.ndarray


class Corruption(Slot):
    """Slot of ``corruption``: raw text to source and target."""

    def lengths(self, raw: int) -> Lengths:
        """How long source and target of ``raw`` tokens are at most (the end token of each counted)."""
        raise NotImplementedError

    def n_sentinels(self, raw: int) -> int:
        """How many marks a text of ``raw`` tokens may need."""
        return 0

    def apply(self, tokens: np.ndarray, ids: Ids, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
        """``(source, target)``, int64, each with its end token."""
        raise NotImplementedError


class _Noisy(Mechanism, Corruption, frozen=True, kw_only=True):
    """``share``: how much of a text is hidden."""

    share: float = 0.15

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise UserError(f"share must lie between 0 and 1, got {self.share}")

    def n_noise(self, raw: int) -> int:
        """Hidden tokens of ``raw``: rounded (halves to even, as the released code), at least one, one stays."""
        return min(max(round(raw * self.share), 1), raw - 1)


class RandomSpans(_Noisy, frozen=True, kw_only=True):
    """Span corruption, T5's own: ``share`` of the tokens, in spans of ``mean_length`` on average (section 3.3.4).

    A text of L tokens has ``N = round(L share)`` hidden ones in ``S = round(N / mean_length)`` spans. Lengths of the
    spans and of what stands between them are random partitions of N and L - N into S parts, and the text starts with
    what stays. The source, each span a mark, has ``L - N + S + 1`` tokens, the target, each mark followed by its span,
    ``N + S + 1``: the same for every draw, so that no row is padded.
    """

    mean_length: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.mean_length >= 1:
            raise UserError(f"mean_length must be at least 1, got {self.mean_length}")

    def n_sentinels(self, raw: int) -> int:
        noise = self.n_noise(raw)
        return min(max(round(noise / self.mean_length), 1), noise, raw - noise)

    def lengths(self, raw: int) -> Lengths:
        noise, spans = self.n_noise(raw), self.n_sentinels(raw)
        return Lengths(raw, raw - noise + spans + 1, noise + spans + 1)

    def apply(self, tokens: np.ndarray, ids: Ids, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
        noise, spans = self.n_noise(len(tokens)), self.n_sentinels(len(tokens))
        hidden, kept = partition(noise, spans, draws), partition(len(tokens) - noise, spans, draws)
        runs = np.stack([kept, hidden], axis=1).ravel()
        return marked(tokens, np.repeat(np.arange(2 * spans) % 2 == 1, runs), ids)


class IidSpans(_Noisy, frozen=True, kw_only=True):
    """Tokens hidden one by one, neighbours joined into a span with one mark (section 3.2.2, "replace spans").

    Exactly ``round(L share)`` tokens; the number of spans, and so the lengths, differ from draw to draw.
    """

    def n_sentinels(self, raw: int) -> int:
        noise = self.n_noise(raw)
        return min(noise, raw - noise + 1)

    def lengths(self, raw: int) -> Lengths:
        noise, spans = self.n_noise(raw), self.n_sentinels(raw)
        return Lengths(raw, raw - noise + spans + 1, noise + spans + 1)

    def apply(self, tokens: np.ndarray, ids: Ids, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
        hidden = np.zeros(len(tokens), bool)
        hidden[draws.subset(self.n_noise(len(tokens)), len(tokens))] = True
        return marked(tokens, hidden, ids)


class IidTokens(_Noisy, frozen=True, kw_only=True):
    """Hidden tokens each become one and the same mark, or with the chance ``random`` another token; say the whole text.

    ``random = 0.1`` is table 3's "BERT-style", 0 its "MASS-style" (arXiv:1905.02450). The mark is ``<extra_id_0>``.
    """

    random: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.random <= 1:
            raise UserError(f"random is a chance from 0 to 1, got {self.random}")

    def n_sentinels(self, raw: int) -> int:
        return 1

    def lengths(self, raw: int) -> Lengths:
        return Lengths(raw, raw + 1, raw + 1)

    def apply(self, tokens: np.ndarray, ids: Ids, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
        places = draws.subset(self.n_noise(len(tokens)), len(tokens))
        source = tokens.copy()
        other = ids.ordinary[draws.integers(len(ids.ordinary), len(places))]
        source[places] = np.where(draws.uniform(len(places)) < self.random, other, ids.sentinels[0])
        return ended(source, ids), ended(tokens, ids)


class SplitPrefix(Mechanism, Corruption, frozen=True, kw_only=True):
    """Prefix language modelling: a text is cut at a random place, the model reads the first part and says the second.

    Section 3.2.3; for an encoder-decoder, or for a decoder whose attention is ``Causal() | Prefix()``.
    """

    def lengths(self, raw: int) -> Lengths:
        return Lengths(raw, raw, raw)

    def apply(self, tokens: np.ndarray, ids: Ids, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
        cut = 1 + draws.below(len(tokens) - 1)
        return ended(tokens[:cut], ids), ended(tokens[cut:], ids)


class WholeText(Mechanism, Corruption, frozen=True, kw_only=True):
    """Language modelling: nothing to read but the end token, the whole text to say (section 3.2.3)."""

    def lengths(self, raw: int) -> Lengths:
        return Lengths(raw, 1, raw + 1)

    def apply(self, tokens: np.ndarray, ids: Ids, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
        return np.array([ids.eos], np.int64), ended(tokens, ids)


def partition(total: int, parts: int, draws: Draws) -> np.ndarray:
    """``total`` as a sum of ``parts`` whole numbers from 1 on, every way equally likely: ``(parts,)`` int64."""
    assert 1 <= parts <= total, (parts, total)
    cuts = draws.subset(parts - 1, total - 1) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))


def marked(tokens: np.ndarray, hidden: np.ndarray, ids: Ids) -> tuple[np.ndarray, np.ndarray]:
    """Source and target: each run of hidden tokens is a mark in the source, and follows its mark in the target."""
    starts = hidden & ~np.concatenate([[False], hidden[:-1]])
    number = np.cumsum(starts) - 1
    marks = np.array(ids.sentinels)[np.maximum(number, 0)]
    source = np.where(starts, marks, tokens)[starts | ~hidden]
    at = np.flatnonzero(starts[hidden])
    target = np.insert(tokens[hidden], at, marks[starts])
    return ended(source, ids), ended(target, ids)


def ended(tokens: np.ndarray, ids: Ids) -> np.ndarray:
    return np.append(tokens, ids.eos)


def raw_length(corruption: Corruption, most: int, *, joined: bool) -> Lengths:
    """The most raw text whose source (``joined``: source and target together) has at most ``most`` tokens.

    The released code's ``random_spans_helper``, for any corruption. One more raw token makes the source of
    ``RandomSpans`` longer by at most one, so that its rows are filled exactly. A corruption with a source that does not
    grow is bounded by its target.
    """

    def size(raw: int) -> int:
        _, source, target = corruption.lengths(raw)
        return source + target if joined else max(source, target)

    if size(2) > most:
        raise UserError(f"data.seq_len {most} is too short to hide anything; give at least {size(2)}")
    low, high = 2, 2
    while size(high) <= most:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= most else (low, middle)
    return corruption.lengths(low)


register(
    RandomSpans,
    paper="arXiv:1910.10683 §3.3.4",
    cases=lambda: [RandomSpans(), RandomSpans(share=0.5, mean_length=2.0)],
)
register(IidSpans, paper="arXiv:1910.10683 §3.3.2", cases=lambda: [IidSpans()])
register(IidTokens, paper="arXiv:1910.10683 §3.3.1", cases=lambda: [IidTokens(), IidTokens(random=0.0)])
register(SplitPrefix, paper="arXiv:1910.10683 §3.2.3", cases=lambda: [SplitPrefix()])
register(WholeText, paper="arXiv:1910.10683 §3.2.3", cases=lambda: [WholeText()])
