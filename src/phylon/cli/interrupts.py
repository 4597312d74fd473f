"""Ctrl-C that cannot get lost.

Python raises KeyboardInterrupt wherever it happens to be, and inside an import or a callback of compiled code somebody
may swallow it. So it is remembered as well, and ``check`` raises it again at the next quiet place.
"""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

_received = False


def check() -> None:
    """Raise KeyboardInterrupt if there was a Ctrl-C since ``remembered`` began."""
    if _received:
        raise KeyboardInterrupt


@contextmanager
def remembered() -> Generator[None]:
    """Remember a Ctrl-C inside the block; where the signal is ignored or handled by somebody else it stays so."""
    global _received
    _received = False
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _receive)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _receive(number: int, frame: FrameType | None) -> None:
    global _received
    _received = True
    raise KeyboardInterrupt
