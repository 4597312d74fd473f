"""The files a run's data came from, noted in its folder, so that a changed one can be named."""

from pathlib import Path

import msgspec

from phylon.data import Source
from phylon.data.documents import file_sums
from phylon.data.passed import policy
from phylon.train.report import write_text
from phylon.train.session import OtherData

NAME = ".sources.json"
MOST_NAMED = 3


def note_files(source: Source, out: Path) -> None:
    """Write ``.sources.json``: the checksum of every file by its name."""
    write_text(out / NAME, msgspec.json.format(msgspec.json.encode(_sums(source))).decode())


def changed_files(source: Source, out: Path) -> str:
    """What to add to a message that the data are others: ``" (changed: 'a.txt'; gone: 'b.txt')"``, as far as known."""
    try:
        before = msgspec.json.decode((out / NAME).read_bytes(), type=dict[str, str])
    except (OSError, msgspec.DecodeError):
        return ""
    now = _sums(source)
    groups = {
        "changed": [name for name in now if name in before and now[name] != before[name]],
        "new": [name for name in now if name not in before],
        "gone": [name for name in before if name not in now],
    }
    found = "; ".join(f"{word}: {_listed(names)}" for word, names in groups.items() if names)
    return f" ({found})" if found else ""


def check_files(source: Source, out: Path) -> None:
    """Refuse files that are not those of the run, before anything is computed from them."""
    if files := changed_files(source, out):
        raise OtherData("the data are not those of this run", files)


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(f"'{name}'" for name in names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _sums(source: Source) -> dict[str, str]:
    files = source.files() if hasattr(source, "files") else []
    return {name: total for name, _, total in file_sums(files, policy(source, "unreadable"))}
