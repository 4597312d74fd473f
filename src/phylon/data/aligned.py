"""Sentence pairs of two languages in two files, line by line."""

import itertools
from collections.abc import Iterator
from pathlib import Path

from phylon.data.documents import Record, digest, file_sums
from phylon.data.lines import checked, read_lines
from phylon.data.passed import Empty, Policies, passed_over, usable
from phylon.spec.errors import UserError
from phylon.spec.registry import register


class Aligned(Policies, frozen=True, kw_only=True):
    """Two UTF-8 files (or ``.gz``) of as many lines, line by line translations of each other.

    Records have the fields ``source`` and ``target``. Lines empty in both are passed over; ``empty`` is about a line
    that is empty in one alone.
    """

    source: str
    target: str

    def records(self) -> Iterator[Record]:
        found = False
        for record in usable(self, self._lines(), self._record):
            found = True
            yield record
        if not found:
            raise UserError(f"'{self.source}' holds no text")

    def fingerprint(self) -> str:
        return digest("aligned", self.empty, self.unreadable, file_sums(self.files(), self.unreadable))

    def files(self) -> list[tuple[str, Path]]:
        sides = {"source": Path(self.source), "target": Path(self.target)}
        return [(f"{side}/{path.name}", path) for side, path in sides.items()]

    def _lines(self) -> Iterator[tuple[int, str, str]]:
        """The number of a line and what both files hold there, where it is not empty in both."""
        lines = (read_lines(Path(path), self) for path in (self.source, self.target))
        for one, other in itertools.zip_longest(*lines):
            if one is None or other is None:
                short, seen = (self.source, other) if one is None else (self.target, one)
                assert seen is not None
                problem = UserError(f"'{short}' ends after line {seen[0] - 1} and the other file goes on; align them")
                passed_over(self, problem)
                return
            if one[1].strip() or other[1].strip():
                yield one[0], one[1].strip(), other[1].strip()

    def _record(self, item: tuple[int, str, str]) -> Record:
        number, source, target = item
        where = f"{Path(self.source).name}:{number}"
        if not source or not target:
            raise Empty(f"{where}: the line is empty in one of the two files; leave it out of both")
        other = f"{Path(self.target).name}:{number}"
        return Record({"source": checked(source, where), "target": checked(target, other)}, where)


register(Aligned, paper="none", cases=lambda: [Aligned(source="a.en", target="a.de")])
