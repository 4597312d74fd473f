"""Where a run's tokenizer comes from: trained on its own data, the data's characters, or a saved one."""

from collections.abc import Callable, Iterator

from phylon.spec.base import Mechanism, Slot
from phylon.spec.errors import UserError
from phylon.spec.registry import register
from phylon.text import Tokenizer, char_tokenizer, load_tokenizer, train_bpe, train_unigram
from phylon.text.train import BPE_SPECIALS, UNIGRAM_SPECIALS

Texts = Callable[[], Iterator[str]]
Reserved = tuple[str, ...]


class Vocabulary(Slot):
    """Slot of ``data.tokenizer``."""

    def make(self, texts: Texts, reserved: Reserved = ()) -> Tokenizer:
        """The tokenizer; ``texts()`` walks the training texts from the start, ``reserved`` are more special tokens."""
        raise NotImplementedError


class BPE(Mechanism, Vocabulary, frozen=True, kw_only=True, tag="bpe"):
    """Byte-level BPE trained on the training texts. Sennrich et al. (arXiv:1508.07909), section 3.2."""

    vocab_size: int = 4096

    def __post_init__(self) -> None:
        if self.vocab_size < 257:
            raise UserError(f"vocab_size of a byte-level vocabulary must be at least 257, got {self.vocab_size}")

    def make(self, texts: Texts, reserved: Reserved = ()) -> Tokenizer:
        return train_bpe(texts(), self.vocab_size, specials=_with(BPE_SPECIALS, reserved))


class Unigram(Mechanism, Vocabulary, frozen=True, kw_only=True, tag="unigram"):
    """A unigram language model trained on the training texts. Kudo (arXiv:1804.10959), section 3.2."""

    vocab_size: int = 4096

    def __post_init__(self) -> None:
        _check_size(self.vocab_size)

    def make(self, texts: Texts, reserved: Reserved = ()) -> Tokenizer:
        return train_unigram(texts(), self.vocab_size, specials=_with(UNIGRAM_SPECIALS, reserved))


class WordPiece(Mechanism, Vocabulary, frozen=True, kw_only=True, tag="wordpiece"):
    """BERT's WordPiece trained on the training texts. Schuster and Nakajima (2012); BERT (arXiv:1810.04805), section 3.

    ``lowercase`` also strips accents, as BERT's uncased vocabulary does.
    """

    vocab_size: int = 4096
    lowercase: bool = True

    def __post_init__(self) -> None:
        _check_size(self.vocab_size)

    def make(self, texts: Texts, reserved: Reserved = ()) -> Tokenizer:
        from phylon.text.wordpiece import SPECIALS, train_wordpiece

        specials = _with(SPECIALS, reserved)
        return train_wordpiece(texts(), self.vocab_size, lowercase=self.lowercase, specials=specials)


class Characters(Mechanism, Vocabulary, frozen=True, kw_only=True, tag="char"):
    """The distinct characters of the training texts."""

    def make(self, texts: Texts, reserved: Reserved = ()) -> Tokenizer:
        return char_tokenizer("".join(sorted(set().union(*texts()))), specials=reserved)


class Loaded(Mechanism, Vocabulary, frozen=True, kw_only=True, tag="load"):
    """A saved tokenizer: a folder or a ``tokenizer.json``."""

    path: str

    def make(self, texts: Texts, reserved: Reserved = ()) -> Tokenizer:
        return load_tokenizer(self.path)


def _with(own: tuple[str, ...], reserved: Reserved) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*own, *reserved)))


def _check_size(vocab_size: int) -> None:
    if vocab_size < 1:
        raise UserError(f"vocab_size must be at least 1, got {vocab_size}")


register(BPE, paper="arXiv:1508.07909 §3.2", cases=lambda: [BPE()])
register(Unigram, paper="arXiv:1804.10959 §3.2", cases=lambda: [Unigram()])
register(WordPiece, paper="arXiv:1810.04805 §3", cases=lambda: [WordPiece(), WordPiece(lowercase=False)])
register(Characters, paper="none", cases=lambda: [Characters()])
register(Loaded, paper="none", cases=lambda: [Loaded(path="tokenizer.json")])
