"""What a step needs in memory: measured on one and two rows, so that any number of rows follows."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch

from phylon.train.gradients import Gradients
from phylon.train.memory import keep_freed_memory
from phylon.train.objectives.base import Batch

GIB = 2.0**30
MOST_SECONDS = 10.0  # of a step that is run whole
# Of a control group's memory, in both versions of the kernel's interface: where its folders are, and the files of its
# limit and its use, and the part of ``memory.stat`` that is cache of files not read lately.
_GROUPS = {
    1: ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
}


class RowCost(NamedTuple):
    """Of a forward and a backward pass: bytes kept between them (``kept``), bytes at the peak (``peak``), seconds.

    Each is (what one row costs, what each further one adds); weights and gradients are not in it.
    """

    kept: tuple[float, float]
    peak: tuple[float, float]
    seconds: tuple[float, float]

    def at(self, rows: int) -> tuple[float, float, float]:
        """Kept bytes, peak bytes and seconds of ``rows``."""
        return tuple(first + (rows - 1) * more for first, more in (self.kept, self.peak, self.seconds))  # type: ignore[return-value]

    def rows_within(self, n_bytes: float) -> int:
        """The most rows whose peak is at most ``n_bytes``."""
        first, more = self.peak
        return 0 if first > n_bytes else 1 + int((n_bytes - first) / max(more, 1.0))


def row_cost(gradients: Gradients, batch: Batch) -> RowCost:
    """Run one and two rows of ``batch`` forward and backward, and see what is allocated."""
    batch = taken(batch, 2)
    found = [_measured(gradients, {name: value[:rows] for name, value in batch.items()}) for rows in (1, 2)]
    gradients.optimizer.drop()
    pairs = [(one, max(0.0, two - one)) for one, two in zip(*found, strict=True)]
    return RowCost(*pairs)


def resident_peak(work: Callable[[], object]) -> float:
    """The most that this process has of the machine's memory while ``work`` runs; 0 where the system does not tell."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", "ascii")  # the peak begins anew
    work()
    try:
        lines = Path("/proc/self/status").read_text("utf-8").splitlines()
        return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration, ValueError):
        return 0.0


def steps_peak(gradients: Gradients, batch: Batch, lr: float, rows: int, count: int) -> tuple[int, float]:
    """The process's peak over ``count`` whole steps, on the model and optimizer of ``gradients``; of how many rows.

    That is ``rows``, made of those of ``batch``, as far as a step takes seconds; else two.
    """
    keep_freed_memory()  # as the run will

    def steps(rows: int) -> None:
        part = taken(batch, rows)
        for _ in range(count):
            found = gradients.of(part, None)
            gradients.optimizer.step(lr, 1.0 / (found.divisor or 1.0))

    seconds = 0.0
    for _ in range(2):  # the first loads what all others use
        started = time.perf_counter()
        gradients.trial(taken(batch, 2))
        seconds = time.perf_counter() - started
    rows = rows if seconds * rows / 2 <= MOST_SECONDS else 2
    # As in a run the optimizer's state is made after the first pass, in the midst of what the next ones need.
    return rows, resident_peak(lambda: steps(rows))


def taken(batch: Batch, rows: int) -> Batch:
    """So many rows of a batch, the same again where it has fewer."""
    times = -(-rows // len(next(iter(batch.values()))))
    return {name: torch.cat([value] * times)[:rows] for name, value in batch.items()}


def _measured(gradients: Gradients, batch: Batch) -> tuple[float, float, float]:
    """Kept bytes, peak bytes, seconds. The passes before make the gradients and warm up."""
    gradients.trial(batch, keep=True)
    started = time.perf_counter()
    gradients.trial(batch, keep=True)
    seconds = time.perf_counter() - started
    device = gradients.device
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        kept = gradients.trial(batch, keep=True, between=lambda: torch.cuda.memory_allocated(device))
        return float((kept or before) - before), float(torch.cuda.max_memory_allocated(device) - before), seconds
    return *_profiled(lambda mark: gradients.trial(batch, keep=True, between=mark)), seconds


def _profiled(work: Callable[[Callable[[], None]], object]) -> tuple[float, float]:
    """Bytes allocated at the mark and at the peak of ``work``, from the allocator's own events."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.profiler import ProfilerActivity, profile, record_function

    def mark() -> None:
        with record_function("phylon::mark"):
            pass

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work(mark)
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    at = min((event.start_ns() for event in events if event.name() == "phylon::mark"), default=0)
    now = kept = peak = 0
    for when, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        now += size
        kept = now if when <= at else kept
        peak = max(peak, now)
    return float(kept), float(peak)


def free_bytes(device: torch.device) -> float:
    """Memory that this process may still take: of the GPU, or of the machine and its control groups."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(min(_machine_free(), _group_free()))


def _machine_free() -> float:
    try:
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
        return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return float("inf")


def _group_free(root: Path = Path("/")) -> float:
    """What the control groups of this process leave it: the least of its own and of those around it."""
    return min((_left_in(folder, version) for folder, version in _groups(root)), default=float("inf"))


def _groups(root: Path) -> Iterator[tuple[Path, int]]:
    """The folders of the groups of this process, innermost first, each with its version."""
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for number, controllers, path in (line.split(":", 2) for line in lines):
        version = 2 if number == "0" else 1
        if version == 2 or "memory" in controllers.split(","):
            # In a container the path may be that of the machine, of which only the group at the top is seen.
            own = PurePosixPath(path.lstrip("/"))
            for group in (own, *own.parents):
                yield root / _GROUPS[version][0] / group, version


def _left_in(folder: Path, version: int) -> float:
    """The limit of a group less what it uses and cannot give up: cache that was not read lately is free."""
    _, most, now, cache = _GROUPS[version]
    try:
        limit = (folder / most).read_text("utf-8").strip()
        if limit == "max":
            return float("inf")
        stat = dict(line.split(maxsplit=1) for line in (folder / "memory.stat").read_text("utf-8").splitlines())
        return max(0.0, float(limit) - float((folder / now).read_text("utf-8")) + float(stat.get(cache, 0)))
    except (OSError, ValueError):
        return float("inf")


def in_words(n_bytes: float) -> str:
    """``1.25 GiB``, ``340 MiB``."""
    return f"{n_bytes / GIB:.2f} GiB" if n_bytes >= GIB else f"{n_bytes / 2**20:.0f} MiB"
