"""Documents tokenised once into one flat array with document boundaries, kept on disk and mapped into memory."""

import hashlib
import itertools
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from phylon.checkpoint.files import checksum
from phylon.data.documents import Document, Source, digest
from phylon.spec.errors import UserError

FORMAT = 2
BATCH_CHARACTERS = 1 << 20  # texts handed to the tokenizer at once: enough to keep its threads busy, little to hold
PIECE_CHARACTERS = 1 << 20  # a longer document is encoded in pieces, so that memory does not grow with it
LONE_LINE_END = re.compile(r"(?<=\S)\n(?=\S)")
ABANDONED_SECONDS = 86_400  # a temporary folder this old belongs to a killed process

_log = logging.getLogger("phylon.data")
Progress = Callable[[int, int], None]
Cut = Callable[[str], Iterable[str]]


class Tokenizer(Protocol):
    """What this package needs of a tokenizer. ``fingerprint() -> str`` is used as well where there is one."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def bos_id(self) -> int | None: ...

    def encode_batch(self, texts: list[str], *, special: bool) -> list[list[int]]: ...


@dataclass(frozen=True, eq=False, slots=True)
class TokenWeights:
    """What each token counts in a loss: ``values`` (R,) float32 from the offsets ``starts`` (R,) int64 on."""

    starts: np.ndarray
    values: np.ndarray

    def of(self, start: int, stop: int) -> np.ndarray:
        """The weights of the tokens ``[start, stop)``, float32."""
        return self.values[np.searchsorted(self.starts, np.arange(start, stop), side="right") - 1]

    def slice(self, start: int, stop: int) -> "TokenWeights":
        """Those of a part of the tokens."""
        low, high = np.searchsorted(self.starts, [start, stop - 1], side="right")
        return TokenWeights(np.maximum(self.starts[low - 1 : high] - start, 0), self.values[low - 1 : high])


@dataclass(frozen=True, eq=False, slots=True)
class TokenStore:
    """The tokens of all documents, end to end.

    ``tokens`` is ``(n_tokens,)`` uint16 or uint32, memory-mapped and read-only when kept on disk; ``boundaries`` is
    ``(n_documents,)`` int64, the offset at which each document starts (the first is 0). ``pieces`` ``(n_pieces,)``
    int64 are the starts of all sentences, where the documents were cut into sentences. ``weights``: what the tokens
    count in a loss, where not all count 1. ``fingerprint`` is a hash of all: equal fingerprints are equal data.
    """

    tokens: np.ndarray
    boundaries: np.ndarray
    fingerprint: str
    pieces: np.ndarray | None = None
    weights: TokenWeights | None = None

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def n_documents(self) -> int:
        return len(self.boundaries)

    def document(self, index: int) -> np.ndarray:
        """The tokens of one document, with its end token."""
        assert 0 <= index < self.n_documents, index
        stop = self.boundaries[index + 1] if index + 1 < self.n_documents else self.n_tokens
        return self.tokens[self.boundaries[index] : stop]

    def slice(self, start: int, stop: int) -> "TokenStore":
        """The tokens ``[start, stop)`` as a store (a view); what is left of a cut document is one of its own."""
        assert 0 <= start < stop <= self.n_tokens, (start, stop, self.n_tokens)

        def inside(starts: np.ndarray) -> np.ndarray:
            low, high = np.searchsorted(starts, [start, stop])
            kept = starts[low:high] - start
            return kept if len(kept) and kept[0] == 0 else np.concatenate([np.zeros(1, np.int64), kept])

        pieces = None if self.pieces is None else inside(self.pieces)
        fingerprint = digest(self.fingerprint, start, stop)
        weights = None if self.weights is None else self.weights.slice(start, stop)
        return TokenStore(self.tokens[start:stop], inside(self.boundaries), fingerprint, pieces, weights)


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a stored array was made from (the first six fields, which its folder is named after) and what it holds."""

    format: int
    source: str
    tokenizer: str
    vocab_size: int
    around: tuple[tuple[int, ...], tuple[int, ...]]
    cut: str | None = None
    n_tokens: int = 0
    n_documents: int = 0
    weighed: bool = False
    fingerprint: str = ""
    checksums: dict[str, str] = {}

    @property
    def key(self) -> str:
        return digest(self.format, self.source, self.tokenizer, self.vocab_size, self.around, self.cut)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")


