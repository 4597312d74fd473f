"""The embedded default corpus: the running interpreter's own standard library, with nothing to download or copy."""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from phylon.data.documents import DataSource, Document, digest, file_sums
from phylon.spec.base import Mechanism
from phylon.spec.errors import UserError
from phylon.spec.registry import register

# Third-party code, tests, demonstrations, and files written by a generator (code pages, build settings, help topics).
SKIPPED_FOLDERS = {"__pycache__", "__phello__", "site-packages", "dist-packages", "test", "tests", "encodings"}
SKIPPED_FOLDERS |= {"ensurepip", "idlelib", "lib-dynload", "lib2to3", "pydoc_data", "turtledemo"}


class PythonCorpus(Mechanism, DataSource, frozen=True, kw_only=True, tag="python"):
    """The ``.py`` files of this interpreter's standard library, sorted by path; about 8 MB on Python 3.11.

    Files that are not UTF-8 are left out. Where an interpreter comes without its source files, the help texts in
    ``pydoc_data.topics`` (about 0.5 MB of English) take their place. ``max_bytes`` keeps the documents before the first
    that would pass it. The bytes differ between patch releases of Python.
    """

    max_bytes: int | None = None

    def documents(self) -> Iterator[Document]:
        if self.max_bytes is not None and self.max_bytes < 1:
            raise UserError(f"max_bytes of the Python corpus is {self.max_bytes}; give at least 1, or leave it out")
        left = self.max_bytes
        for index, document in enumerate(_all_documents()):
            size = len(document.text.encode())
            if left is not None and size > left:
                if index == 0:
                    raise UserError(f"max_bytes={self.max_bytes} is below the first document ({size} bytes)")
                return
            left = None if left is None else left - size
            yield document

    def fingerprint(self) -> str:
        files = self.files()
        return digest("python", self.max_bytes, file_sums(files) if files else _topics())

    def files(self) -> list[tuple[str, Path]]:
        return [(name, path) for path, name in _source_files()]


def _all_documents() -> Iterator[Document]:
    files = _source_files()
    for path, name in files:
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        except OSError as error:
            raise UserError(f"cannot read '{path}': {error.strerror}") from error
        if text:
            yield Document(text, name)
    if not files:
        yield from (Document(text, f"topics/{topic}") for topic, text in _topics())


def _source_files() -> list[tuple[Path, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith("config-")]
        # The build's settings (_sysconfigdata...) are generated, and hold this machine's paths.
        found += [
            Path(folder, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    return sorted(((path, path.relative_to(root).as_posix()) for path in found), key=lambda pair: pair[1])


def _topics() -> list[tuple[str, str]]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UserError(
            "this Python has neither its source files nor pydoc_data; give a text file or a folder"
        ) from error
    return sorted((topic, text) for topic, text in topics.items() if text)


register(PythonCorpus, paper="none", cases=lambda: [PythonCorpus(), PythonCorpus(max_bytes=1_000_000)])
