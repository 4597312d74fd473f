"""Texts in memory, text files, folders and JSON lines as sources of documents, and the string that names one."""

import os
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from phylon.data.columns import Parquet
from phylon.data.corpus import PythonCorpus
from phylon.data.documents import DataSource, Document, digest, file_sums, missing, near, read_utf8
from phylon.data.lines import json_object, read_lines
from phylon.data.passed import Empty, Policies, Policy, usable
from phylon.data.weighed import document_of
from phylon.spec.base import Mechanism
from phylon.spec.errors import UserError
from phylon.spec.registry import register

TEXT_PATTERNS = ("*.txt", "*.md", "*.py")
MOST_REPEATS = 1_000_000
ACCEPTED = (
    '"python" (the standard library), a .txt, .md, .py, .jsonl, .jsonl.gz or .parquet file, or a folder of text files'
)


class Texts(Mechanism, DataSource, frozen=True, tag="texts"):
    """Texts written in the recipe itself, or held in memory: ``Texts(("one document", "another"))``.

    Named ``text:0``, ``text:1``, …; each is ``repeat`` times itself in a row.
    """

    texts: tuple[str, ...]
    repeat: int = 1
    empty: Policy = "skip"

    def __post_init__(self) -> None:
        assert not isinstance(self.texts, str), "Texts takes a tuple of texts, not one text"
        if not 1 <= self.repeat <= MOST_REPEATS:
            raise UserError(f"repeat must be from 1 to {MOST_REPEATS:,}, got {self.repeat}")

    def documents(self) -> Iterator[Document]:
        if not any(self.texts):
            raise UserError("the texts given hold no characters")
        yield from usable(self, enumerate(self.texts), self._document)

    def _document(self, item: tuple[int, str]) -> Document:
        index, text = item
        if not text:
            raise Empty(f"text:{index} is empty")
        return Document(text * self.repeat, f"text:{index}")

    def fingerprint(self) -> str:
        return digest("texts", self.texts, self.repeat)


class TextFile(Mechanism, DataSource, frozen=True, kw_only=True, tag="file"):
    """One UTF-8 file as one document, read whole."""

    path: str

    def documents(self) -> Iterator[Document]:
        path = Path(self.path)
        text = read_utf8(path)
        if not text:
            raise UserError(f"'{path}' is empty")
        yield Document(text, path.name)

    def fingerprint(self) -> str:
        return digest("file", file_sums(self.files()))

    def files(self) -> list[tuple[str, Path]]:
        return [(Path(self.path).name, Path(self.path))]


class TextFolder(Policies, frozen=True, kw_only=True, tag="folder"):
    """The UTF-8 files below a folder, one document each, sorted by their path in it, which is the document's name.

    A pattern without ``/`` is matched against the file's name, one with ``/`` against its path in the folder (where
    ``*`` passes ``/``). Files and folders whose name starts with a dot, and links to folders, are passed over.
    """

    path: str
    patterns: tuple[str, ...] = TEXT_PATTERNS

    def documents(self) -> Iterator[Document]:
        return usable(self, self._files(), self._document)

    def _document(self, file: tuple[Path, str]) -> Document:
        path, name = file
        text = read_utf8(path)
        if not text:
            raise Empty(f"'{path}' is empty")
        return Document(text, name)

    def fingerprint(self) -> str:
        policies = (self.empty, self.unreadable)
        return digest("folder", self.patterns, policies, file_sums(self.files(), self.unreadable))

    def files(self) -> list[tuple[str, Path]]:
        return [(name, path) for path, name in self._files()]

    def _files(self) -> list[tuple[Path, str]]:
        root = Path(self.path)
        if not root.exists():
            raise missing(root, "no folder")
        if not root.is_dir():
            raise UserError(f"the data folder '{root}' is no folder but a file")
        found, others = [], Counter[str]()
        for folder, folders, names in os.walk(root, onerror=_refuse):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for path in (Path(folder, name) for name in names if not name.startswith(".")):
                name = path.relative_to(root).as_posix()
                if any(fnmatchcase(name if "/" in pattern else path.name, pattern) for pattern in self.patterns):
                    found.append((path, name))
                else:
                    others[path.suffix or path.name] += 1
        if not found:
            seen = ", ".join(f"{count} {kind}" for kind, count in others.most_common(3))
            held = f"it holds {seen}" if seen else "it holds no files"
            raise UserError(f"no file in '{root}' matches {', '.join(self.patterns)} ({held})")
        return sorted(found, key=lambda pair: pair[1])


