"""``python -m phylon.ops.native.make MODULE FORM``: compile the module's ``LIBRARY``, check it, put it into the cache.

The last step is a rename, so that whoever finds the library may use it. A reason why not goes beside it. A process that
dies in the check (an instruction the processor lacks) leaves nothing, and its exit code says so.
"""

import contextlib
import importlib
import os
import subprocess
import sys
from pathlib import Path

from phylon.ops.native.library import Library, checksum, compiler, flags, whole

if sys.platform != "win32":
    import fcntl


_PASSING = ("no space left", "disk quota", "out of memory", "cannot allocate memory", "killed", "terminated")


def make(library: Library) -> str | None:
    """Compile and check ``library``, of one form; ``None``, or why not to use it, which is also written beside it."""
    path = library.path
    with _alone(path.with_suffix(".lock")):
        if whole(path):
            return None
        beside = path.with_name(f"{path.stem}.{os.getpid()}.tmp")
        try:
            reason, lasting = library.forms[0].refusal(), True
            if reason is None:
                reason, lasting = _compile(library, beside)
            reason = reason or _check(library, beside)
            if reason is None:
                path.with_suffix(".sum").write_bytes(checksum(beside))
                beside.replace(path)
            elif lasting:
                note = beside.with_suffix(".note")
                note.write_text(reason + "\n", encoding="utf-8")
                note.replace(library.failed)
        finally:
            beside.unlink(missing_ok=True)
    return reason


def _compile(library: Library, target: Path) -> tuple[str | None, bool]:
    """``None``, or what the compiler says, and whether it would say so again."""
    command = [compiler() or "c++", *flags(), *library.form.flags, "-o", str(target), str(library.sources[0])]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode == 0:
        return None, True
    print(done.stderr, file=sys.stderr)
    lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["no word"]
    # Compilers tell a full disk, a lack of memory and a signal in words; the sources are not at fault.
    passing = done.returncode < 0 or any(word in done.stderr.lower() for word in _PASSING)
    return f"it does not compile: {lines[0].strip()}", not passing


def _check(library: Library, made: Path) -> str | None:
    library.adopt(made)
    wrong = library.check()
    return None if wrong is None else f"its check against the reference failed: {wrong}"


@contextlib.contextmanager
def _alone(lock: Path):
    """One process at a time makes a library; the others find it made."""
    with open(lock, "w") as file:
        if sys.platform != "win32":
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    with contextlib.suppress(OSError, AttributeError):
        os.nice(5)
    found: Library = importlib.import_module(sys.argv[1]).LIBRARY
    found.forms = tuple(form for form in found.forms if form.name == sys.argv[2])
    sys.exit(0 if make(found) is None else 1)
