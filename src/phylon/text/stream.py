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

    def __init__(self, backend: tokenizers.Tokenizer, *, byte_level: bool, strip: bool) -> None:
        self._backend = backend
        self.byte_level = byte_level
        self._added = {id: (t.content, t.special) for id, t in backend.get_added_tokens_decoder().items()}
        self._known: dict[int, bytes] = {}
        self.strip = strip
        self.errors = "replace" if byte_level else "phylon.mark_each_byte"

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> ByteDecoder | None:
        """The byte decoder of a backend whose own decoder is one of the two kinds, else ``None``."""
        decoder = _decoder_json(backend)
        if decoder.get("type") == "ByteLevel":
            return cls(backend, byte_level=True, strip=False)
        steps = decoder.get("decoders", [])
        if [s["type"] for s in steps[:3]] != ["Replace", "ByteFallback", "Fuse"]:
            return None
        if steps[0]["pattern"] != {"String": "▁"} or steps[0]["content"] != " ":
            return None
        if steps[3:] not in ([], [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]):
            return None
        return cls(backend, byte_level=False, strip=len(steps) == 4)

    def piece(self, id: int, skip_special: bool) -> bytes:
        """The bytes of one id; empty for an id without a token."""
        if skip_special and self._added.get(id, ("", False))[1]:
            return b""
        piece = self._known.get(id)
        if piece is None:
            piece = self._known[id] = self._spell(id)
        return piece

    def _spell(self, id: int) -> bytes:
        added = self._added.get(id)
        token = added[0] if added else self._backend.id_to_token(id)
        if token is None:
            return b""
        if self.byte_level:
            alphabet = byte_alphabet()
            if added or any(char not in alphabet for char in token):
                return token.encode()
            return bytes(alphabet[char] for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                return token.encode()
        return token.replace("▁", " ").encode()

    def decode(self, ids: Iterable[int], skip_special: bool) -> str:
        text = b"".join([self.piece(id, skip_special) for id in ids]).decode("utf-8", self.errors)
        return text.removeprefix(" ") if self.strip else text


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
            self._strip = self._bytes.strip
        self._ids: list[int] = []
        self._shown = 0

    def push(self, id: int) -> str:
        """The text that ``id`` completes; empty while a character is open."""
        if self._bytes is not None:
            (id,) = self._tokenizer._checked([id])
            return self._stripped(self._utf8.decode(self._bytes.piece(id, self._skip_special)))
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
            text = self._stripped(self._utf8.decode(b"", final=True))
            self._utf8.reset()
            self._strip = self._bytes.strip
            return text
        text = self._window()[self._shown :]
        self._ids, self._shown = [], 0
        return text

    def _window(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special=self._skip_special)

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
