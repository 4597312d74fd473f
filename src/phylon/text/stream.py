"""Ids to text through bytes, whole or one id at a time, without ever showing half a character."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import tokenizers

if TYPE_CHECKING:
    from phylon.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


def _one_mark_a_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


# SentencePiece shows every byte of an unfinished character as a mark of its own.
codecs.register_error("phylon.mark_each_byte", _one_mark_a_byte)


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte, turned round: printable Latin-1 stands for itself, the rest from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class ByteDecoder:
    """Each id's bytes, for byte-level BPE and for SentencePiece vocabularies (``▁`` spaces, ``<0xNN>`` byte pieces).

    ``tokenizers`` decodes a run of byte pieces all or nothing; here every whole character in the run is kept, as
    SentencePiece does.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, byte_level: bool, strip: int) -> None:
        self._backend = backend
        self.byte_level = byte_level
        self._added = {id: (t.content, t.special) for id, t in backend.get_added_tokens_decoder().items()}
        self._known: dict[int, tuple[bytes, bool]] = {}
        self.strip = strip
        self.errors = "replace" if byte_level else "phylon.mark_each_byte"

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> ByteDecoder | None:
        """The byte decoder of a backend whose own decoder is one of the two kinds, else ``None``."""
        decoder = _decoder_json(backend)
        if decoder.get("type") == "ByteLevel":
            return cls(backend, byte_level=True, strip=0)
        steps = decoder.get("decoders", [])
        if [s["type"] for s in steps[:3]] != ["Replace", "ByteFallback", "Fuse"]:
            return None
        if steps[0]["pattern"] != {"String": "▁"} or steps[0]["content"] != " ":
            return None
        strip = steps[3]["start"] if len(steps) > 3 and steps[3]["type"] == "Strip" else 0
        if steps[3:] not in ([], [{"type": "Strip", "content": " ", "start": strip, "stop": 0}]):
            return None
        return cls(backend, byte_level=False, strip=strip)

    def piece(self, id: int, skip_special: bool, start: bool = False) -> tuple[bytes, bool]:
        """The bytes of one id (none for an id without a token), and whether a text at whose ``start`` it stands still
        has to begin.

        At the start the space that a piece begins with is dropped: of the first piece, or of every one until there is
        text (``strip`` above 1). One that comes as a byte is text.
        """
        if skip_special and self._added.get(id, ("", False))[1]:
            return b"", start
        known = self._known.get(id)
        if known is None:
            known = self._known[id] = self._spell(id)
        text, spaced = known
        if not (start and text):
            return text, start
        text = text[spaced:]
        return text, self.strip > 1 and not text

    def _spell(self, id: int) -> tuple[bytes, bool]:
        """The bytes of one id, and whether the first stands for SentencePiece's space."""
        added = self._added.get(id)
        token = added[0] if added else self._backend.id_to_token(id)
        if token is None:
            return b"", False
        if self.byte_level:
            alphabet = byte_alphabet()
            if added or any(char not in alphabet for char in token):
                return token.encode(), False
            return bytes(alphabet[char] for char in token), False
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)]), False
            except ValueError:
                return token.encode(), False
        return token.replace("▁", " ").encode(), token.startswith("▁")

    def decode(self, ids: Iterable[int], skip_special: bool) -> str:
        start, parts = self.strip > 0, []
        for id in ids:
            part, start = self.piece(id, skip_special, start)
            parts.append(part)
        return b"".join(parts).decode("utf-8", self.errors)


def _decoder_json(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    # A decoder pickles as its JSON, so the vocabulary need not be written out to read it.
    return json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}


class StreamDecoder:
    """``push(id)`` gives the text complete by now, ``flush()`` the rest; together they equal ``decode(ids)``."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._bytes = tokenizer._bytes
        if self._bytes is not None:
            self._utf8 = codecs.getincrementaldecoder("utf-8")(self._bytes.errors)
            self._start = self._bytes.strip > 0
        self._ids: list[int] = []
        self._shown = 0

    def push(self, id: int) -> str:
        """The text that ``id`` completes; empty while a character is open."""
        if self._bytes is not None:
            (id,) = self._tokenizer._checked([id])
            part, self._start = self._bytes.piece(id, self._skip_special, self._start)
            return self._utf8.decode(part)
        self._ids.append(id)
        text = self._window()
        if text.endswith(REPLACEMENT):
            return ""
        new, self._shown = text[self._shown :], len(text)
        if new and len(self._ids) > 1:
            # One token of context stays: what a token looks like depends on whether one stands before it.
            self._ids = self._ids[-1:]
            self._shown = len(self._window())
        return new

    def flush(self) -> str:
        """What was held back, with U+FFFD for what never became a character. The decoder is then as new."""
        if self._bytes is not None:
            text = self._utf8.decode(b"", final=True)
            self._utf8.reset()
            self._start = self._bytes.strip > 0
            return text
        text = self._window()[self._shown :]
        self._ids, self._shown = [], 0
        return text

    def _window(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special=self._skip_special)
