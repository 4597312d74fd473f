"""Which tokens of a text are hidden, and what stands in their place: the first task of BERT."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from phylon.data import IGNORE, Draws
from phylon.spec.base import Mechanism, Slot
from phylon.spec.registry import register
from phylon.text import Tokenizer


class Units(Slot):
    """Slot of ``unit``: what is hidden together."""

    def choose(self, tokens: np.ndarray, free: np.ndarray, count: int, words: "Words", draws: Draws) -> np.ndarray:
        """Places of ``tokens`` to hide, int64, at most ``count`` of those where ``free`` (T,) is true."""
        raise NotImplementedError


class Pieces(Mechanism, Units, frozen=True, kw_only=True, tag="pieces"):
    """Every token for itself. BERT (arXiv:1810.04805), section 3.1, task 1."""

    def choose(self, tokens: np.ndarray, free: np.ndarray, count: int, words: "Words", draws: Draws) -> np.ndarray:
        places = np.flatnonzero(free)
        return places[draws.subset(count, len(places))]


class WholeWords(Mechanism, Units, frozen=True, kw_only=True, tag="whole_words"):
    """All pieces of a word or none; a word that no longer fits is passed over. BERT's released code, May 2019."""

    def choose(self, tokens: np.ndarray, free: np.ndarray, count: int, words: "Words", draws: Draws) -> np.ndarray:
        starts = np.flatnonzero(free & ~words.continues(tokens, free))
        number = np.zeros(len(tokens), np.int64)
        number[starts] = 1
        number = np.where(free, np.cumsum(number) - 1, -1)
        chosen: list[np.ndarray] = []
        left = count
        for word in draws.permutation(len(starts)):
            places = np.flatnonzero(number == word)
            if len(places) <= left:
                chosen.append(places)
                left -= len(places)
            if not left:
                break
        return np.sort(np.concatenate(chosen)) if chosen else np.zeros(0, np.int64)


class Words(NamedTuple):
    """For every id: whether it goes on with a word after one that leaves the word open, and whether it leaves it so."""

    goes_on: np.ndarray
    leaves_open: np.ndarray

    def continues(self, tokens: np.ndarray, free: np.ndarray) -> np.ndarray:
        """``(T,)``: whether a token belongs to the word of the one before it."""
        before = np.concatenate([[False], (self.leaves_open[tokens] & free)[:-1]])
        return self.goes_on[tokens] & before


@lru_cache(maxsize=4)
def words_of(tokenizer: Tokenizer) -> Words:
    """How a vocabulary marks words: ``##`` for going on (WordPiece), ``▁`` or ``Ġ`` for beginning, else by letters."""
    vocab = tokenizer.backend.get_vocab(with_added_tokens=True)
    names = [""] * tokenizer.vocab_size
    for name, i in vocab.items():
        names[i] = name
    special = np.zeros(len(names), bool)
    special[list(tokenizer.special_ids)] = True
    if type(tokenizer.backend.decoder).__name__ == "WordPiece":
        goes_on, leaves_open = [name.startswith("##") for name in names], [True] * len(names)
    elif type(tokenizer.backend.decoder).__name__ == "Metaspace":
        goes_on, leaves_open = [not name.startswith("▁") for name in names], [True] * len(names)
    else:
        # Byte-level vocabularies spell a space as Ġ; a word is then a run of letters and digits.
        goes_on, leaves_open = [name[:1].isalnum() and name[:1] not in "ĠĊĉč" for name in names], []
        leaves_open = [name[-1:].isalnum() and name[-1:] not in "ĠĊĉč" for name in names]
    return Words(np.array(goes_on) & ~special, np.array(leaves_open) & ~special)


class Masker(NamedTuple):
    """Hides tokens: ``share`` of the free ones; of these ``masked`` become the mask, ``random`` another token, the rest
    stay as they are."""

    share: float
    masked: float
    random: float
    unit: Units
    mask_id: int
    ordinary: np.ndarray
    words: Words

    def __call__(self, tokens: np.ndarray, free: np.ndarray, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
        """``(what the model reads, targets)``, each ``(T,)`` int64; targets are -100 where nothing is hidden."""
        targets = np.full(len(tokens), IGNORE, np.int64)
        n_free = int(free.sum())
        if not n_free:
            return tokens, targets
        count = min(n_free, max(1, int(n_free * self.share + 0.5)))
        places = self.unit.choose(tokens, free, count, self.words, draws)
        targets[places] = tokens[places]
        fate, other = draws.uniform(len(places)), self.ordinary[draws.integers(len(self.ordinary), len(places))]
        read = tokens.copy()
        read[places] = np.where(
            fate < self.masked, self.mask_id, np.where(fate < self.masked + self.random, other, tokens[places])
        )
        return read, targets


def ordinary_ids(tokenizer: Tokenizer) -> np.ndarray:
    """Every id that is no special token, which a random replacement is drawn from."""
    return np.setdiff1d(np.arange(tokenizer.vocab_size), tokenizer.special_ids)


register(Pieces, paper="arXiv:1810.04805 §3.1", cases=lambda: [Pieces()])
register(WholeWords, paper="BERT, released code (2019)", cases=lambda: [WholeWords()])
