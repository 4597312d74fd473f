"""What a call needs beyond its inputs and what it returns: the peak of the process's memory, or the accelerator's."""

import contextlib
import ctypes
import dataclasses
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def extra_bytes(call: Callable[[], Any]) -> int | None:
    """The peak above what was there before, less the tensors that the call returns; ``None`` where nobody tells.

    On a CPU this is the kernel's own account of resident memory, so that what a native library takes counts as well;
    the allocator is asked to give back what it holds first.
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = call()
        torch.cuda.synchronize()
        return max(0, torch.cuda.max_memory_allocated() - before - _bytes(kept))
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        kept = call()
        return max(0, _status("VmHWM") - before - _bytes(kept))
    except OSError:
        return None


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _bytes(value: Any) -> int:
    """Bytes of all tensors in ``value``, shared memory once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(value)}.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _tensors(vars(value))