def tokenise(
    source: Source,
    tokenizer: Tokenizer,
    cache_dir: str | Path | None,
    *,
    begin: tuple[int, ...] = (),
    end: tuple[int, ...] | None = None,
    cut: Cut | None = None,
    progress: Progress | None = None,
) -> TokenStore:
    """All documents of a source as one array: ``begin``, the document's ids, then ``end``.

    Texts are encoded without special tokens; pass ``begin=(tokenizer.bos_id,)`` for a model that starts with one.
    ``end`` is the tokenizer's first end id, if it has one, unless given. ``cut`` takes a text to the sentences that are
    encoded each alone, and whose starts are kept as ``pieces``. Documents that give no ids are left out. With a
    ``cache_dir`` the result is kept there in a folder named after the fingerprints of source, tokenizer and options,
    complete or not at all, and the next call with the same ones maps it. Its checksums are checked then: a damaged
    folder is named in the log and built again. ``None`` keeps it in memory. ``progress`` is called with the documents
    and tokens so far.

    A document above a million characters is encoded in pieces, cut after a line end between two characters that are not
    white space: the same ids for tokenizers that never merge over such a place (byte-level BPE); others may differ
    there. Parts of a document that count differently are encoded each alone, so that no token has two weights; what is
    put around a document counts as what it is next to.
    """
    wanted = Manifest(
        format=FORMAT,
        source=source.fingerprint(),
        tokenizer=_tokenizer_fingerprint(tokenizer, source),
        vocab_size=tokenizer.vocab_size,
        around=(tuple(begin), tuple(tokenizer.eos_ids[:1]) if end is None else end),
        cut=None if cut is None else cut.__name__,
    )
    batches = _encoded(source, tokenizer, wanted, cut, progress or (lambda documents, tokens: None))
    if cache_dir is None:
        parts, lengths, pieces, weighed = zip(*batches, strict=True)
        tokens, boundaries, weights = np.concatenate(parts), _starts(lengths), _weights(weighed)
        hashed = hashlib.blake2b(tokens.data, digest_size=16)
        _hash_rest(hashed, boundaries, weights)
        return TokenStore(tokens, boundaries, hashed.hexdigest(), None if cut is None else _starts(pieces), weights)
    folder = Path(cache_dir) / f"tokens-{wanted.key}"
    try:
        store = _open(folder, wanted)
        return store if store is not None else _build(folder, wanted, batches)
    except OSError as error:
        raise UserError(f"cannot keep tokens in '{cache_dir}': {error.strerror or error}") from error


