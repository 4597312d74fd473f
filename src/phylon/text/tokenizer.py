"""The one tokenizer: a ``tokenizers.Tokenizer`` with its special ids and its chat template."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import processors

from phylon.spec.errors import UserError
from phylon.text.chat import ChatTemplate
from phylon.text.stream import ByteDecoder, StreamDecoder

Span = tuple[int, int]
SENTINEL = "<extra_id_{}>"


class Joint(NamedTuple):
    """One or two texts as the model reads them: ``texts`` says which of them (0 or 1, ``None``: added) an id is from.

    ``spans`` are half-open spans of characters of that text, (0, 0) for what was added.
    """

    ids: list[int]
    types: list[int]
    texts: list[int | None]
    spans: list[Span]

    def keep(self, places: Sequence[int]) -> Joint:
        """The ids at these places, with all that is known of each."""
        return Joint(
            ids=[self.ids[i] for i in places],
            types=[self.types[i] for i in places],
            texts=[self.texts[i] for i in places],
            spans=[self.spans[i] for i in places],
        )

    def shortened(self, most: int) -> Joint:
        """At most ``most`` ids: the ends of the texts are cut, of the longer one first; what was added stays.

        BERT (arXiv:1810.04805), released code (``_truncate_seq_pair``).
        """
        stays = set(range(len(self.ids)))
        places = [[i for i, text in enumerate(self.texts) if text == which] for which in (0, 1)]
        for _ in range(len(self.ids) - most):
            longer = places[0] if len(places[0]) > len(places[1]) else places[1]
            if len(longer) <= 1:
                raise UserError(f"{most} tokens leave no room for a text beside what the tokenizer adds")
            stays.discard(longer.pop())
        return self.keep(sorted(stays))


class Tokenizer:
    """Text to ids and back.

    ``backend`` is the ``tokenizers.Tokenizer`` that does the work. ``bos_id``, ``eos_ids``, ``pad_id`` and ``unk_id``
    are the model's special ids (``None`` or empty: the model has none); ``chat_template`` is Jinja source or ``None``.
    Truncation and padding that a file asks for are switched off: both would change ids in silence. So is the clean-up
    of spaces in BERT files; ask ``decode`` for it.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        pad_id: int | None = None,
        unk_id: int | None = None,
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        if type(backend.decoder).__name__ == "WordPiece":
            backend.decoder.cleanup = False
        self.backend = backend
        self.bos_id = bos_id
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.pad_id = pad_id
        self.unk_id = unk_id
        self.chat_template = chat_template

    def __repr__(self) -> str:
        kind = type(self.backend.model).__name__
        return f"Tokenizer({kind}, vocab_size={self.vocab_size}, bos_id={self.bos_id}, eos_ids={self.eos_ids})"

    @cached_property
    def vocab_size(self) -> int:
        """Ids run from 0 to ``vocab_size - 1``, added tokens included."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def _affixes(self) -> list[int]:
        return self.backend.encode("", add_special_tokens=True).ids

    @cached_property
    def cls_id(self) -> int | None:
        """The token in front of a text for a classifier: ``[CLS]``, or RoBERTa's BOS (it has a mask)."""
        found = self._named("[CLS]")
        return self.bos_id if found is None and self.mask_id is not None else found

    @cached_property
    def sep_id(self) -> int | None:
        """The token behind each text of a pair: ``[SEP]``, or RoBERTa's EOS."""
        eos = self.eos_ids[0] if self.eos_ids and self.mask_id is not None else None
        found = self._named("[SEP]")
        return eos if found is None else found

    @cached_property
    def mask_id(self) -> int | None:
        """What stands in the place of a hidden token: the special token ``[MASK]``, or ``<mask>``."""
        return self._named("[MASK]", "<mask>")

    @cached_property
    def sentinel_ids(self) -> tuple[int, ...]:
        """T5's marks of hidden spans, ``<extra_id_0>`` first."""
        found = itertools.takewhile(lambda i: i is not None, map(self._named, map(SENTINEL.format, itertools.count())))
        return tuple(i for i in found if i is not None)

    @cached_property
    def special_ids(self) -> tuple[int, ...]:
        """Ids of all special tokens, sorted: what no text consists of."""
        return tuple(sorted(i for i, t in self.backend.get_added_tokens_decoder().items() if t.special))

    def _named(self, *names: str) -> int | None:
        """The id of the first of these names that is a special token here."""
        special = {t.content: i for i, t in self.backend.get_added_tokens_decoder().items() if t.special}
        return next((special[name] for name in names if name in special), None)

    @property
    def add_bos(self) -> bool:
        """Whether ``encode`` puts ``bos_id`` in front by itself."""
        return self.bos_id is not None and self._affixes[:1] == [self.bos_id]

    @property
    def add_eos(self) -> bool:
        """Whether ``encode`` puts an end id behind by itself."""
        rest = self._affixes[1:] if self.add_bos else self._affixes
        return bool(rest) and rest[-1] in self.eos_ids

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of ``text``; ``special=False`` leaves out the BOS, EOS or [CLS] that the model's tokenizer adds.

        Special tokens written in the text become their ids either way, as the reference tokenizers do. For text that
        must not be able to hold any, set ``tokenizer.backend.encode_special_tokens = True``.
        """
        return self._encode(text, special).ids

    def encode_batch(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """``encode`` over many texts, in parallel."""
        try:
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=special)
        except Exception:
            # One by one, to say which text and why.
            return [self.encode(text, special=special) for text in texts]
        return [encoding.ids for encoding in encodings]

    def encode_with_offsets(self, text: str, *, special: bool = True) -> tuple[list[int], list[Span]]:
        """The ids and, for each, the half-open span of characters of ``text`` it came from; (0, 0) for added affixes.

        Tokens that hold a part of one character each carry the span of the whole character.
        """
        encoding = self._encode(text, special)
        return encoding.ids, encoding.offsets

    def encode_pair(self, a: str, b: str) -> tuple[list[int], list[int]]:
        """Ids and types of two texts joined as the model joins them (BERT: [CLS] a [SEP] b [SEP], types 0 and 1)."""
        encoding = self._encode(a, True, b)
        return encoding.ids, encoding.type_ids

    def encode_joint(self, a: str, b: str | None = None) -> Joint:
        """One text, or two joined as ``encode_pair`` joins them, with where each id comes from."""
        encoding = self._encode(a, True, b)
        return Joint(encoding.ids, encoding.type_ids, encoding.sequence_ids, encoding.offsets)

    def _encode(self, text: str, special: bool, pair: str | None = None) -> tokenizers.Encoding:
        try:
            return self.backend.encode(text, pair, add_special_tokens=special)
        except Exception as error:
            assert isinstance(text, str), "encode takes one str; encode_batch takes several"
            raise UserError(f"cannot encode the text: {self._encode_failure(text + (pair or ''), error)}") from None

    def _encode_failure(self, text: str, error: Exception) -> str:
        lone = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
        if lone is not None:
            return f"half a surrogate pair at character {lone}; decode the source as UTF-8 first"
        vocab = self.backend.get_vocab()
        unknown = next((char for char in text if char not in vocab), None)
        if type(self.backend.model).__name__ == "WordLevel" and unknown is not None:
            return f"character {unknown!r} is not in the vocabulary of {len(vocab)} characters"
        return " ".join(str(error).split())

    def decode(self, ids: Iterable[int], *, skip_special: bool = False, clean_up: bool = False) -> str:
        """The text of ``ids``. Ids without a token (a padded embedding table has some) give nothing.

        ``clean_up`` takes out the space before punctuation and English contractions, as old BERT code did.
        """
        ids = self._checked(ids)
        if self._bytes is not None:
            text = self._bytes.decode(ids, skip_special)
        else:
            text = self.backend.decode(ids, skip_special_tokens=skip_special)
        if clean_up:
            for mark in (".", "?", "!", ",", "n't", "'m", "'s", "'ve", "'re"):
                text = text.replace(f" {mark}", mark)
        return text

    def stream(self, *, skip_special: bool = False) -> StreamDecoder:
        """A decoder that is handed one id at a time and never shows half a character."""
        return StreamDecoder(self, skip_special=skip_special)

    @cached_property
    def _bytes(self) -> ByteDecoder | None:
        return ByteDecoder.of(self.backend)

    def _checked(self, ids: Iterable[int]) -> list[int]:
        ids = [int(i) for i in ids]
        if ids and min(ids) < 0:
            raise UserError(f"cannot decode id {min(ids)}: ids run from 0 to {self.vocab_size - 1}")
        return ids

    def token(self, id: int) -> str:
        """The token as the vocabulary spells it."""
        token = self.backend.id_to_token(id) if id >= 0 else None
        if token is None:
            raise UserError(f"no token has id {id}: ids run from 0 to {self.vocab_size - 1}")
        return token

    def id(self, token: str) -> int | None:
        """The id of a token, ``None`` where the vocabulary lacks it."""
        return self.backend.token_to_id(token)

    def special_tokens(self) -> dict[str, str]:
        """``{"bos_token": …, "eos_token": …, "pad_token": …, "unk_token": …}`` and BERT's, those that exist."""
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_ids[0] if self.eos_ids else None}
        ids |= {"pad_token": self.pad_id, "unk_token": self.unk_id}
        ids |= {"cls_token": self.cls_id, "sep_token": self.sep_id, "mask_token": self.mask_id}
        return {name: self.token(id) for name, id in ids.items() if id is not None}

    @property
    def _template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise UserError(
                "this tokenizer has no chat template: set tokenizer.chat_template to Jinja source, "
                "or put a chat_template.jinja beside tokenizer.json"
            )
        if self._compiled is None or self._compiled.source != self.chat_template:
            self._compiled = ChatTemplate(self.chat_template)
        return self._compiled

    _compiled: ChatTemplate | None = None

    def apply_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **extra: Any
    ) -> str:
        """The conversation as the model's own template writes it. ``extra`` reaches the template (``tools=…``)."""
        extra = self.special_tokens() | extra
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, **extra)

    def chat_ids(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **extra: Any
    ) -> list[int]:
        """``apply_chat`` as ids: exactly one BOS where template or tokenizer asks for one, and no EOS behind."""
        return self.chat_text_ids(self.apply_chat(messages, add_generation_prompt=add_generation_prompt, **extra))[0]

    def chat_text_ids(self, text: str) -> tuple[list[int], list[Span]]:
        """Ids and character spans of text that ``apply_chat`` wrote (the BOS rule of ``chat_ids``)."""
        ids, spans = self.encode_with_offsets(text, special=False)
        if self.add_bos and ids[:1] != [self.bos_id]:
            assert self.bos_id is not None
            return [self.bos_id, *ids], [(0, 0), *spans]
        return ids, spans

    def chat_spans(self, messages: Sequence[Mapping[str, Any]], **extra: Any) -> tuple[str, list[Span]]:
        """The rendered conversation and the span of characters of each assistant reply in it (its end mark too).

        Spans come from the template's own rendering. With ``chat_text_ids`` and ``tokens_in_span`` they say which
        tokens a fine-tuning loss covers; a token that merged with its neighbours counts as soon as it overlaps.
        """
        extra = self.special_tokens() | extra
        return self._template.spans(messages, **extra)

    def fingerprint(self) -> str:
        """A hash of everything that says which ids a text becomes: equal fingerprints are equal ids."""
        about = json.dumps([self.backend.to_str(), self.bos_id, self.eos_ids, self.pad_id, self.unk_id])
        return hashlib.blake2b(about.encode(), digest_size=16).hexdigest()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes ``tokenizer.json`` and ``tokenizer_config.json``, each whole or not at all.

        ``transformers``' ``AutoTokenizer`` reads the folder.
        """
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / "tokenizer.json", self.backend.to_str(pretty=True))
            config = json.dumps(self._config(), ensure_ascii=False, indent=2) + "\n"
            write_text(folder / "tokenizer_config.json", config)
        except OSError as error:
            raise UserError(f"cannot save the tokenizer in {folder}: {error.strerror or error}") from None

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        config |= self.special_tokens()
        config["model_max_length"] = 10**30
        if len(self.eos_ids) > 1:
            config["eos_token_ids"] = list(self.eos_ids)
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        return config


def tokens_in_span(spans: Sequence[Span], start: int, end: int) -> range:
    """Positions of the tokens that overlap the characters ``start`` to ``end`` (half open).

    ``spans`` comes from ``encode_with_offsets`` of the joint text. A token that reaches over the edge of the span
    counts, so that a span of at least one encoded character is never without a token (its probability includes what
    merged into it).
    """
    if not 0 <= start < end:
        raise UserError(f"a span needs at least one character, got {start} to {end}")
    hits = [i for i, (a, b) in enumerate(spans) if a < end and b > start]
    if not hits:
        raise UserError(f"no token covers the characters {start} to {end}: the tokenizer dropped all of them")
    return range(hits[0], hits[-1] + 1)


def set_affixes(backend: tokenizers.Tokenizer, front: str | None, back: str | None) -> None:
    """Makes ``encode`` put ``front`` before and ``back`` behind each text; ``None`` leaves a side bare."""
    names = [name for name in (front, back) if name is not None]
    if not names:
        return
    single = [*([f"{front}:0"] if front else []), "$A:0", *([f"{back}:0"] if back else [])]
    pair = single + [piece.replace(":0", ":1").replace("$A", "$B") for piece in single]
    special = [(name, backend.token_to_id(name)) for name in dict.fromkeys(names)]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)


def write_text(path: Path, text: str) -> None:
    """Writes beside and renames, so that ``path`` is either the old file or the whole new one."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
