"""Tables of named columns: TSV, CSV and JSON lines, plain or gzipped; every row knows its file and line."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from phylon.data.documents import Record, digest, file_sums
from phylon.data.lines import checked, json_object, read_lines
from phylon.data.passed import Empty, Policies, passed_over, usable
from phylon.spec.errors import UserError, did_you_mean
from phylon.spec.registry import register

MOST_REPEATS = 1_000_000
MOST_CELL = 1 << 30  # characters of a CSV cell; Python's own limit is 131,072
KINDS = (".tsv", ".csv", ".jsonl")


def value_of(record: Record, field: str) -> Any:
    """The value of a field; a near-miss hint where there is none."""
    if field not in record.fields:
        known = ", ".join(map(str, record.fields))
        raise UserError(f"{record.name}: no field '{field}'{did_you_mean(field, record.fields)}; it has {known}")
    return record.fields[field]


def text_of(record: Record, field: str) -> str:
    """The text of a field; empty or another type is refused."""
    value = value_of(record, field)
    if not isinstance(value, str):
        raise UserError(f"{record.name}: the field '{field}' is not text but {type(value).__name__}")
    if not value.strip():
        raise Empty(f"{record.name}: the field '{field}' is empty")
    return value


class Table(Policies, frozen=True, kw_only=True, tag="table"):
    """Records of named fields: a ``.tsv``, ``.csv`` or ``.jsonl`` file, or one of these with ``.gz`` behind.

    ``columns`` names the columns of a TSV or CSV file without a heading; left out, the first line is the heading. A TSV
    cell is what stands between two tabs, quotes included; CSV cells may be quoted (RFC 4180). Blank lines are passed
    over. ``format`` says what a file of another name is.
    """

    path: str
    columns: tuple[str, ...] | None = None
    format: Literal["tsv", "csv", "jsonl"] | None = None

    def __post_init__(self) -> None:
        if self.columns is not None and (not self.columns or len(set(self.columns)) < len(self.columns)):
            raise UserError(f"columns must be named, each once; got {', '.join(self.columns) or 'none'}")
        if self.columns is not None and self.suffix == ".jsonl":
            raise UserError(f"the objects of '{self.path}' name their own fields; leave columns out")

    @property
    def suffix(self) -> str:
        """The kind of table, by the name of its file."""
        if self.format is not None:
            return f".{self.format}"
        suffix = Path(self.path.removesuffix(".gz")).suffix.lower()
        if suffix not in KINDS:
            raise UserError(
                f"cannot tell what kind of table '{self.path}' is; name its format, or give {', '.join(KINDS)}"
            )
        return suffix

    def records(self) -> Iterator[Record]:
        """Every row in the order of the file, named ``file:line``; nothing to give is an error."""
        found = False
        for record in self._json() if self.suffix == ".jsonl" else self._separated():
            found = True
            yield record
        if not found:
            raise UserError(f"'{self.path}' holds no rows that can be read")

    def fingerprint(self) -> str:
        what = (self.columns, self.format, self.empty, self.unreadable)
        return digest("table", what, file_sums(self.files(), self.unreadable))

    def files(self) -> list[tuple[str, Path]]:
        return [(Path(self.path).name, Path(self.path))]

    def _separated(self) -> Iterator[Record]:
        name, rows = Path(self.path).name, self._cells()
        columns = self.columns
        if columns is None:
            number, heading = next(rows, (0, []))
            columns = tuple(checked(cell, f"{name}:{number}") for cell in heading)
            if "" in columns or len(set(columns)) < len(columns):
                raise UserError(
                    f"{name}:{number}: a heading names each column once; for a file without one give columns"
                )

        def record(row: tuple[int, list[str]]) -> Record:
            where, cells = f"{name}:{row[0]}", row[1]
            if len(cells) != len(columns):
                raise UserError(f"{where}: {len(cells)} cells for the {len(columns)} columns {', '.join(columns)}")
            return Record(dict(zip(columns, (checked(cell, where) for cell in cells), strict=True)), where, cells=True)

        return usable(self, rows, record)

    def _cells(self) -> Iterator[tuple[int, list[str]]]:
        lines = read_lines(Path(self.path), self)
        if self.suffix == ".tsv":
            yield from ((number, line.split("\t")) for number, line in lines if line.strip())
            return
        csv.field_size_limit(max(csv.field_size_limit(), MOST_CELL))
        reader = csv.reader((line + "\n" for _, line in lines), strict=True)
        while True:
            try:
                cells = next(reader, None)
            except csv.Error as error:
                where = f"{Path(self.path).name}:{reader.line_num}"
                passed_over(self, UserError(f"{where}: not CSV ({error})"))
                continue
            if cells is None:
                return
            if cells:
                yield reader.line_num, cells

    def _json(self) -> Iterator[Record]:
        name = Path(self.path).name
        lines = ((f"{name}:{number}", line) for number, line in read_lines(Path(self.path), self) if line.strip())
        return usable(self, lines, lambda item: Record(json_object(item[1], item[0]), item[0]))


class Records(Policies, frozen=True, kw_only=True):
    """Records written in the recipe itself, named ``record:0``, ``record:1``, …; each ``repeat`` times."""

    rows: tuple[dict[str, Any], ...]
    repeat: int = 1

    def __post_init__(self) -> None:
        if not self.rows or not 1 <= self.repeat <= MOST_REPEATS:
            raise UserError(
                f"rows must hold at least one record, and repeat must be from 1 to {MOST_REPEATS:,}, got {self.repeat}"
            )
        for index, fields in enumerate(self.rows):
            for name, value in fields.items():
                if not is_plain(value):
                    kinds = "text, a number, true or false, or a list or table of these"
                    raise UserError(f"record:{index}: the field '{name}' must be {kinds}, got {value!r}")

    def records(self) -> Iterator[Record]:
        for index, fields in enumerate(self.rows * self.repeat):
            yield Record(fields, f"record:{index}")

    def fingerprint(self) -> str:
        return digest("records", self.rows, self.repeat, self.empty, self.unreadable)


def is_plain(value: Any) -> bool:
    """Whether JSON can hold it."""
    if isinstance(value, list | tuple | dict):
        return all(map(is_plain, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, str | int | float)


register(
    Table,
    paper="none",
    cases=lambda: [Table(path="a.tsv"), Table(path="a.csv.gz", columns=("text", "label")), Table(path="a.jsonl")],
)
register(Records, paper="none", cases=lambda: [Records(rows=({"text": "a", "label": 1},), repeat=2)])
