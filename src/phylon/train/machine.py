"""What a run's bits depend on beside its recipe: versions, threads, processor; and the precision it can use."""

import importlib.metadata
import os
import platform
import sys
from typing import Literal, cast

import torch

from phylon.ops import native
from phylon.spec.errors import UserError
from phylon.train.world import World

Precision = Literal["fp32", "bf16", "fp16"]


def environment(device: torch.device, precision: Precision, world: World | None = None) -> dict[str, str]:
    """Everything that must stay the same for a resumed run to continue bit for bit, by name."""
    world = world or World()
    return {
        "phylon": _version("phylon"),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": _version("numpy"),
        "tokenizers": _version("tokenizers"),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cpu kernels": torch.backends.cpu.get_cpu_capability(),
        "native kernels": ", ".join(native.names()) or "none",
        "compiled": "no",
        "threads": str(torch.get_num_threads()),
        "processes": str(world.size),
        "device": str(device) if device.type != "cuda" else torch.cuda.get_device_name(device),
        "precision": precision,
    }


def check_threads(threads: int | None) -> None:
    """Refuse more threads than processors: they would be slower, and very many end the process."""
    processors = os.cpu_count() or 1
    if threads is not None and threads > processors:
        raise UserError(f"run.threads {threads} is more than this machine's {processors} processors; lower it")


def changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """One phrase for every entry that differs."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return [f"{name} was {before.get(name, 'absent')} and is now {now.get(name, 'absent')}" for name in names]


def resolve_precision(wanted: str, device: torch.device) -> Precision:
    """ "auto" is bf16 where the machine multiplies it in hardware, else fp32; fp16 needs a GPU."""
    if wanted == "fp16" and device.type == "cpu":
        raise UserError("run.precision fp16 needs a GPU, and this run is on the CPU; choose bf16, fp32 or auto")
    if wanted != "auto":
        return cast(Precision, wanted)
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    if device.type == "cpu" and sys.platform == "linux":
        flags = _cpu_flags()
        return "bf16" if flags & {"avx512_bf16", "amx_bf16", "bf16"} else "fp32"
    return "fp32"


def _cpu_flags() -> set[str]:
    return set(_cpu_info("flags").split()) | set(_cpu_info("Features").split())


def _processor() -> str:
    return _cpu_info("model name") or platform.processor() or "unknown"


def _cpu_info(field: str) -> str:
    """A field of the first processor in /proc/cpuinfo, or nothing."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")
    except OSError:
        return ""


def _version(package: str) -> str:
    if package == "phylon":
        import phylon

        return phylon.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
