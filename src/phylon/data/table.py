"""Tables of named columns: TSV, CSV and JSON lines, plain or gzipped; every row knows its file and line."""

import csv
import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from phylon.data.documents import digest, file_stamps
from phylon.spec.base import Spec
from phylon.spec.errors import UserError, did_you_mean, system_reason

KINDS = (".tsv", ".csv", ".jsonl")


@dataclass(frozen=True, slots=True)
class Cells:
    """One row: its values by column (text, or whatever JSON holds), and ``file:line`` for messages."""

    values: dict[str, Any]
    where: str

    def __getitem__(self, column: str) -> Any:
        """The value of a column; a near-miss hint where there is none."""
        if column not in self.values:
            known = ", ".join(map(str, self.values))
            raise UserError(f"{self.where}: no column '{column}'{did_you_mean(column, self.values)}; it has {known}")
        return self.values[column]

    def text(self, column: str) -> str:
        """The text of a column; empty or another type is refused."""
        value = self[column]
        if not isinstance(value, str):
            raise UserError(f"{self.where}: the column '{column}' is not text but {type(value).__name__}")
        if not value.strip():
            raise UserError(f"{self.where}: the column '{column}' is empty")
        return value


class Table(Spec, frozen=True, kw_only=True, tag_field="kind", tag="table"):
    """A ``.tsv``, ``.csv`` or ``.jsonl`` file, or one of these with ``.gz`` behind.

    ``columns`` names the columns of a TSV or CSV file without a heading; left out, the first line is the heading. A TSV
    cell is what stands between two tabs, quotes included; CSV cells may be quoted (RFC 4180). Blank lines are passed
    over.
    """

    path: str
    columns: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.columns is not None and (not self.columns or len(set(self.columns)) < len(self.columns)):
            raise UserError(f"columns must be named, each once; got {', '.join(self.columns) or 'none'}")
        if self.columns is not None and self.suffix == ".jsonl":
            raise UserError(f"the objects of '{self.path}' name their own fields; leave columns out")

    @property
    def suffix(self) -> str:
        """The kind of table, by the name of its file."""
        suffix = Path(self.path.removesuffix(".gz")).suffix.lower()
        if suffix not in KINDS:
            raise UserError(f"cannot tell what kind of table '{self.path}' is; give {', '.join(KINDS)}, or their .gz")
        return suffix

    def rows(self) -> Iterator[Cells]:
        """Every row in the order of the file; nothing to give is an error."""
        found = False
        for cells in self._json() if self.suffix == ".jsonl" else self._separated():
            found = True
            yield cells
        if not found:
            raise UserError(f"'{self.path}' holds no rows")

    def fingerprint(self) -> str:
        return digest("table", self.columns, file_stamps([Path(self.path)]))

    def _separated(self) -> Iterator[Cells]:
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
                yield Cells(dict(zip(columns, cells, strict=True)), where)

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

    def _json(self) -> Iterator[Cells]:
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
            yield Cells(value, where)


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
