"""Columns on disk: Parquet files, and folders that Hugging Face's ``datasets`` has saved."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phylon.data.documents import Document, Record, digest, file_sums, missing
from phylon.data.passed import Policies, nothing_left, passed_over, usable
from phylon.data.weighed import document_of
from phylon.spec.errors import UserError, did_you_mean
from phylon.spec.registry import register

BATCH_ROWS = 1024


class _Columns(Policies, frozen=True, kw_only=True):
    """Rows of named columns; ``field`` is the one whose text is a document, ``weight`` one with what it counts."""

    path: str
    field: str = "text"
    weight: str | None = None

    def records(self) -> Iterator[Record]:
        raise NotImplementedError

    def documents(self) -> Iterator[Document]:
        """The texts of ``field`` (or its parts, as in JSON lines), named as the rows."""
        return usable(self, self.records(), lambda row: document_of(row.fields, row.name, self.field, self.weight))

    @property
    def _what(self) -> tuple[str | None, ...]:
        return self.field, self.weight, self.empty, self.unreadable


class Parquet(_Columns, frozen=True, kw_only=True, tag="parquet"):
    """A ``.parquet`` file, or the ones below a folder sorted by path: every row a record ``<file>:<row>`` from 0.

    Read by row groups through pyarrow (``pip install 'phylon[data]'``), so that the size does not matter.
    """

    def records(self) -> Iterator[Record]:
        parquet = _pyarrow()
        root, files = Path(self.path).expanduser(), self._files()
        found, first = False, None
        for path in files:
            name = path.relative_to(root).as_posix() if root.is_dir() else path.name
            try:
                number = 0
                with parquet.ParquetFile(path) as opened:
                    for batch in opened.iter_batches(batch_size=BATCH_ROWS):
                        for row in batch.to_pylist():
                            found = True
                            yield Record(row, f"{name}:{number}")
                            number += 1
            except (OSError, ValueError, NotImplementedError, TypeError, KeyError) as error:  # bases of pyarrow's own
                problem = UserError(f"cannot read '{path}' as Parquet: {_line(error)}")
                passed_over(self, problem)
                first = first or problem
        if not found:
            raise UserError(f"'{self.path}' holds no rows" if first is None else nothing_left(first))

    def fingerprint(self) -> str:
        return digest("parquet", self._what, file_sums(self.files(), self.unreadable))

    def files(self) -> list[tuple[str, Path]]:
        root = Path(self.path).expanduser()
        return [(path.relative_to(root).as_posix() if root.is_dir() else path.name, path) for path in self._files()]

    def _files(self) -> list[Path]:
        root = Path(self.path).expanduser()
        if not root.exists():
            raise missing(root, "no Parquet file or folder")
        files = [root] if root.is_file() else sorted(root.rglob("*.parquet"))
        if not files:
            raise UserError(f"no .parquet file below '{root}'")
        return files


class HFDataset(_Columns, frozen=True, kw_only=True, tag="hf_dataset"):
    """A folder that ``datasets`` wrote with ``save_to_disk``; ``split`` names one where it holds several.

    Read through that package (``pip install datasets``), memory-mapped.
    """

    split: str | None = None

    def records(self) -> Iterator[Record]:
        rows, name = self._open(), Path(self.path).name
        if not len(rows):
            raise UserError(f"'{self.path}' holds no rows")

        def record(number: int) -> Record:
            try:
                return Record(rows[number], f"{name}:{number}")
            except Exception as error:  # a damaged file, or one of what the features of the dataset decode
                raise UserError(f"cannot read row {number} of '{self.path}': {_line(error)}") from None

        yield from usable(self, range(len(rows)), record)

    def fingerprint(self) -> str:
        return digest("hf_dataset", self._what, self.split, file_sums(self.files(), self.unreadable))

    def files(self) -> list[tuple[str, Path]]:
        root = Path(self.path).expanduser()
        return [(path.relative_to(root).as_posix(), path) for path in sorted(root.rglob("*")) if path.is_file()]

    def _open(self) -> Any:
        try:
            import datasets  # pyrefly: ignore[missing-import]
        except ImportError:
            raise UserError(
                f"reading '{self.path}' needs the package datasets: pip install datasets; or export it to Parquet or "
                "JSON lines, which need no more than phylon[data]"
            ) from None
        folder = Path(self.path).expanduser()
        if not folder.is_dir():
            raise missing(folder, "no folder of a saved dataset")
        try:
            found = datasets.load_from_disk(str(folder))
        except Exception as error:
            raise UserError(f"'{folder}' is not what datasets saves with save_to_disk: {_line(error)}") from None
        if isinstance(found, datasets.DatasetDict):
            names = list(found)
            if self.split is None and len(names) == 1:
                return found[names[0]]
            if self.split not in names:
                asked = f"no split '{self.split}'" if self.split else f"several splits ({', '.join(names)})"
                raise UserError(f"'{folder}' has {asked}{did_you_mean(self.split or '', names)}: set split")
            return found[self.split]
        if self.split is not None:
            raise UserError(f"'{folder}' has no splits; leave split='{self.split}' out")
        return found


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError("reading Parquet needs pyarrow: pip install 'phylon[data]'") from None
    return parquet


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


register(
    Parquet,
    paper="none",
    cases=lambda: [Parquet(path="a.parquet"), Parquet(path="texts", field="body", empty="refuse", unreadable="skip")],
)
register(HFDataset, paper="none", cases=lambda: [HFDataset(path="saved"), HFDataset(path="saved", split="train")])
