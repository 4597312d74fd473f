"""One C++ source of the package as a library of this machine: where it is kept, whether it may be used, its functions.

Nothing here ever waits or fails: ``reason`` is ``None`` when the functions may be called, or says in one line why not.
The work is done by ``phylon.ops.native.make`` in a process of its own, so that neither compiling nor a kernel that
crashes in its check can touch the run.
"""

import contextlib
import ctypes
import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

LIBRARIES: dict[str, "Library"] = {}
_COMPILERS = ("c++", "g++", "clang++")
# Signals by which a kernel ends itself; any other is somebody's wish, and the next process tries again.
_CRASHES = {signal.SIGSEGV, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}


def _no_refusal() -> str | None:
    return None


@dataclass(frozen=True)
class Form:
    """One way to compile the sources: more flags for the compiler, and ``refusal``: ``None``, or why not here.

    It is asked in every process before the functions are used.
    """

    name: str = "plain"
    flags: tuple[str, ...] = ()
    refusal: Callable[[], str | None] = _no_refusal


class Library:
    """``sources`` are the C++ files and the check's: the first is compiled and may include the others, and what passed
    another check is made again.

    ``check`` runs the kernels against the reference and returns ``None``, or what is wrong. ``functions`` gives the C
    argument types by function name; every function returns nothing, unless ``returns`` names a type. Of the ``forms``
    the first is made that is not refused here and passes its check; the last is for any machine.
    """

    def __init__(
        self,
        module: str,
        sources: Sequence[Path],
        functions: dict[str, Sequence[Any]],
        check: Callable[[], str | None],
        returns: dict[str, Any] | None = None,
        forms: Sequence[Form] = (Form(),),
    ) -> None:
        self.module, self.sources, self.check = module, tuple(sources), check
        self.functions, self.returns, self.forms = functions, returns or {}, tuple(forms)
        self.name = module.removeprefix("phylon.ops.").removesuffix(".native")
        self.allowed = True
        self._loaded: ctypes.CDLL | None = None
        self._reason: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._unfit: dict[Form, str] = {}
        self._used: Form | None = None
        LIBRARIES[self.name] = self

    def reason(self) -> str | None:
        """``None`` when the functions may be called. It holds until ``refresh``: results move at no other time."""
        if not self.allowed:
            return "this run began without it"
        if self._loaded is None and self._reason is None:
            self.refresh()
        return self._reason

    def refresh(self) -> None:
        """Look again: load what has been made, begin to make what has not."""
        if self._loaded is not None:
            return
        self._reason = self.start()
        if self._reason is None:
            try:
                self.adopt(self.path)
            except (OSError, AttributeError) as error:
                self._reason = f"the compiled library does not load: {error}"

    def start(self) -> str | None:
        """Begin to make the library unless that is done; ``None`` when it lies ready, else why not (yet)."""
        if os.environ.get("PHYLON_NATIVE") == "0":
            return "switched off by PHYLON_NATIVE=0"
        if compiler() is None:
            return f"no C++ compiler on this machine (looked for CXX, {', '.join(_COMPILERS)})"
        if whole(self.path):
            return None
        try:
            return self._without(self.form, self.failed.read_text(encoding="utf-8", errors="replace").strip())
        except OSError as error:
            if os.path.lexists(self.failed):
                return self._without(self.form, f"'{self.failed}' cannot be read: {error.strerror}; remove it")
        if self._process is None:
            try:
                log = self._log()
            except OSError as error:
                why = error.strerror or error
                return f"'{cache_folder()}' keeps no kernels: {why}; set PHYLON_CACHE to a folder that you can write to"
            try:
                self._process = self._make(log)
            except OSError as error:
                return f"its compiler cannot be started: {error.strerror or error}"
        code = self._process.poll()
        if code is None:
            return "being compiled beside this run"
        if -code in _CRASHES:
            reason = f"its check against the reference crashed ({signal.Signals(-code).name})"
            with contextlib.suppress(OSError):
                self.failed.write_text(reason + "\n", encoding="utf-8")
            return self._without(self.form, reason)
        return f"compiling it ended with code {code} (see '{self.path.with_suffix('.log')}')"

    def wait(self, timeout: float) -> str | None:
        """``reason`` once the making has ended, or after ``timeout`` seconds."""
        end = time.monotonic() + timeout
        waited: subprocess.Popen[bytes] | None = None
        self.start()
        while self._process not in (None, waited):  # where one form is unfit the next one is begun
            waited = self._process
            assert waited is not None
            with contextlib.suppress(subprocess.TimeoutExpired):
                waited.wait(max(0.0, end - time.monotonic()))
            self.start()
        self.refresh()
        return self.reason()

    def adopt(self, path: Path) -> None:
        """Load the functions from ``path``."""
        loaded = ctypes.CDLL(str(path))
        for name, arguments in self.functions.items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = list(arguments), self.returns.get(name)
        self._used, self._loaded, self._reason = self.form, loaded, None

    def __getattr__(self, name: str) -> Any:
        """A function of the library by its name."""
        if name.startswith("_") or self._loaded is None:
            raise AttributeError(name)
        return getattr(self._loaded, name)

    @property
    def form(self) -> Form:
        """What is used, or would be made here."""
        return self._used or next((form for form in self.forms[:-1] if self.against(form) is None), self.forms[-1])

    @property
    def label(self) -> str:
        """The name, with the form unless that is the one for any machine."""
        return self.name if self.form == self.forms[-1] else f"{self.name} ({self.form.name})"

    def against(self, form: Form) -> str | None:
        """Why ``form`` is not made here."""
        return self._unfit.get(form) or form.refusal()

    def _without(self, form: Form, reason: str) -> str | None:
        """``start`` with the next form, where there is one."""
        if form == self.forms[-1]:
            return reason
        self._unfit[form], self._process = reason, None
        return self.start()

    @property
    def path(self) -> Path:
        """Where the checked library lies: named by sources, compiler, flags, processor: nothing goes stale."""
        hashed = hashlib.blake2b(digest_size=10)
        for source in self.sources:
            hashed.update(source.read_bytes())
        hashed.update(repr((_identity(compiler()), [*flags(), *self.form.flags], _processor())).encode())
        return cache_folder() / f"{self.name}-{hashed.hexdigest()}{'.dylib' if sys.platform == 'darwin' else '.so'}"

    @property
    def failed(self) -> Path:
        """Where the reason lies if it cannot be made."""
        return self.path.with_suffix(".failed")

    def _log(self) -> BinaryIO:
        """Where the making writes, in the cache folder, which is made where it is missing."""
        folder = cache_folder()
        if folder.parts[0].startswith("~"):
            raise FileNotFoundError(errno.ENOENT, "no such home folder")
        folder.mkdir(parents=True, exist_ok=True)
        return open(self.path.with_suffix(".log"), "wb")

    def _make(self, log: BinaryIO) -> "subprocess.Popen[bytes]":
        package = Path(__file__).parents[3]
        environment = os.environ | {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
        environment["PYTHONPATH"] = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
        with log:
            return subprocess.Popen(
                [sys.executable, "-m", "phylon.ops.native.make", self.module, self.form.name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )


def floats(*shape: int) -> Tensor:
    """Memory for fp32 numbers that a kernel fills, whatever dtype and device are PyTorch's default now."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def pointer(tensor: Tensor | None, numbers: int, dtype: torch.dtype = torch.float32) -> int | None:
    """The address of ``numbers`` dense numbers, for a ``c_void_p`` argument; ``None`` is the null pointer.

    Kernels get every address from here or from ``strided``: one that would read or write beyond is never called.
    """
    if tensor is None:
        return None
    if tensor.numel() != numbers or tensor.dtype is not dtype or not tensor.is_contiguous() or not tensor.is_cpu:
        raise AssertionError(f"a kernel takes {numbers} dense numbers of {dtype}, got {_described(tensor)}")
    return tensor.data_ptr()


def strided(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """The address of a tensor that is dense in its last dimension, and the strides of the others."""
    *strides, dense = tensor.stride()
    if tensor.shape != shape or tensor.dtype is not dtype or (dense != 1 and shape[-1] != 1) or not tensor.is_cpu:
        raise AssertionError(f"a kernel takes {tuple(shape)} of {dtype}, dense at the end, got {_described(tensor)}")
    return tensor.data_ptr(), *strides


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype} with strides {tensor.stride()} on {tensor.device}"


def compiler() -> str | None:
    """The C++ compiler: ``$CXX`` or the usual names."""
    return next((found for name in _wanted()[:1] or _COMPILERS if (found := shutil.which(name))), None)


def _wanted() -> list[str]:
    """The words of ``$CXX``: a compiler, or what starts it, and what it is always given."""
    return os.environ.get("CXX", "").split()


def whole(path: Path) -> bool:
    """Whether a library lies at ``path`` as it was put there: loading a damaged one would end the process."""
    try:
        return path.with_suffix(".sum").read_bytes() == checksum(path)
    except OSError:
        return False


def checksum(path: Path) -> bytes:
    """Of the file's bytes, as it lies beside the library."""
    return hashlib.blake2b(path.read_bytes()).hexdigest().encode()


def flags() -> list[str]:
    """How the sources are compiled: for this very processor. ``-ffp-contract=fast`` is the fused multiply-add."""
    common = [
        *_wanted()[1:],
        "-std=c++17",
        "-O3",
        "-fPIC",
        "-shared",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-ffp-contract=fast",
    ]
    # Apple's compiler has no OpenMP of its own; the kernels then run on one thread.
    return [*common, "-mcpu=native"] if sys.platform == "darwin" else [*common, "-march=native", "-fopenmp"]


def cache_folder() -> Path:
    """``$PHYLON_CACHE/native``, by default in the user's cache folder; a home that nobody knows stays a ``~``."""
    users = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "phylon")
    return Path(os.path.expanduser(os.environ.get("PHYLON_CACHE") or users)) / "native"


def _identity(path: str | None) -> tuple[str, int, int] | None:
    if path is None:
        return None
    real = Path(path).resolve()
    found = real.stat()
    return str(real), found.st_size, found.st_mtime_ns


def features() -> frozenset[str]:
    """The instruction sets of the processor, as Linux calls them; none elsewhere."""
    return frozenset(_processor().split()[2:])


@cache
def _processor() -> str:
    """What ``native`` means here: the instruction sets of the first processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return ""
