"""From exceptions to one line on standard error and an exit code."""

import os
import sys
from collections.abc import Callable

import typer

from phylon.cli.interrupts import remembered


class Carried(Exception):
    """Takes an exception past the option parser, which has its own ideas about interrupts and broken pipes."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


WRONG_INPUT, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


def reported(command: Callable[[], object]) -> int:
    """Run ``command``; 0, or the exit code of what it raised, which is told in one line.

    What a user can mend leaves with 2, Ctrl-C with 130. Anything else is our own mistake and stays a traceback, as
    everything does under ``PHYLON_DEBUG=1``.
    """
    try:
        try:
            with remembered():
                code = command()
            sys.stdout.flush()
        except Carried as carrier:
            raise carrier.error from None
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        # Whoever read our output has left; nothing more can be said there, not even while Python shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except typer.Exit as leave:
        return leave.exit_code
    except (KeyboardInterrupt, typer.Abort) as error:
        return _say(error, str(error) or "interrupted", getattr(error, "exit_code", INTERRUPTED))
    except Exception as error:
        line = _line(error)
        if line is None or os.environ.get("PHYLON_DEBUG") == "1":
            raise
        return _say(error, line, WRONG_INPUT)


def _say(error: BaseException, line: str, code: int) -> int:
    if os.environ.get("WORLD_SIZE", "1") == "1":
        print(f"phylon: {' '.join(line.split())}", file=sys.stderr, flush=True)
    elif not _said_elsewhere(error, line):
        rank = os.environ.get("RANK", "0")
        alone = "" if rank == "0" else f"process {rank}: "
        print(f"phylon: {alone}{' '.join(line.split())}", file=sys.stderr, flush=True)
    return code


def _said_elsewhere(error: BaseException, line: str) -> bool:
    """Whether another process of the same start says it: the first, unless this one alone is concerned."""
    if isinstance(error, KeyboardInterrupt | typer.Abort):  # all of them are stopped
        return os.environ.get("RANK", "0") != "0"
    from phylon.train.world import PeerLost, said_elsewhere

    found = getattr(error, "said_elsewhere", None)
    return said_elsewhere(line, lost=isinstance(error, PeerLost)) if found is None else found


def _line(error: Exception) -> str | None:
    """What to tell the user, or ``None`` when it is not the user's to mend."""
    if hasattr(error, "format_message"):
        return _usage(error)
    if isinstance(error, OSError):
        return _system(error)
    if isinstance(error, UnicodeError):
        return f"this text is not valid UTF-8: {error.reason if hasattr(error, 'reason') else error}"
    if isinstance(error, MemoryError) or _is_out_of_memory(error):
        return "there is not enough memory for this; choose a smaller model, batch or length, or another --dtype"
    from phylon.spec.errors import UserError

    return str(error) if isinstance(error, UserError) else None


def _usage(error: Exception) -> str:
    """A message of the option parser, with the way to the help."""
    context = getattr(error, "ctx", None)
    message = error.format_message().rstrip(".?").replace("Value error, ", "")  # type: ignore[attr-defined]
    message = message.replace(". Did you mean", "; did you mean")
    message = message[:1].lower() + message[1:]
    return f"{message}; see '{context.command_path} --help'" if context is not None else message


def _system(error: OSError) -> str:
    from phylon.spec.errors import system_reason

    reason = system_reason(error)
    return f"'{error.filename}': {reason}" if error.filename else reason


def _is_out_of_memory(error: Exception) -> bool:
    if type(error).__name__ in ("OutOfMemoryError", "AcceleratorError") and "out of memory" in str(error).lower():
        return True
    signs = ("can't allocate memory", "Storage size calculation overflowed", "not enough memory")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
