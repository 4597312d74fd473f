"""The folder of a run: which files are the run's own, and nobody else's.

A run marks its folder before it writes anything there, and refuses a folder that already holds something under a name
it would write. So every one of these names in a marked folder is the run's, and may be removed with it.
"""

import fcntl
import os
import shutil
from pathlib import Path
from typing import IO

from phylon.spec.errors import UserError, system_reason

MARKER = ".phylon-run"
MARKED = "This folder holds a run of phylon; 'phylon train --fresh' removes the run's files.\n"
STAGE = ".fresh"  # where a run is prepared whose folder still holds another
NAMES = (
    "recipe.toml",
    "metrics.jsonl",
    "report.html",
    "checkpoints",
    "tokenizer",
    "model",
    "model_ema",
    "adapter",
    "tensorboard",
    "compiler.log",
    ".sources.json",
)
TOKENS = "data/tokens-*"  # the user's own data may lie beside them in data/


def is_run(folder: Path) -> bool:
    """Whether a run wrote (or began to write) here."""
    return (folder / MARKER).is_file()


class Lock:
    """One process at a time in a run's folder. The operating system frees the lock of a process that is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made = False
        """Whether the folder is a run's only since ``claim``, so that nobody else can have written there."""
        self._file: IO[bytes] | None = None

    @property
    def held(self) -> bool:
        """Whether the folder is locked by this."""
        return self._file is not None

    def claim(self) -> None:
        """Make the folder a run's if it is none yet, and lock it."""
        while True:
            made = claim(self.folder)
            self.take()
            if self.held or is_run(self.folder):  # else another process has just given it up
                break
        self.made = made and self.held

    def take(self) -> None:
        """Lock the folder if it is a run's already; one that another process has locked is refused."""
        while self._file is None:
            try:
                file = (self.folder / MARKER).open("r+b")
            except OSError:
                return  # no run's yet, or not ours to write: what writes there says so
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                raise UserError(
                    f"another process is training in '{self.folder}': wait for its end, or give another folder"
                ) from None
            except OSError:
                pass  # a file system without locks
            if self._is_marker(file):
                self._file = file
            else:  # removed since it was opened: the lock of a file that nobody else can find is none
                file.close()

    def _is_marker(self, file: IO[bytes]) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), (self.folder / MARKER).stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def claim(folder: Path) -> bool:
    """Make the folder and mark it as a run's, if nobody has yet; whether it was this call that did.

    One that holds other files under a run's names is refused.
    """
    if is_run(folder):
        return False
    check_free(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to '{folder}': {system_reason(error)}") from None
    try:
        with (folder / MARKER).open("x", encoding="utf-8") as file:  # never replaced: it is what is locked
            file.write(MARKED)
    except FileExistsError:
        return False
    except OSError as error:
        raise UserError(f"cannot write to '{folder}': {system_reason(error)}") from None
    return True


def check_free(folder: Path) -> None:
    """Refuse a folder that no run marked and that holds something under a name a run writes."""
    taken = [] if is_run(folder) else [name for name in NAMES if (folder / name).exists()]
    if taken:
        raise UserError(f"'{folder / taken[0]}' is not from a run of this folder; give another folder, or move it away")


def clear(folder: Path) -> None:
    """Remove what a run wrote below ``folder``, and the folders that are empty then; all else stays."""
    if is_run(folder):
        _remove(folder, folder / STAGE, folder / MARKER)


def stage(folder: Path) -> Path:
    """A place below a run's folder to prepare the run that is to replace it; ``unstage`` gives it up."""
    unstage(folder)
    (folder / STAGE).mkdir()
    return folder / STAGE


def unstage(folder: Path) -> None:
    shutil.rmtree(folder / STAGE, ignore_errors=True)


def replace_run(folder: Path) -> None:
    """Remove the run in ``folder`` and put what was prepared in its place."""
    _remove(folder)
    for path in [*(folder / STAGE).glob(TOKENS), *(folder / STAGE / name for name in NAMES)]:
        if path.exists():
            target = folder / path.relative_to(folder / STAGE)
            target.parent.mkdir(exist_ok=True)
            path.rename(target)
    unstage(folder)


def _remove(folder: Path, *more: Path) -> None:
    for path in [*(folder / name for name in NAMES), *folder.glob(TOKENS), *more]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for path in (folder / "data", folder):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
