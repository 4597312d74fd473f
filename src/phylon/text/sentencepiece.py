"""SentencePiece models (Kudo & Richardson 2018) on the ``tokenizers`` library, ids as SentencePiece gives them.

The file is a protobuf; the reader below knows the few fields that decide ids. Limits, from what the library can say:

- BPE merges among pieces of *equal* score go left to right in SentencePiece; here pairs of equal score are ranked so
  that a pair comes before every pair it can block from the left, which is the same unless such pairs block each other
  in a circle (never in a trained model we know of).
- the character map is applied by grapheme, and one of more than five bytes (a letter with two long marks) by character;
- a text that is one user-defined piece and nothing else loses the space that the model puts before it.
"""

from __future__ import annotations

import heapq
import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from phylon.spec.errors import UserError
from phylon.spec.files import read_file

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "▁"
_PARTS = {1: "pieces", 2: "trainer settings", 3: "normaliser"}
_EVERY = 1 << 16
_MODEL_KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}


@dataclass
class SpmModel:
    """What decides a SentencePiece model's ids: pieces ``(text, score, type)`` by id, and the normaliser."""

    pieces: list[tuple[str, float, int]]
    kind: str = "unigram"
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True
    charsmap: bytes = b""
    names: dict[str, str] = field(default_factory=lambda: {"bos": "<s>", "eos": "</s>", "pad": "<pad>"})

    def of_type(self, *types: int) -> list[str]:
        return [piece for piece, _, kind in self.pieces if kind in types]

    def id(self, piece: str) -> int | None:
        return next((i for i, (text, _, kind) in enumerate(self.pieces) if text == piece and kind == CONTROL), None)

    @property
    def unk(self) -> str | None:
        return next(iter(self.of_type(UNKNOWN)), None)

    @property
    def byte_fallback(self) -> bool:
        return len(self.of_type(BYTE)) == 256


def read_spm(path: Path) -> SpmModel:
    """Reads a ``.model`` file; anything that is not one, or only the beginning of one, is a ``UserError``."""
    try:
        return _parse_model(memoryview(read_file(path)))
    except (_BadProto, UnicodeDecodeError, struct.error) as error:
        raise UserError(f"{path} is not a whole SentencePiece model ({error}); fetch the file again") from None


class _BadProto(ValueError):
    pass


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise _BadProto("a number is cut off")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Field number and value of each entry of a protobuf message; fixed-width values stay bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise _BadProto(f"wire type {wire} does not occur there")
        if size > len(data) - at:
            raise _BadProto("a field reaches past the end")
        yield key >> 3, data[at : at + size]
        at += size


def _text(value: int | memoryview) -> str:
    return str(_block(value), "utf-8")


def _block(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise _BadProto("a number stands where a text should")
    return value


def _parse_model(data: memoryview) -> SpmModel:
    model = SpmModel(pieces=[])
    kind = 1
    seen = set()
    for number, value in _fields(data):
        seen.add(number)
        if number == 1:
            model.pieces.append(_parse_piece(_block(value)))
        elif number == 2:
            for key, inner in _fields(_block(value)):
                if key == 3 and isinstance(inner, int):
                    kind = inner
                elif key == 24 and inner:
                    raise _BadProto("it writes spaces behind words, which is not supported")
                elif key in (46, 47, 48):
                    model.names[{46: "bos", 47: "eos", 48: "pad"}[key]] = _text(inner)
        elif number == 3:
            for key, inner in _fields(_block(value)):
                if key == 2:
                    model.charsmap = bytes(_block(inner))
                elif key == 3:
                    model.add_dummy_prefix = bool(inner)
                elif key == 4:
                    model.remove_extra_whitespaces = bool(inner)
                elif key == 5:
                    model.escape_whitespaces = bool(inner)
    # They are written in this order: without the last, the file ends between two of them.
    if missing := _PARTS.keys() - seen:
        raise _BadProto(f"it has no {_PARTS[min(missing)]}")
    model.kind = _MODEL_KINDS.get(kind, str(kind))
    if model.kind not in ("unigram", "bpe"):
        raise _BadProto(f"its kind is {model.kind}; unigram and bpe are supported")
    if len({piece for piece, _, _ in model.pieces}) < len(model.pieces):
        raise _BadProto("a piece stands there twice")
    return model


def _parse_piece(data: memoryview) -> tuple[str, float, int]:
    piece, score, kind = "", 0.0, NORMAL
    for number, value in _fields(data):
        if number == 1:
            piece = _text(value)
        elif number == 2:
            (score,) = struct.unpack("<f", _block(value))
        elif number == 3 and isinstance(value, int):
            kind = value
    if not piece:
        raise _BadProto("a piece is empty")
    return piece, score, kind


def build_spm(model: SpmModel, *, prefix: str = "always") -> tokenizers.Tokenizer:
    """A backend with the model's ids.

    ``prefix`` says where a model with ``add_dummy_prefix`` puts its space: ``"always"`` (at the start and behind every
    control token, as the original tokenizers do) or ``"first"`` (only at the very start: ``legacy: false``). Control
    tokens written in the text are parsed; user-defined pieces never are split and take no space behind them.
    """
    assert prefix in ("always", "first")
    backend = tokenizers.Tokenizer(_bpe(model) if model.kind == "bpe" else _unigram(model))
    steps = _normalizer_steps(model, prefix == "always")
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    cuts: list[pre_tokenizers.PreTokenizer] = []
    if model.add_dummy_prefix and prefix == "first":
        # Every space is ▁ by now, so that the first step prepends one without looking at the text and the second
        # step makes it a ▁ too. Metaspace("▁") by itself would leave out the prefix where the text starts with a space.
        cuts.append(pre_tokenizers.Metaspace(replacement=" ", prepend_scheme="first", split=False))
        cuts.append(pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="never", split=False))
    if model.kind == "unigram" and model.byte_fallback:
        # SentencePiece never finds a byte piece spelled out in the text; the library would, were it not cut in two.
        cuts.append(pre_tokenizers.Split(Regex("<(?=0x[0-9A-F]{2}>)"), "merged_with_previous"))
    if cuts:
        backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    # Of the first piece, or of every piece until there is text. The library counts spaces, and takes one that comes as
    # a byte for a piece's: `phylon.text.stream` decodes by pieces.
    strip = _EVERY if model.remove_extra_whitespaces else int(model.add_dummy_prefix)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(content=" ", left=strip, right=0)] if strip else [])
    )
    backend.add_special_tokens(
        [AddedToken(piece, normalized=False, special=True) for piece in model.of_type(UNKNOWN, CONTROL)]
    )
    backend.add_tokens([AddedToken(piece, normalized=True, special=False) for piece in model.of_type(USER_DEFINED)])
    return backend


