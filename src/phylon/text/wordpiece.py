"""Training WordPiece by likelihood gain, as it is defined (Schuster & Nakajima 2012, section 3; BERT's vocabulary)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from phylon.spec.errors import UserError
from phylon.text.load import bert_template
from phylon.text.tokenizer import Tokenizer
from phylon.text.train import TrainingText, check_size

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PREFIX = "##"


def train_wordpiece(
    texts: Iterable[str],
    vocab_size: int,
    *,
    lowercase: bool = True,
    specials: Sequence[str] = SPECIALS,
    min_frequency: int = 2,
    max_alphabet: int = 1000,
) -> Tokenizer:
    """A BERT tokenizer whose vocabulary is grown by the merge that raises the text's likelihood most.

    Each step joins the neighbours a, b with the largest ``freq(ab) / (freq(a) freq(b))`` (among equals, the most
    frequent, then the one met first in sorted words). A pair that occurs less than ``min_frequency`` times is never
    joined: by the formula alone, two characters met once and together would win over everything.

    Ids: the specials, the alphabet (``x`` begins a word, ``##x`` goes on), the merges. ``max_alphabet`` keeps the most
    frequent characters; a word with another one is ``[UNK]``.
    """
    if missing := [token for token in ("[UNK]", "[CLS]", "[SEP]") if token not in specials]:
        raise UserError(f"a WordPiece vocabulary needs {', '.join(missing)} among its specials")
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words = _count_words(TrainingText(texts), backend)
    characters = Counter[str]()
    for word, count in words.items():
        for char in word:
            characters[char] += count
    kept = {char for char, _ in sorted(characters.items(), key=lambda item: (-item[1], item[0]))[:max_alphabet]}
    spelled = {word: _spell(word) for word in sorted(words) if kept.issuperset(word)}
    alphabet = sorted({symbol for symbols in spelled.values() for symbol in symbols})
    check_size(vocab_size, len(specials) + len(alphabet), "the alphabet of the text and the special tokens")
    vocab = dict.fromkeys([*specials, *alphabet])
    for _, _, joined in likelihood_merges(spelled, words, min_frequency):
        if len(vocab) >= vocab_size:
            break
        vocab.setdefault(joined)
    ids = {token: i for i, token in enumerate(vocab)}
    backend.model = models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=100)
    backend.decoder = tokenizers.decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(list(specials))
    bert_template(backend, "[CLS]", "[SEP]")
    return Tokenizer(backend, pad_id=ids.get("[PAD]"), unk_id=ids["[UNK]"])


def _count_words(texts: TrainingText, backend: tokenizers.Tokenizer) -> Counter[str]:
    counts = Counter[str]()
    for text in texts:
        # Line by line, so that a long text is not held as one list of words.
        for line in text.splitlines():
            clean = backend.normalizer.normalize_str(line)
            counts.update(word for word, _ in backend.pre_tokenizer.pre_tokenize_str(clean))
    texts.require()
    return counts


def _spell(word: str) -> list[str]:
    return [word[0], *(PREFIX + char for char in word[1:])]


def likelihood_merges(
    spelled: dict[str, list[str]], counts: dict[str, int], min_frequency: int = 1
) -> Iterator[tuple[str, str, str]]:
    """The merges ``(a, b, ab)`` in order of gain; ``spelled`` gives each word's symbols and follows the merges.

    Pairs live in arrays (frequency, score) by the order in which they appeared, so that the best one is an argmax; a
    merge touches the words that hold the pair, and then the scores of all pairs with a changed symbol.
    """
    return _Merger(spelled, counts, min_frequency).run()


class _Merger:
    def __init__(self, spelled: dict[str, list[str]], counts: dict[str, int], min_frequency: int) -> None:
        self.words = list(spelled.values())
        self.counts = [counts[word] for word in spelled]
        self.least = min_frequency
        self.symbols: dict[str, int] = {}  # symbol -> its row in symbol_freq
        self.symbol_freq = np.zeros(1024)
        self.pairs: dict[tuple[str, str], int] = {}  # pair -> its column in freq, score, left, right
        self.names: list[tuple[str, str]] = []
        self.freq, self.score = np.zeros(4096), np.full(4096, -1.0)
        self.left, self.right = np.zeros(4096, np.int64), np.zeros(4096, np.int64)
        self.where: dict[int, set[int]] = defaultdict(set)  # pair -> words that hold it
        self.touching: dict[str, list[int]] = defaultdict(list)  # symbol -> pairs with it
        for word in range(len(self.words)):
            self._count(word, 1)
        self._rescore(np.arange(len(self.names)))

    def run(self) -> Iterator[tuple[str, str, str]]:
        while self.names:
            score = self.score[: len(self.names)]
            best = score.max()
            if best <= 0:
                return
            equal = np.flatnonzero(score == best)
            pair = int(equal[self.freq[equal].argmax()])
            left, right = self.names[pair]
            joined = left + right.removeprefix(PREFIX)
            self._merge(pair, left, right, joined)
            yield left, right, joined

    def _merge(self, pair: int, left: str, right: str, joined: str) -> None:
        for word in sorted(self.where[pair]):
            self._count(word, -1)
            self.words[word][:] = _joined(self.words[word], left, right, joined)
            self._count(word, 1)
        # Only these three symbols changed their frequency, so only their pairs changed their score.
        touched = {p for symbol in (left, right, joined) for p in self.touching[symbol]}
        self._rescore(np.fromiter(touched, np.int64, len(touched)))

    def _count(self, word: int, sign: int) -> None:
        symbols, amount = self.words[word], sign * self.counts[word]
        for symbol in symbols:
            row = self._symbol(symbol)  # before the array is looked at: it may grow
            self.symbol_freq[row] += amount
        for i in range(len(symbols) - 1):
            pair = self._pair(symbols[i], symbols[i + 1])
            self.freq[pair] += amount
            if sign > 0:
                self.where[pair].add(word)
            else:
                self.where[pair].discard(word)

    def _symbol(self, symbol: str) -> int:
        row = self.symbols.setdefault(symbol, len(self.symbols))
        if row == len(self.symbol_freq):
            self.symbol_freq = np.concatenate([self.symbol_freq, np.zeros(row)])
        return row

    def _pair(self, left: str, right: str) -> int:
        pair = self.pairs.setdefault((left, right), len(self.names))
        if pair < len(self.names):
            return pair
        if pair == len(self.freq):
            self.freq = np.concatenate([self.freq, np.zeros(pair)])
            self.score = np.concatenate([self.score, np.full(pair, -1.0)])
            self.left = np.concatenate([self.left, np.zeros(pair, np.int64)])
            self.right = np.concatenate([self.right, np.zeros(pair, np.int64)])
        self.names.append((left, right))
        self.left[pair], self.right[pair] = self._symbol(left), self._symbol(right)
        for symbol in {left, right}:
            self.touching[symbol].append(pair)
        return pair

    def _rescore(self, pairs: np.ndarray) -> None:
        freq = self.freq[pairs]
        product = self.symbol_freq[self.left[pairs]] * self.symbol_freq[self.right[pairs]]
        self.score[pairs] = np.where(freq >= max(self.least, 1), freq / np.maximum(product, 1), -1.0)


def _joined(symbols: list[str], left: str, right: str, joined: str) -> list[str]:
    out: list[str] = []
    i = 0
    while i < len(symbols):
        if symbols[i] == left and symbols[i + 1 : i + 2] == [right]:
            out.append(joined)
            i += 2
        else:
            out.append(symbols[i])
            i += 1
    return out
