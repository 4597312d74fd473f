"""The held-out part of a source, chosen by a hash of each document's name: it stays when other documents are added."""

import hashlib
import json
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from phylon.data.documents import DataSource, Document, Record, Source, digest
from phylon.data.passed import usable
from phylon.data.table import is_plain, value_of
from phylon.spec.errors import UserError


class Part(msgspec.Struct, frozen=True, kw_only=True, tag="part", tag_field="kind"):
    """The documents whose name hashes into ``[start, stop)``, where every name falls evenly into ``[0, 1)``."""

    source: Source
    start: float
    stop: float
    seed: int = 0

    def documents(self) -> Iterator[Document]:
        total = kept = 0
        for document in self.source.documents():
            total += 1
            if self.start <= _place(document.name, self.seed) < self.stop:
                kept += 1
                yield document
        if not kept:
            raise UserError(
                f"none of the {total} documents falls in the share {self.start:g} to {self.stop:g} of the split; "
                "give more documents or another share"
            )

    def fingerprint(self) -> str:
        return digest("part", self.source.fingerprint(), self.start, self.stop, self.seed)


def _place(name: str, seed: int = 0) -> float:
    """Where a name falls in ``[0, 1)``: a pure function of the name and the seed."""
    hashed = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8, salt=seed.to_bytes(8, "little"))
    return (int.from_bytes(hashed.digest(), "little") >> 11) / 2**53


def split_documents(source: Source, share: float = 0.02, seed: int = 0) -> tuple[Part, Part]:
    """``(training, held out)``: whole documents, about ``share`` of them held out, the same ones every time.

    Too few documents for this (one text file is one document) show as a ``UserError`` when the empty part is read; cut
    the tokens instead, with ``TokenStore.slice``.
    """
    if not 0 < share < 1:
        raise UserError(f"the held-out share is {share:g}; it must lie between 0 and 1, such as 0.02")
    if not 0 <= seed < 1 << 64:
        raise UserError(f"the seed of the split is {seed}; it must lie between 0 and 2^64 - 1")
    return (
        Part(source=source, start=share, stop=1.0, seed=seed),
        Part(source=source, start=0.0, stop=share, seed=seed),
    )


class RecordPart(msgspec.Struct, frozen=True, kw_only=True, tag="record_part", tag_field="kind"):
    """The records whose ``fields`` hash into ``[start, stop)``.

    Records are told apart by what they say, not by where they stand, so that a text that occurs twice is never in
    training and held out at once.
    """

    source: DataSource
    fields: tuple[str, ...]
    start: float
    stop: float
    seed: int = 0

    def records(self) -> Iterator[Record]:
        total = kept = 0
        for place, record in usable(self, self.source.records(), self._placed):
            total += 1
            if self.start <= place < self.stop:
                kept += 1
                yield record
        if not kept:
            raise UserError(
                f"none of the {total} records falls in the share {self.start:g} to {self.stop:g} of the split; "
                "give more records or another share"
            )

    def _placed(self, record: Record) -> tuple[float, Record]:
        values = [value_of(record, field) for field in self.fields]
        for field, value in zip(self.fields, values, strict=True):
            if not is_plain(value):
                kind = type(value).__name__
                raise UserError(f"{record.name}: the field '{field}' is neither text nor number but {kind}")
        said = json.dumps(values)
        return _place(said, self.seed), record

    def documents(self) -> Iterator[Document]:
        return self.source.documents()

    def fingerprint(self) -> str:
        return digest("record_part", self.source.fingerprint(), self.fields, self.start, self.stop, self.seed)


def split_records(
    source: DataSource, share: float, fields: tuple[str, ...], seed: int = 0
) -> tuple[RecordPart, RecordPart]:
    """``(training, held out)``: about ``share`` of the records held out, by what ``fields`` hold."""
    if not 0 < share < 1:
        raise UserError(f"the held-out share is {share:g}; it must lie between 0 and 1, such as 0.02")
    return (
        RecordPart(source=source, fields=fields, start=share, stop=1.0, seed=seed),
        RecordPart(source=source, fields=fields, start=0.0, stop=share, seed=seed),
    )


def held_out_names(names: Sequence[str], share: float, seed: int = 0) -> np.ndarray:
    """Which of the names are held out, (n,) bool: about ``share`` of them, the same ones every time."""
    if not 0 <= share < 1:
        raise UserError(f"the held-out share is {share:g}; it must be at least 0 and below 1")
    return np.array([_place(name, seed) < share for name in names])