def _normalizer_steps(model: SpmModel, prepend: bool) -> list[normalizers.Normalizer]:
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        try:
            steps.append(normalizers.Precompiled(model.charsmap))
        except Exception:
            raise UserError("the SentencePiece model's character map is damaged; fetch the file again") from None
    if model.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(rf"\A |[ {SPACE}]+\z"), "")]
    space = SPACE if model.escape_whitespaces else " "
    if model.add_dummy_prefix and prepend:
        steps.append(normalizers.Prepend(space))
        symbols = sorted(model.of_type(USER_DEFINED), key=lambda piece: (-len(piece), piece))
        if symbols:
            # The library finds user-defined pieces by their normalised spelling, which must not gain the prefix.
            either = "|".join(_escape(symbol) for symbol in symbols)
            steps.append(normalizers.Replace(Regex(rf"\A{space}(?=(?:{either})\z)"), ""))
    if model.escape_whitespaces:
        steps.append(normalizers.Replace(" ", SPACE))
    return steps


def _escape(text: str) -> str:
    return "".join(char if char.isalnum() or ord(char) > 127 else f"\\x{ord(char):02x}" for char in text)


def _unigram(model: SpmModel) -> models.Unigram:
    # The score of an unknown character hangs on the worst normal piece; the others must not pull it down.
    worst = min((score for _, score, kind in model.pieces if kind == NORMAL), default=0.0)
    vocab = [(piece, score if kind == NORMAL else worst) for piece, score, kind in model.pieces]
    unk = next((i for i, (_, _, kind) in enumerate(model.pieces) if kind == UNKNOWN), None)
    return models.Unigram(vocab, unk, model.byte_fallback)


def _bpe(model: SpmModel) -> models.BPE:
    vocab = {piece: i for i, (piece, _, _) in enumerate(model.pieces)}
    return models.BPE(vocab, merges_of(model), unk_token=model.unk, fuse_unk=True, byte_fallback=model.byte_fallback)


def merges_of(model: SpmModel) -> list[tuple[str, str]]:
    """The pairs that SentencePiece merges, best first: by score, and among equals so that the left one wins."""
    scores = {piece: score for piece, score, kind in model.pieces if kind in (NORMAL, UNUSED)}
    ids = {piece: i for i, (piece, _, _) in enumerate(model.pieces)}
    equals: dict[float, list[tuple[str, str]]] = defaultdict(list)
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                equals[score].append((left, right))
    merges: list[tuple[str, str]] = []
    for score in sorted(equals, reverse=True):
        pairs = sorted(equals[score], key=lambda p: (-len(p[0] + p[1]), -len(p[0]), ids[p[0]], ids[p[1]]))
        merges += _left_first(pairs) if len(pairs) > 1 else pairs
    return merges


def _left_first(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Orders pairs so that (x, y) comes before (y, z); pairs that forbid that in a circle keep their order.

    That order is longest first: in a run of one character (Mistral's spaces, all of one score) the leftmost piece then
    grows as long as it can before the next one begins, as in SentencePiece.
    """
    starting: dict[str, list[int]] = defaultdict(list)
    for i, (left, _) in enumerate(pairs):
        starting[left].append(i)
    after = [[j for j in starting.get(right, ()) if j != i] for i, (_, right) in enumerate(pairs)]
    if not any(after):
        return pairs
    waiting = [0] * len(pairs)
    for followers in after:
        for j in followers:
            waiting[j] += 1
    # Entries are (blocked or not, index): what nothing blocks goes first, and a circle opens at its lowest index.
    heap = [(waiting[i] > 0, i) for i in range(len(pairs))]
    heapq.heapify(heap)
    done = [False] * len(pairs)
    order = []
    while heap:
        _, i = heapq.heappop(heap)
        if done[i]:
            continue
        done[i] = True
        order.append(pairs[i])
        for j in after[i]:
            waiting[j] -= 1
            if waiting[j] == 0 and not done[j]:
                heapq.heappush(heap, (False, j))
    return order
