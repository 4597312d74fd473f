"""Whether kernels may use AMX, the processor's tiles of bf16, and the forms in which a library is compiled for it.

The registers are the kernel's to give (Linux, ``Documentation/arch/x86/xstate.rst``): a process asks once, before it
uses them. ``PHYLON_AMX=0`` switches AMX off; ``PHYLON_AMX=emulated`` compiles the same kernels over plain C++, for
tests on any processor: slow.
"""

import ctypes
import os
import platform
from functools import cache

from phylon.ops.native.library import Form, features

_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18  # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) on x86-64
_NEEDED = ("amx_tile", "amx_bf16", "avx512f")


def refusal() -> str | None:
    """``None`` where this process may use AMX from now on, or why not."""
    if os.environ.get("PHYLON_AMX") == "0":
        return "switched off by PHYLON_AMX=0"
    missing = [name for name in _NEEDED if name not in features()]
    if missing:
        return f"this processor lacks {missing[0]}"
    return _refused()


@cache
def _refused() -> str | None:
    """Ask for the tile registers, once a process: threads, old and new, share the answer."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "only Linux on x86-64 is asked for its registers"
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    if libc.syscall(ctypes.c_long(_ARCH_PRCTL), ctypes.c_long(_REQUEST), ctypes.c_long(_TILE_DATA)) == 0:
        return None
    return f"the kernel does not give its registers: {os.strerror(ctypes.get_errno())}"


def _not_asked_for() -> str | None:
    return None if os.environ.get("PHYLON_AMX") == "emulated" else "only for tests (PHYLON_AMX=emulated)"


AMX = Form("AMX", ("-DPHYLON_AMX", "-mamx-tile", "-mamx-bf16"), refusal)
EMULATED = Form("emulated AMX", ("-DPHYLON_AMX_EMULATED",), _not_asked_for)
PLAIN = Form("f32")