def _build(folder: Path, wanted: Manifest, batches: Iterator["_Encoded"]) -> TokenStore:
    """Write beside, then rename: at every moment the folder is absent or whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for old in folder.parent.glob(f".{folder.name}-*"):
        if time.time() - old.stat().st_mtime > ABANDONED_SECONDS:
            shutil.rmtree(old, ignore_errors=True)
    beside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        _write(beside, wanted, batches)
        if _open(folder, wanted) is None:  # another process may have been first
            if folder.exists():
                folder.rename(beside / "damaged")
            beside.rename(folder)
            shutil.rmtree(folder / "damaged", ignore_errors=True)
    except OSError:
        if _open(folder, wanted) is None:
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    store = _open(folder, wanted)
    assert store is not None, folder
    return store


def _write(beside: Path, wanted: Manifest, batches: Iterator["_Encoded"]) -> None:
    lengths: list[list[int]] = []
    pieces: list[list[int]] = []
    weighed: list[list[tuple[int, float]]] = []
    with (beside / "tokens.bin").open("wb") as file:
        hashed = hashlib.blake2b(digest_size=16)
        for part, batch_lengths, batch_pieces, batch_weighed in batches:
            lengths.append(batch_lengths)
            pieces.append(batch_pieces)
            weighed.append(batch_weighed)
            hashed.update(part.data)
            file.write(part.data)
        file.flush()
        os.fsync(file.fileno())
    boundaries, weights = _starts(lengths), _weights(weighed)
    _hash_rest(hashed, boundaries, weights)
    arrays = {"boundaries": boundaries} | ({} if wanted.cut is None else {"pieces": _starts(pieces)})
    arrays |= {} if weights is None else {"weight_starts": weights.starts, "weight_values": weights.values}
    for name, array in arrays.items():
        with (beside / f"{name}.npy").open("wb") as file:
            np.save(file, array)
            file.flush()
            os.fsync(file.fileno())
    done = msgspec.structs.replace(
        wanted,
        n_tokens=sum(map(sum, lengths)),
        n_documents=len(boundaries),
        weighed=weights is not None,
        fingerprint=hashed.hexdigest(),
        checksums={path.name: checksum(path) for path in sorted(beside.iterdir())},
    )
    with (beside / "manifest.json").open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(done)) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _open(folder: Path, wanted: Manifest) -> TokenStore | None:
    """The store in the folder where it is whole and what was wanted, else None."""
    try:
        found = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=Manifest)
        if found.key != wanted.key:
            return None
        for name, expected in found.checksums.items():
            if checksum(folder / name) != expected:
                _log.warning(f"'{folder / name}' is damaged; the data are tokenised again")
                return None
        boundaries = np.load(folder / "boundaries.npy", allow_pickle=False)
        pieces = None if wanted.cut is None else np.load(folder / "pieces.npy", allow_pickle=False)
        weights = (
            TokenWeights(*(np.load(folder / f"weight_{name}.npy") for name in ("starts", "values")))
            if found.weighed
            else None
        )
        size = (folder / "tokens.bin").stat().st_size
    except (OSError, ValueError, EOFError):  # msgspec's errors are ValueErrors, numpy's either of the two
        return None
    if len(boundaries) != found.n_documents or size != found.n_tokens * found.dtype.itemsize:
        return None
    tokens = np.memmap(folder / "tokens.bin", dtype=found.dtype, mode="r", shape=(found.n_tokens,))
    return TokenStore(tokens, boundaries, found.fingerprint, pieces, weights)


class _Encoded(NamedTuple):
    """A batch of documents: the ids of all, the number of ids of each document, and of each piece.

    ``weights``: runs of ids (how many, the weight of each).
    """

    ids: np.ndarray
    lengths: list[int]
    pieces: list[int]
    weights: list[tuple[int, float]]


def _encoded(
    source: Source, tokenizer: Tokenizer, wanted: Manifest, cut: Cut | None, progress: Progress
) -> Iterator[_Encoded]:
    """Batches of documents, with the ids around each document added (to its first and its last piece)."""
    before, after = map(list, wanted.around)
    n_documents = n_tokens = 0
    for batch in _batched(source.documents()):
        pieces = [_weighed_pieces(document, cut or _pieces) for document in batch]
        texts = [text for document_pieces in pieces for text, _ in document_pieces]
        encoded = iter(tokenizer.encode_batch(texts, special=False))
        rows: list[list[int]] = []
        lengths: list[int] = []
        weights: list[tuple[int, float]] = []
        for document_pieces in pieces:
            found = [(ids, weight) for _, weight in document_pieces if (ids := next(encoded))]
            if found:
                parts = [ids for ids, _ in found]
                rows.append([*before, *itertools.chain.from_iterable(parts), *after])
                parts[0], parts[-1] = [*before, *parts[0]], [*parts[-1], *after]
                own = [len(ids) for ids in parts] if len(parts) > 1 else [len(rows[-1])]
                lengths += own
                weights += zip(own, (weight for _, weight in found), strict=True)
        if not rows:
            continue
        flat = np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int64)
        for worst in (flat.min(), flat.max()):
            if not 0 <= worst < wanted.vocab_size:
                raise UserError(f"the tokenizer gave the id {worst}, outside its vocab_size of {wanted.vocab_size}")
        n_documents, n_tokens = n_documents + len(rows), n_tokens + len(flat)
        progress(n_documents, n_tokens)
        yield _Encoded(flat.astype(wanted.dtype), [len(row) for row in rows], lengths, weights)
    if not n_documents:
        raise UserError("the tokenizer gave no ids for any document of the data")


def _batched(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _pieces(text: str) -> Iterator[str]:
    """The text cut about every ``PIECE_CHARACTERS``, at the first good place from there on."""
    start = 0
    while place := LONE_LINE_END.search(text, start + PIECE_CHARACTERS):
        yield text[start : place.end()]
        start = place.end()
    yield text[start:]


def _weighed_pieces(document: Document, cut: Cut) -> list[tuple[str, float]]:
    """What of a document is encoded at once, and its weight: parts of different weights apart."""
    if not document.weights:
        return [(piece, 1.0) for piece in cut(document.text)]
    found, start = [], 0
    for length, weight in document.weights:
        found += [(piece, weight) for piece in cut(document.text[start : start + length])]
        start += length
    assert start == len(document.text), "the parts of a document make up its text"
    return found


def _weights(batches: Iterable[list[tuple[int, float]]]) -> TokenWeights | None:
    """The runs of all batches, equal ones together; ``None`` where everything counts 1."""
    starts, values, at = [0], [1.0], 0
    for length, weight in itertools.chain.from_iterable(batches):
        if at == 0:
            values[0] = weight
        elif weight != values[-1]:
            starts.append(at)
            values.append(weight)
        at += length
    return None if values == [1.0] else TokenWeights(np.array(starts, np.int64), np.array(values, np.float32))


def _hash_rest(hashed: "hashlib.blake2b", boundaries: np.ndarray, weights: TokenWeights | None) -> None:
    """Add what belongs to the tokens to their hash."""
    hashed.update(boundaries.data)
    for array in () if weights is None else (weights.starts, weights.values):
        hashed.update(array.data)


def _starts(lengths: Iterable[list[int]]) -> np.ndarray:
    ends = np.cumsum(np.fromiter(itertools.chain.from_iterable(lengths), dtype=np.int64))
    return np.concatenate([np.zeros(1, np.int64), ends[:-1]])


def _tokenizer_fingerprint(tokenizer: Tokenizer, source: Source) -> str:
    """The tokenizer's own fingerprint; for one without, how it encodes the first documents stands in for it."""
    own = getattr(tokenizer, "fingerprint", None)
    if own is not None:
        return own()
    first = next(_batched(source.documents()))
    ids = tokenizer.encode_batch([document.text[:PIECE_CHARACTERS] for document in first], special=False)
    return digest(type(tokenizer).__qualname__, tokenizer.vocab_size, tokenizer.eos_ids, tokenizer.bos_id, ids)
