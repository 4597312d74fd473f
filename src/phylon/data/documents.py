"""What a document is, what a source promises, and the small helpers every source shares."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from phylon.spec.errors import UserError


class Document(NamedTuple):
    """One text and its name: unique within its source, and the same on every machine that holds the same files."""

    text: str
    name: str


class Source(Protocol):
    """Where documents come from.

    ``documents()`` gives the non-empty documents, in an order that depends on the data alone; every call starts over.
    It raises ``UserError`` where there is nothing to give. ``fingerprint()`` changes when the documents may have
    changed.
    """

    def documents(self) -> Iterator[Document]: ...

    def fingerprint(self) -> str: ...


def digest(*parts: object) -> str:
    """A short hexadecimal hash of plain values (strings, numbers, None, lists and tuples of these)."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def file_stamps(paths: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Absolute path, bytes and modification time (ns) of each file: what a fingerprint holds in place of the contents,
    which would have to be read whole at every start."""
    stamps = []
    for path in paths:
        try:
            status = path.stat()
        except OSError as error:
            raise UserError(f"cannot read '{path}': {error.strerror}") from error
        stamps.append((str(path.resolve()), status.st_size, status.st_mtime_ns))
    return stamps


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
