"""What a document is, what a source promises, and the small helpers every source shares."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from phylon.checkpoint.files import checksum
from phylon.spec.base import Slot
from phylon.spec.errors import UserError, did_you_mean


class Document(NamedTuple):
    """One text and its name: unique within its source, and the same on every machine that holds the same files.

    ``weights``: what the tokens of the text count in a loss, as (characters, weight) of consecutive parts that make up
    the text; empty where all count 1.
    """

    text: str
    name: str
    weights: tuple[tuple[int, float], ...] = ()


class Source(Protocol):
    """Where documents come from.

    ``documents()`` gives the non-empty documents, in an order that depends on the data alone; every call starts over.
    It raises ``UserError`` where there is nothing to give. ``fingerprint()`` changes when the documents may have
    changed.
    """

    def documents(self) -> Iterator[Document]: ...

    def fingerprint(self) -> str: ...


class Record(NamedTuple):
    """Several values that belong together (a source and its translation, a text and its label), and their name.

    ``cells``: the values are the cells of a TSV or CSV file, which has no numbers but written ones.
    """

    fields: Mapping[str, Any]
    name: str
    cells: bool = False


class DataSource(Slot):
    """Slot of ``data.source``: a ``Source`` that a recipe can name. Which of its walks it gives depends on its kind."""

    @classmethod
    def from_word(cls, word: str) -> "DataSource":
        """The source that a bare string in a recipe stands for: "python" or a path."""
        from phylon.data.sources import open_source

        return open_source(word)

    def documents(self) -> Iterator[Document]:
        """Texts, one a document."""
        raise UserError(f"the data '{kind_of(self)}' hold no plain texts; give text, or an objective that reads them")

    def records(self) -> Iterator[Record]:
        """Records of several fields; plain texts have the one field ``text``."""
        return (Record({"text": document.text}, document.name) for document in self.documents())

    def files(self) -> list[tuple[str, Path]]:
        """The files it reads and their names, which are the same wherever the files lie."""
        return []

    def fingerprint(self) -> str:
        raise NotImplementedError


def kind_of(source: DataSource) -> str:
    """What a recipe calls this kind of source."""
    return str(source.__struct_config__.tag)  # type: ignore[attr-defined]


def missing(path: Path, what: str = "no file or folder") -> UserError:
    """That a path names nothing, with the neighbour it nearly names."""
    return UserError(f"there is {what} '{path}'{near(path)}")


def near(path: Path, *more: str) -> str:
    """The hint where a neighbour (or one of ``more``) has nearly this name; a list of a whole folder is no help."""
    neighbours = [entry.name for entry in path.parent.iterdir()] if os.access(path.parent, os.R_OK | os.X_OK) else []
    hint = did_you_mean(path.name, [*neighbours, *more])
    return hint if hint.startswith(" (did") else ""


def digest(*parts: object) -> str:
    """A short hexadecimal hash of plain values (strings, numbers, None, lists and tuples of these)."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def file_sums(files: Iterable[tuple[str, Path]], unreadable: str | None = "refuse") -> list[tuple[str, int, str]]:
    """Name, bytes and checksum of the content of each file: a fingerprint that neither a touch nor a move changes.

    The files are read whole, once in a process, which is far below what it takes to decode or to tokenise them. One
    that cannot be read is refused, or with ``unreadable`` = "skip" known by that.
    """
    sums = []
    for name, path in files:
        try:
            status = path.stat()
            sums.append((name, status.st_size, _content(str(path.resolve()), status.st_size, status.st_mtime_ns)))
        except OSError as error:
            if unreadable != "skip":
                raise UserError(f"cannot read '{path}': {error.strerror}") from error
            sums.append((name, -1, "cannot be read"))
    return sums


@lru_cache(maxsize=1 << 18)
def _content(path: str, _size: int, _modified: int) -> str:
    return checksum(Path(path))


def read_utf8(path: Path) -> str:
    """The text of a file as it is (line ends are kept; a leading byte order mark is not text)."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read '{path}': {error.strerror}") from error
    try:
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        where = f"byte 0x{raw[error.start]:02x} at offset {error.start}"
        raise UserError(f"'{path}' is not UTF-8 text ({where}); convert it to UTF-8 or leave it out") from error
