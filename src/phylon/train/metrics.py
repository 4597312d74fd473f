"""The run's log: one JSON object a line, which can be cut back to a checkpoint."""

import os
from collections.abc import Iterator
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from phylon.spec.errors import UserError, system_reason

Record = dict[str, Any]


class MetricsFile:
    """``metrics.jsonl``: records of the kinds "step", "eval", "samples", "watch", "skipped", "rolled_back", "plan",
    "resumed", "kept", "end".

    A step's record holds ``step`` (updates done before it), ``loss`` (mean over its targets), ``lr``, ``grad_norm``
    (before clipping), ``tokens`` (so far), ``tokens_per_s`` and ``seconds`` (so far). "skipped" holds the ``reason``.
    "end" holds the ``seconds`` in all, with the evaluation, the samples and the checkpoint that follow the last step.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _file(self) -> FileIO:
        """Opened when it is first needed: until then a folder may still hold another run."""
        try:
            return self.path.open("ab", buffering=0)
        except OSError as error:
            raise UserError(f"cannot write '{self.path}': {system_reason(error)}") from None

    def write(self, record: Record) -> None:
        """Append one record; a number that is not finite becomes null."""
        line, length = msgspec.json.encode(record) + b"\n", self.size()
        try:
            # A full disk takes a part of a line without an error, and refuses the rest.
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            self._file.truncate(length)
            raise UserError(f"cannot write '{self.path}': {system_reason(error)}; the run can be resumed") from None

    def size(self) -> int:
        """Its length in bytes."""
        return os.fstat(self._file.fileno()).st_size

    def sync(self) -> int:
        """Make sure that everything is on disk; its length in bytes."""
        os.fsync(self._file.fileno())
        return self.size()

    def cut(self, length: int) -> bool:
        """Drop what was logged after ``length`` bytes; false where the file is shorter than that."""
        if self.size() < length:
            return False
        self._file.truncate(length)
        return True

    def close(self) -> None:
        self._file.close()


class NoMetrics:
    """The log of a process that keeps none: the first one does."""

    path = Path("metrics.jsonl")

    def write(self, record: Record) -> None:
        pass

    def size(self) -> int:
        return 0

    def sync(self) -> int:
        return 0

    def cut(self, length: int) -> bool:
        return True

    def close(self) -> None:
        pass


def read_metrics(path: Path) -> Iterator[Record]:
    """Every whole record of a log (the last line of a killed run may be half a line)."""
    with path.open("rb") as lines:
        for line in lines:
            try:
                yield msgspec.json.decode(line)
            except msgspec.DecodeError:
                continue
