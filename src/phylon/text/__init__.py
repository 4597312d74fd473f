"""Text to ids and back: loading, training and writing tokenizers, streaming decode, chat templates. Without torch."""

from typing import TYPE_CHECKING, Any

from phylon.text.chat import ChatTemplate
from phylon.text.gguf_vocab import gguf_from_tokenizer, tokenizer_from_gguf
from phylon.text.load import load_tokenizer
from phylon.text.stream import StreamDecoder
from phylon.text.tokenizer import Tokenizer, tokens_in_span
from phylon.text.train import char_tokenizer, train_bpe, train_unigram

if TYPE_CHECKING:
    from phylon.text.wordpiece import train_wordpiece

__all__ = [
    "ChatTemplate",
    "StreamDecoder",
    "Tokenizer",
    "char_tokenizer",
    "gguf_from_tokenizer",
    "load_tokenizer",
    "tokenizer_from_gguf",
    "tokens_in_span",
    "train_bpe",
    "train_unigram",
    "train_wordpiece",
]


def __getattr__(name: str) -> Any:
    # This trainer alone needs numpy, which takes longer to import than all the rest.
    if name == "train_wordpiece":
        from phylon.text.wordpiece import train_wordpiece

        return train_wordpiece
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
