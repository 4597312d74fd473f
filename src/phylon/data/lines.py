"""Lines of text files and the JSON in them, each with its number."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from phylon.data.passed import passed_over
from phylon.spec.errors import UserError, system_reason


def read_lines(path: Path, source: object = None) -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 file (gzipped where it ends in ``.gz``), numbered from 1, without their ends.

    Only ``\\n`` (or ``\\r\\n``) ends a line, so that a separator inside of a text does not shift what follows. Bytes
    that are not UTF-8 come as surrogates, which ``checked`` finds. Where the file is damaged it ends, if ``source``
    passes over what is unreadable.
    """
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for raw in file:
                number += 1
                line = raw.decode("utf-8", "surrogateescape").rstrip("\n").removesuffix("\r")
                yield number, line.removeprefix("\ufeff") if number == 1 else line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        passed_over(source, UserError(f"'{path}' is damaged after line {number}: {error}"))
    except OSError as error:
        raise UserError(f"cannot read '{path}': {system_reason(error)}") from None


def checked(text: str, where: str) -> str:
    """The text, refused where a byte of it was not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        byte = ord(error.object[error.start]) - 0xDC00
        raise UserError(f"{where}: not UTF-8 text (byte 0x{byte:02x})") from None
    return text


def json_object(line: str, where: str) -> dict[str, Any]:
    """The JSON object that a line holds."""
    try:
        value = msgspec.json.decode(checked(line, where))
    except msgspec.DecodeError as error:
        raise UserError(f"{where}: not JSON ({error})") from None
    except RecursionError:
        raise UserError(f"{where}: JSON that is nested too deeply to be read") from None
    if not isinstance(value, dict):
        raise UserError(f"{where}: not a JSON object but {type(value).__name__}; each line must be one")
    return value
