"""Tables of named columns: TSV, CSV and JSON lines, plain or gzipped; every row knows its file and line."""

import csv
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from phylon.data.documents import DataSource, Record, digest, file_sums
from phylon.spec.base import Mechanism
from phylon.spec.errors import UserError, did_you_mean, system_reason
from phylon.spec.registry import register

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
        raise UserError(f"{record.name}: the field '{field}' is empty")
    return value


class Table(Mechanism, DataSource, frozen=True, kw_only=True, tag="table"):
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
            raise UserError(f"'{self.path}' holds no rows")

    def fingerprint(self) -> str:
        return digest("table", self.columns, file_sums(self.files()))

    def files(self) -> list[tuple[str, Path]]:
        return [(Path(self.path).name, Path(self.path))]

    def _separated(self) -> Iterator[Record]:
        name = Path(self.path).name
        columns = None if self.columns is None else list(self.columns)
        for number, cells in self._cells():
            where = f"{name}:{number}"
            if columns is None:
                if "" in cells or len(set(cells)) < len(cells):
                    raise UserError(f"{where}: a heading names each column once; for a file without one give columns")
                columns = cells
            elif len(cells) != len(columns):
                raise UserError(f"{where}: {len(cells)} cells for the {len(columns)} columns {', '.join(columns)}")
            else:
                yield Record(dict(zip(columns, cells, strict=True)), where)

    def _cells(self) -> Iterator[tuple[int, list[str]]]:
        lines = read_lines(Path(self.path))
        if self.suffix == ".tsv":
            for number, line in lines:
                if line.strip():
                    yield number, line.split("\t")
            return
        reader = csv.reader((line + "\n" for _, line in lines), strict=True)
        try:
            for cells in reader:
                if cells:
                    yield reader.line_num, cells
        except csv.Error as error:
            raise UserError(f"{Path(self.path).name}:{reader.line_num}: not CSV ({error})") from None

    def _json(self) -> Iterator[Record]:
        name = Path(self.path).name
        for number, line in read_lines(Path(self.path)):
            if not line.strip():
                continue
            where = f"{name}:{number}"
            try:
                value = msgspec.json.decode(line)
            except msgspec.DecodeError as error:
                raise UserError(f"{where}: not JSON ({error})") from None
            if not isinstance(value, dict):
                raise UserError(f"{where}: not a JSON object but {type(value).__name__}")
            yield Record(value, where)


class Records(Mechanism, DataSource, frozen=True, kw_only=True):
    """Records written in the recipe itself, named ``record:0``, ``record:1``, …; each ``repeat`` times."""

    rows: tuple[dict[str, Any], ...]
    repeat: int = 1

    def __post_init__(self) -> None:
        if not self.rows or self.repeat < 1:
            raise UserError("rows must hold at least one record, and repeat must be at least 1")

    def records(self) -> Iterator[Record]:
        for index, fields in enumerate(self.rows * self.repeat):
            yield Record(fields, f"record:{index}")

    def fingerprint(self) -> str:
        return digest("records", self.rows, self.repeat)


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 file (gzipped where it ends in ``.gz``), numbered from 1, without their ends.

    Only ``\\n`` (or ``\\r\\n``) ends a line, so that a separator inside of a text does not shift what follows.
    """
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for raw in file:
                number += 1
                line = raw.decode("utf-8").rstrip("\n").removesuffix("\r")
                yield number, line.removeprefix("\ufeff") if number == 1 else line
    except UnicodeDecodeError as error:
        raise UserError(f"{path.name}:{number}: not UTF-8 text (byte 0x{error.object[error.start]:02x})") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"'{path}' is damaged after line {number}: {error}") from None
    except OSError as error:
        raise UserError(f"cannot read '{path}': {system_reason(error)}") from None


register(
    Table,
    paper="none",
    cases=lambda: [Table(path="a.tsv"), Table(path="a.csv.gz", columns=("text", "label")), Table(path="a.jsonl")],
)
register(Records, paper="none", cases=lambda: [Records(rows=({"text": "a", "label": 1},), repeat=2)])
