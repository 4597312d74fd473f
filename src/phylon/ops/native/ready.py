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
    """The libraries that this process uses now, with the form of those that have several."""
    return sorted(library.label for library in LIBRARIES.values() if library.reason() is None)


def limit(allowed: Collection[str] | None) -> None:
    """Use no library but these (``None``: any), in whatever form: a resumed run computes with those it began with."""
    kept = None if allowed is None else {label.partition(" (")[0] for label in allowed}
    for name, library in LIBRARIES.items():
        library.allowed = kept is None or name in kept


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
