"""Where a run's tokenizer comes from: trained on its own data, the data's characters, or a saved one."""

from collections.abc import Callable, Iterator

from phylon.spec.base import Mechanism, Slot
from phylon.spec.errors import UserError
from phylon.spec.registry import register
from phylon.text import Tokenizer, char_tokenizer, load_tokenizer, train_bpe

Texts = Callable[[], Iterator[str]]


class Vocabulary(Slot):
    """Slot of ``data.tokenizer``."""

    def make(self, texts: Texts) -> Tokenizer:
        """The tokenizer; ``texts()`` walks the training texts from the start."""
        raise NotImplementedError


class BPE(Mechanism, Vocabulary, frozen=True, kw_only=True, tag="bpe"):
    """Byte-level BPE trained on the training texts. Sennrich et al. (arXiv:1508.07909), section 3.2."""

    vocab_size: int = 4096

    def __post_init__(self) -> None:
        if self.vocab_size < 257:
            raise UserError(f"vocab_size of a byte-level vocabulary must be at least 257, got {self.vocab_size}")

    def make(self, texts: Texts) -> Tokenizer:
        return train_bpe(texts(), self.vocab_size)


class Characters(Mechanism, Vocabulary, frozen=True, kw_only=True, tag="char"):
    """The distinct characters of the training texts."""

    def make(self, texts: Texts) -> Tokenizer:
        return char_tokenizer("".join(sorted(set().union(*texts()))))


class Loaded(Mechanism, Vocabulary, frozen=True, kw_only=True, tag="load"):
    """A saved tokenizer: a folder or a ``tokenizer.json``."""

    path: str

    def make(self, texts: Texts) -> Tokenizer:
        return load_tokenizer(self.path)


register(BPE, paper="arXiv:1508.07909 §3.2", cases=lambda: [BPE()])
register(Characters, paper="none", cases=lambda: [Characters()])
register(Loaded, paper="none", cases=lambda: [Loaded(path="tokenizer.json")])
