"""Ctrl-C and SIGTERM while training: finish the step, save, say so, leave."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop, and stopped with its last step saved. ``exit_code`` is 128 + the signal's number."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class StopRequest:
    """Set by the first signal; ``number`` says which. A second Ctrl-C interrupts at once, as without us.

    SIGTERM may well come twice: a scheduler sends it to all processes, and their launcher passes its own on.
    """

    number: int | None = None

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = self.number or number


@contextmanager
def stop_on_signals() -> Generator[StopRequest]:
    """Catch SIGINT and SIGTERM inside the block; outside of the main thread nothing is caught."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
