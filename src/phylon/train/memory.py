"""What a training step frees and needs again is kept, and what was there before is not searched for garbage."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed, for this process from now on; whether it was told.

    By default every large tensor is mapped afresh, and the system zeroes its pages one by one at their first touch, at
    a tenth of the memory's speed. The same as ``MALLOC_MMAP_THRESHOLD_`` and ``MALLOC_TRIM_THRESHOLD_`` in the
    environment; the process then stays as large as it once was.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, 1 << 30)) and bool(mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1))


def give_back() -> None:
    """Hand freed memory back to the system, where glibc keeps it for a run that would use other sizes of it."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def settled_objects() -> Iterator[None]:
    """Leave the Python objects that exist now out of garbage collection.

    A full collection walks every object of every imported module: a tenth of a second, in the middle of a step.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
