"""The one exception a user's mistake raises, and the near-miss hint it carries."""

import difflib
import errno
import math
import re
from collections.abc import Iterable
from numbers import Integral, Real


class UserError(ValueError):
    """A mistake that the caller can fix: one line that names the thing and the fix.

    The command line prints the message alone and exits with code 2; in Python it is an ordinary ``ValueError``.
    """


def system_reason(error: OSError) -> str:
    """What the operating system says, in words; for a full disk with what to do about it."""
    reasons = {
        errno.ENOSPC: "the disk is full (free some space)",
        errno.EDQUOT: "the disk quota is used up (free some space)",
    }
    return reasons.get(error.errno or 0) or (error.strerror or str(error)).lower()


def check_rate(name: str, rate: float) -> None:
    """Refuse a dropout rate outside [0, 1)."""
    if not 0 <= rate < 1:
        raise UserError(f"{name} must be at least 0 and below 1, got {rate}")


def check_finite(name: str, value: float | None, *, above: float = -math.inf) -> None:
    """Refuse what is not finite, or not above ``above``; ``None`` passes."""
    if value is not None and not math.isfinite(value):
        raise UserError(f"{name} must be a finite number, got {value}")
    if value is not None and not value > above:
        raise UserError(f"{name} must be above {above:g}, got {value}")


def check_size(name: str, value: object, least: int | None = 1) -> None:
    """Refuse what is no whole number, or below ``least`` (``None``: any)."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise UserError(f"{name} must be a whole number, got {value!r}")
    if least is not None and value < least:
        raise UserError(f"{name} must be at least {least}, got {value}")


def check_seed(name: str, value: object) -> None:
    """Refuse what no random generator takes: a seed is from 0 to 2^63 - 1."""
    check_size(name, value, 0)
    if value >= 2**63:  # type: ignore[operator]
        raise UserError(f"{name} must be below 2^63, got {value}")


def check_number(name: str, value: object) -> None:
    """Refuse what is no number."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise UserError(f"{name} must be a number, got {value!r}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` for the nearest known name, or the short list of what is known."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if near:
        return f" (did you mean '{near[0]}'?)"
    if not names:
        return ""
    return f" (known: {', '.join(names[:12])}{', …' if len(names) > 12 else ''})"


def did_you_mean_glob(glob: str, names: Iterable[str], ends: Iterable[str]) -> str:
    """``did_you_mean`` for a glob of dotted names: the nearest name, or the beginning of one with one of ``ends``.

    Where the glob has a star, numbers are stars; one that begins with ``*.`` may begin within a name.
    """
    known: set[str] = set()
    for name in names:
        parts = (re.sub(r"\.\d+(?=\.|$)", ".*", name) if "*" in glob else name).split(".")
        for first in range(len(parts) if glob.startswith("*.") else 1):
            start = "*." if first else ""
            known.add(start + ".".join(parts[first:]))
            known |= {
                start + ".".join(parts[first:last]) + end for last in range(first + 1, len(parts)) for end in ends
            }
    return did_you_mean(glob, known)
