"""Sentence pairs of two languages: two aligned files, or two columns of a table."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from phylon.data.documents import digest, file_stamps
from phylon.data.table import Table, read_lines
from phylon.spec.base import Spec
from phylon.spec.errors import UserError


class Pair(NamedTuple):
    """A text and its translation."""

    source: str
    target: str
    where: str


class Aligned(Spec, frozen=True, kw_only=True, tag_field="kind", tag="aligned"):
    """Two UTF-8 files (or ``.gz``) of as many lines, line by line translations of each other. Lines empty in both are
    passed over; a line that is empty in one alone is refused."""

    source: str
    target: str

    def pairs(self) -> Iterator[Pair]:
        name, found = Path(self.source).name, False
        lines = itertools.zip_longest(read_lines(Path(self.source)), read_lines(Path(self.target)))
        for one, other in lines:
            if one is None or other is None:
                short, seen = (self.source, other) if one is None else (self.target, one)
                assert seen is not None
                raise UserError(f"'{short}' ends after line {seen[0] - 1} and the other file goes on; align them")
            (number, source), (_, target) = one, other
            if bool(source.strip()) != bool(target.strip()):
                raise UserError(f"{name}:{number}: the line is empty in one of the two files; leave it out of both")
            if source.strip():
                found = True
                yield Pair(source.strip(), target.strip(), f"{name}:{number}")
        if not found:
            raise UserError(f"'{self.source}' holds no text")

    def fingerprint(self) -> str:
        return digest("aligned", file_stamps([Path(self.source), Path(self.target)]))


def table_pairs(table: Table, source: str, target: str) -> Iterator[Pair]:
    """Two columns of a table as pairs."""
    for row in table.rows():
        yield Pair(row.text(source).strip(), row.text(target).strip(), row.where)
