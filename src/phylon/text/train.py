"""Training vocabularies on text: byte-level BPE, unigram, and the characters of one text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from phylon.spec.errors import UserError
from phylon.text.tokenizer import Tokenizer

BPE_SPECIALS = ("<|endoftext|>",)
UNIGRAM_SPECIALS = ("<unk>", "<s>", "</s>", "<pad>")


class TrainingText:
    """Passes texts on, and remembers whether there was any and which characters it had."""

    def __init__(self, texts: Iterable[str]) -> None:
        if isinstance(texts, str):
            texts = [texts]
        self._texts = texts
        self.characters: set[str] = set()

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            self.characters.update(text)
            yield text

    def require(self) -> None:
        if not any(not char.isspace() for char in self.characters):
            raise UserError("there is no text to train a tokenizer on: every text is empty")


def train_bpe(texts: Iterable[str], vocab_size: int, *, specials: Sequence[str] = BPE_SPECIALS) -> Tokenizer:
    """Byte-level BPE (Sennrich et al. 2016, section 3.2; over bytes: GPT-2) with GPT-2's cutting into words.

    Ids: the specials, the 256 bytes, the merges. The first special is BOS, EOS and padding, where none of the others
    has a name of its own for the role (``</s>``, ``<pad>``). A text too small for ``vocab_size`` gives a smaller
    vocabulary.
    """
    check_size(vocab_size, 256 + len(specials), "the 256 bytes and the special tokens")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    source = TrainingText(texts)
    backend.train_from_iterator(source, trainer)
    source.require()
    first = 0 if specials else None
    named = {name: backend.token_to_id(name) for name in specials}
    eos, pad = named.get("</s>", first), named.get("<pad>", named.get("[PAD]", first))
    return Tokenizer(backend, bos_id=first, eos_ids=() if eos is None else (eos,), pad_id=pad)


def train_unigram(texts: Iterable[str], vocab_size: int, *, specials: Sequence[str] = UNIGRAM_SPECIALS) -> Tokenizer:
    """Unigram language model (Kudo 2018, section 3.2) over words with ``▁`` for the space before them.

    ``specials`` must hold ``<unk>``; ``<s>``, ``</s>`` and ``<pad>``, where present, become BOS, EOS and padding.
    """
    if "<unk>" not in specials:
        raise UserError("a unigram vocabulary needs '<unk>' among its specials")
    source = TrainingText(texts)
    held = list(source)
    source.require()
    check_size(vocab_size, len(source.characters) + len(specials) + 1, "its characters and the special tokens")
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=list(specials), unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(held, trainer)
    ids: dict[str, Any] = {name: backend.token_to_id(name) for name in specials}
    eos = ids.get("</s>")
    return Tokenizer(
        backend,
        bos_id=ids.get("<s>"),
        eos_ids=() if eos is None else (eos,),
        pad_id=ids.get("<pad>"),
        unk_id=ids["<unk>"],
    )


def char_tokenizer(text: str, *, specials: Sequence[str] = ()) -> Tokenizer:
    """``specials``, then the distinct characters of ``text`` in sorted order; another character cannot be encoded.

    ``</s>`` and ``<pad>`` or ``[PAD]``, where present, become EOS and padding.
    """
    if not text:
        raise UserError("there is no text to take characters from")
    vocab = {token: i for i, token in enumerate(dict.fromkeys([*specials, *sorted(set(text))]))}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=""))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    if specials:
        backend.add_special_tokens(list(specials))
    pad = vocab.get("<pad>", vocab.get("[PAD]"))
    return Tokenizer(backend, eos_ids=[vocab["</s>"]] if "</s>" in vocab else (), pad_id=pad)


def check_size(vocab_size: int, least: int, holding: str) -> None:
    """Refuses a vocabulary too small for what it must hold."""
    if vocab_size < least:
        raise UserError(f"vocab_size {vocab_size} is too small: {holding} alone are {least}")
