"""Several tasks as one source of records, each with its prefix; the standard library's functions and what they say."""

import ast
from collections.abc import Iterator
from pathlib import Path

import msgspec

from phylon.data.corpus import PythonCorpus
from phylon.data.documents import DataSource, Record, digest
from phylon.data.passed import Policies, Refused, usable
from phylon.data.table import text_of
from phylon.spec.base import Mechanism, Spec
from phylon.spec.errors import UserError
from phylon.spec.registry import register

MOST_CHARACTERS = 4000


class Task(Spec, frozen=True, kw_only=True):
    """One task of a mixture: records of ``source``, the fields that are read and said, and the words in front.

    ``prefix`` says to the model which task it is (T5, arXiv:1910.10683, section 2.4). ``cap`` bounds how many examples
    count when tasks are mixed, in the place of the objective's own.
    """

    name: str
    source: DataSource
    input: str = "input"
    target: str = "target"
    prefix: str = ""
    cap: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.source, str):
            msgspec.structs.force_setattr(self, "source", DataSource.from_word(self.source))
        if self.cap is not None and self.cap < 1:
            raise UserError(f"cap of task '{self.name}' must be at least 1, got {self.cap}")

    def record(self, record: Record) -> Record:
        """A record of the source as one of the mixture: its own fields, the prefix in front of what is read."""
        read, said = text_of(record, self.input), text_of(record, self.target)
        fields = {**record.fields, "input": self.prefix + read, "target": said, "task": self.name}
        return Record(fields, f"{self.name}/{record.name}", record.cells)


class Mixture(Policies, frozen=True, kw_only=True, tag="mixture"):
    """The records of several tasks as ``input`` (the prefix in front), ``target`` and ``task``; names are unique.

    Their other fields stay. An item in which a task's fields are wrong is passed over or refused as the source of the
    task says; one that the objective cannot use, as the mixture does.
    """

    tasks: tuple[Task, ...]

    def __post_init__(self) -> None:
        names = [task.name for task in self.tasks]
        if not names or len(set(names)) < len(names):
            raise UserError(f"a mixture needs tasks, each with a name of its own; got {', '.join(names) or 'none'}")

    def records(self) -> Iterator[Record]:
        for number, task in enumerate(self.tasks):
            found = False
            try:
                for record in usable(task.source, task.source.records(), task.record):
                    found = True
                    yield record
            except Refused as problem:
                raise problem.within(f"tasks.{number}.source") from None
            if not found:
                raise UserError(f"the source of task '{task.name}' gives no records")

    def caps(self) -> dict[str, int | None]:
        """The cap of every task, by name."""
        return {task.name: task.cap for task in self.tasks}

    def fingerprint(self) -> str:
        parts = [(t.name, t.input, t.target, t.prefix, t.source.fingerprint()) for t in self.tasks]
        return digest("mixture", parts, self.empty, self.unreadable)

    def files(self) -> list[tuple[str, Path]]:
        return [(f"{task.name}/{name}", path) for task in self.tasks for name, path in task.source.files()]


class PythonFunctions(Mechanism, DataSource, frozen=True, kw_only=True, tag="python_functions"):
    """The functions of the standard library that say what they do: ``code`` (without the docstring), ``doc``, ``name``.

    ``doc`` is the docstring's first line. Functions above 4,000 characters are passed over.
    """

    max_bytes: int | None = None

    def records(self) -> Iterator[Record]:
        for document in PythonCorpus(max_bytes=self.max_bytes).documents():
            try:
                tree = ast.parse(document.text)
            except SyntaxError:  # a topic of pydoc, where an interpreter comes without its sources
                continue
            lines = document.text.splitlines(keepends=True)
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    found = _function(node, lines)
                    if found is not None:
                        yield Record(found, f"{document.name}:{node.lineno}")

    def fingerprint(self) -> str:
        return digest("python_functions", PythonCorpus(max_bytes=self.max_bytes).fingerprint())

    def files(self) -> list[tuple[str, Path]]:
        return PythonCorpus(max_bytes=self.max_bytes).files()


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> dict[str, str] | None:
    doc = (ast.get_docstring(node) or "").strip().partition("\n")[0].strip()
    if not doc or len(node.body) < 2:
        return None
    first, rest = node.body[0], node.body[1]
    assert node.end_lineno is not None
    if rest.lineno <= first.lineno:  # everything on one line
        return None
    code = "".join(lines[node.lineno - 1 : first.lineno - 1] + lines[rest.lineno - 1 : node.end_lineno])
    return {"code": code, "doc": doc, "name": node.name} if len(code) <= MOST_CHARACTERS else None


register(
    Mixture,
    paper="arXiv:1910.10683 §2.4",
    cases=lambda: [Mixture(tasks=(Task(name="doc", source=PythonFunctions(), input="code", target="doc"),))],
)
register(PythonFunctions, paper="none", cases=lambda: [PythonFunctions()])
