"""All libraries together: begin to make them, look again, wait for them, keep a run to those it began with."""

import time
from collections.abc import Collection, Generator
from contextlib import contextmanager

from phylon.ops.native.library import LIBRARIES


def start() -> None:
    """Begin to make what is not made; returns at once."""
    for library in LIBRARIES.values():
        library.start()


def refresh() -> None:
    """Use what has been made since: the moment to do so is the caller's, since results move in their last bits."""
    for library in LIBRARIES.values():
        library.refresh()


def wait(seconds: float = 300) -> dict[str, str | None]:
    """Wait until everything is made or cannot be; the reason by library, ``None`` where it is ready."""
    start()
    end = time.monotonic() + seconds
    return {name: library.wait(max(0.0, end - time.monotonic())) for name, library in LIBRARIES.items()}


def names() -> list[str]:
    """The libraries that this process uses now."""
    return sorted(name for name, library in LIBRARIES.items() if library.reason() is None)


def limit(allowed: Collection[str] | None) -> None:
    """Use no library but these (``None``: any): a resumed run computes with the kernels it began with."""
    for name, library in LIBRARIES.items():
        library.allowed = allowed is None or name in allowed


@contextmanager
def without() -> Generator[None]:
    """Only PyTorch's own operations inside the block: as others compute, and as PyTorch's counters see."""
    before = {name: library.allowed for name, library in LIBRARIES.items()}
    limit(())
    try:
        yield
    finally:
        for name, allowed in before.items():
            LIBRARIES[name].allowed = allowed
