"""Regular files opened for reading: one door for every file that a checkpoint or a tokenizer consists of."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from phylon.spec.errors import UserError, system_reason

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def there(path: Path) -> bool:
    """Whether anything bears this name, be it a folder, a pipe, or a link that leads nowhere.

    What a checkpoint may lack counts as lacking only where this is false: the rest is for ``open_file`` to refuse.
    """
    return os.path.lexists(path)


def open_file(path: Path) -> BinaryIO:
    """A regular file, opened for reading.

    Raises:
        UserError: there is none, it is of another kind (none is waited for: a pipe would hang), or it may not be read.
    """
    try:
        _refuse_kind(path, os.stat(path).st_mode)
        # Should it turn into a pipe between the two calls, this does not wait either.
        file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        said = f"{path} is a link to nothing: put the file there" if path.is_symlink() else f"{path}: no such file"
        raise UserError(said) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {_reason(error)}") from None
    try:
        _refuse_kind(path, os.fstat(file).st_mode)
        return os.fdopen(file, "rb")
    except BaseException:
        os.close(file)
        raise


def read_file(path: Path, most: int | None = None) -> bytes:
    """The content of a regular file, of at most ``most`` bytes.

    Raises:
        UserError: as ``open_file``, or the file is larger.
    """
    with open_file(path) as file:
        try:
            content = file.read() if most is None else file.read(most + 1)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {_reason(error)}") from None
    if most is not None and len(content) > most:
        raise UserError(f"{path} is too large: more than {most >> 20} MB")
    return content


def _refuse_kind(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for test, name in _KINDS if test(mode)), "no regular file")
        raise UserError(f"{path} is {kind}, not a file: put a regular file there")


def _reason(error: Exception) -> str:
    return system_reason(error) if isinstance(error, OSError) else str(error)
