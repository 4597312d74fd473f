"""Where and with what a figure was measured."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "transformers", "mambapy", "x-transformers", "triton")
_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16")


def describe() -> dict[str, Any]:
    """Processor, cores, what they know, threads, accelerator, and the versions of all that takes part."""
    import torch

    info = _cpu_info()
    accelerators = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "processor": info.get("model name", platform.processor() or platform.machine()),
        "cores": os.cpu_count() or 0,
        "features": [name for name in _FEATURES if name in info.get("flags", "").split()],
        "threads": torch.get_num_threads(),
        "accelerators": accelerators,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": [f"{name} {version}" for name in _PACKAGES if (version := _version(name))],
    }


def line(machine: dict[str, Any]) -> str:
    """One line for people."""
    words = [f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads"]
    words += [*machine["accelerators"], " ".join(machine["features"]), f"Python {machine['python']}"]
    return "; ".join([word for word in [*words, *machine["versions"]] if word])


def _cpu_info() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    pairs = (entry.split(":", 1) for entry in reversed(lines) if ":" in entry)
    return {name.strip(): value.strip() for name, value in pairs}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