def _refuse(error: OSError) -> None:
    raise UserError(f"cannot read the folder '{error.filename}': {error.strerror}") from error


class JsonLines(Policies, frozen=True, kw_only=True, tag="jsonl"):
    """One JSON object a line; the document is the string in ``field``, its name ``<file name>:<line number>``.

    ``field`` may also hold a list of the text's parts, each a string or ``{"text": …, "weight": …}``, and ``weight``
    names a field with the weight of the whole document: what its tokens count in the loss, 1 unless given. Blank lines
    are passed over. The file (also ``.gz``) is read line by line, so its size does not matter.
    """

    path: str
    field: str = "text"
    weight: str | None = None

    def documents(self) -> Iterator[Document]:
        found, lines = False, read_lines(Path(self.path), self)
        for document in usable(self, ((number, line) for number, line in lines if line.strip()), self._document):
            found = True
            yield document
        if not found:
            raise UserError(f"'{self.path}' holds no text in the field '{self.field}'")

    def _document(self, item: tuple[int, str]) -> Document:
        number, line = item
        found = document_of(
            json_object(line, f"{self.path}:{number}"), f"{self.path}:{number}", self.field, self.weight
        )
        return found._replace(name=f"{Path(self.path).name}:{number}")

    def fingerprint(self) -> str:
        what = (self.field, self.weight, self.empty, self.unreadable)
        return digest("jsonl", what, file_sums(self.files(), self.unreadable))

    def files(self) -> list[tuple[str, Path]]:
        return [(Path(self.path).name, Path(self.path))]


def open_source(name: str | Path) -> DataSource:
    """The source a name stands for: ``python``, a file, or a folder of text files.

    Files are ``.txt``, ``.md`` or ``.py``, ``.jsonl`` (also ``.jsonl.gz``) or ``.parquet``. Only the kind is decided
    here; contents are read (and found bad) when the documents are asked for.
    """
    if name == "python":
        return PythonCorpus()
    if not str(name):
        raise UserError(f"the name of the data is empty; give {ACCEPTED}")
    try:
        path = Path(name).expanduser()
        missing = not path.exists()
    except (OSError, RuntimeError) as error:  # too long for a name, not permitted, no such home
        raise UserError(f"cannot read the data '{str(name)[:80]}' ({error.args[-1]}); give {ACCEPTED}") from error
    if missing:
        raise UserError(f"there is no data '{name}'{near(path, 'python')}; give {ACCEPTED}")
    if path.is_dir():
        return TextFolder(path=str(path))
    suffix = path.suffix.lower()
    if suffix == ".jsonl" or path.name.lower().endswith(".jsonl.gz"):
        return JsonLines(path=str(path))
    if suffix == ".parquet":
        return Parquet(path=str(path))
    if f"*{suffix}" in TEXT_PATTERNS:
        return TextFile(path=str(path))
    raise UserError(f"cannot tell what kind of data '{name}' is; give {ACCEPTED}")


register(Texts, paper="none", cases=lambda: [Texts(("a", "b")), Texts(("ab",), repeat=3)])
register(TextFile, paper="none", cases=lambda: [TextFile(path="a.txt")])
register(
    TextFolder,
    paper="none",
    cases=lambda: [
        TextFolder(path="texts", patterns=("*.txt",)),
        TextFolder(path="a", unreadable="skip"),
    ],
)
register(
    JsonLines,
    paper="none",
    cases=lambda: [JsonLines(path="a.jsonl", field="text"), JsonLines(path="a.jsonl", weight="w")],
)
