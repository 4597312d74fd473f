"""The matrix-product speed of this machine: measured once, kept in the user's cache, and what utilisation refers to."""

import hashlib
import json
import os
import tempfile
import time
from pathlib import Path

import torch

from phylon.train.gradients import AUTOCAST
from phylon.train.machine import Precision, environment

SIZE, LEAST_SECONDS = {"cpu": 1024, "cuda": 8192, "mps": 4096}, 0.25


def ceiling_flops(device: torch.device, precision: Precision) -> float:
    """FLOP/s of the best square matrix product in this precision with this many threads; a multiply-add counts two.

    The first call takes about half a second; later ones on the same machine, versions and threads read the cache
    (``~/.cache/phylon/ceiling.json``, or below ``XDG_CACHE_HOME``).
    """
    key = _key(device, precision)
    known = _read()
    if key not in known:
        known[key] = _measure(device, AUTOCAST.get(precision, torch.float32))
        _write(known)
    return known[key]


def _measure(device: torch.device, dtype: torch.dtype) -> float:
    size = SIZE.get(device.type, 1024)
    a = torch.randn(size, size, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    best, begun, runs = float("inf"), time.perf_counter(), 0
    while runs < 4 or time.perf_counter() - begun < LEAST_SECONDS:
        started = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif device.type == "mps":
            torch.mps.synchronize()
        best, runs = min(best, time.perf_counter() - started), runs + 1
    return 2 * size**3 / best


def _key(device: torch.device, precision: Precision) -> str:
    about = environment(device, precision)
    for name in ("phylon", "native kernels", "compiled", "processes", "tokenizers", "numpy", "python"):
        about.pop(name, None)
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def _path() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "phylon" / "ceiling.json"


def _read() -> dict[str, float]:
    try:
        found = json.loads(_path().read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    good = isinstance(found, dict)
    return {key: float(v) for key, v in found.items() if isinstance(v, int | float) and v > 0} if good else {}


def _write(known: dict[str, float]) -> None:
    """Beside, then renamed; a cache that cannot be written is measured again next time."""
    try:
        _path().parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=_path().parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(known, file)
        os.replace(name, _path())
    except OSError:
        return
