"""What ``torch.compile`` says while a run compiles its blocks: kept beside the run, not on the terminal."""

import logging
import os
import warnings
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAME = "compiler.log"
_PARTS = ("_dynamo", "_inductor", "_functorch")


@contextmanager
def compiler_log(folder: Path) -> Generator[None]:
    """Warnings of the compiler and of its logs go to ``folder/compiler.log`` inside the block; others stay as they are.

    Whoever sets TORCH_LOGS wants to see them, and does.
    """
    if "TORCH_LOGS" in os.environ:
        yield
        return
    handler, before = _Beside(folder / NAME), warnings.showwarning
    ours: list[logging.Handler] = [handler]
    loggers = [logging.getLogger(f"torch.{part}") for part in _PARTS]
    kept = [(logger.handlers[:], logger.propagate) for logger in loggers]

    def show(message: Any, category: Any, filename: str, lineno: int, *more: Any) -> None:
        if any(f"{os.sep}torch{os.sep}{part}{os.sep}" in filename for part in _PARTS):
            handler.write(f"{category.__name__}: {message}")
        else:
            before(message, category, filename, lineno, *more)

    for logger in loggers:
        logger.handlers, logger.propagate = ours, False
    warnings.showwarning = show  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.showwarning = before
        for logger, (handlers, propagate) in zip(loggers, kept, strict=True):
            logger.handlers, logger.propagate = handlers, propagate


class _Beside(logging.Handler):
    """Appends to a file that is opened for every record, so that it may be removed or lack its folder meanwhile."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        self.write(record.getMessage())

    def write(self, text: str) -> None:
        with suppress(OSError), self.path.open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")
