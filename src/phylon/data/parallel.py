"""Sentence pairs of two languages in two files, line by line."""

import itertools
from collections.abc import Iterator
from pathlib import Path

from phylon.data.documents import DataSource, Record, digest, file_sums
from phylon.data.table import read_lines
from phylon.spec.base import Mechanism
from phylon.spec.errors import UserError
from phylon.spec.registry import register


class Aligned(Mechanism, DataSource, frozen=True, kw_only=True):
    """Two UTF-8 files (or ``.gz``) of as many lines, line by line translations of each other.

    Records have the fields ``source`` and ``target``. Lines empty in both are passed over; a line that is empty in one
    alone is refused.
    """

    source: str
    target: str

    def records(self) -> Iterator[Record]:
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
                yield Record({"source": source.strip(), "target": target.strip()}, f"{name}:{number}")
        if not found:
            raise UserError(f"'{self.source}' holds no text")

    def fingerprint(self) -> str:
        return digest("aligned", file_sums(self.files()))

    def files(self) -> list[tuple[str, Path]]:
        return [(path.name, path) for path in (Path(self.source), Path(self.target))]


register(Aligned, paper="none", cases=lambda: [Aligned(source="a.en", target="a.de")])
