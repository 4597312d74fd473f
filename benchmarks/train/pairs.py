"""Steps of several models in turn, A B A B, each in its own process: ``python pairs.py SIZE f32|bf16 NAME NAME …``.

Every process raises the allocator's thresholds. A round is one step of each; medians, ratios to the first name and
their spread are printed and appended to ``pairs.jsonl`` beside this file. ``beyond_mib`` is the peak of a process's
resident memory less what it had before the model was built and less fp32 weights, gradients and both moments.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median, quantiles


def worker(name: str, size: str, bf16: bool) -> None:
    import torch
    from steps import SIZES, STEPS, raise_malloc_thresholds

    torch.set_num_threads(2)
    raise_malloc_thresholds()
    torch.manual_seed(0)
    STEPS[name]("s", bf16)  # imports what is needed
    before = resident("VmRSS")
    step = STEPS[name](size, bf16)
    step()
    rows, length = SIZES[size][5], SIZES[size][3]
    print(json.dumps({"tokens": rows * length}), flush=True)
    for line in sys.stdin:
        if line.strip() == "memory":
            print(resident("VmHWM") - before - 16 * step.parameters / 2**20, flush=True)  # type: ignore[attr-defined]
            continue
        begun = time.perf_counter()
        loss = step()
        print(json.dumps([time.perf_counter() - begun, loss]), flush=True)


def resident(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


class Worker:
    def __init__(self, name: str, size: str, dtype: str) -> None:
        command = [sys.executable, __file__, "--worker", size, dtype, name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.times: list[float] = []
        self.tokens = 0

    def ready(self) -> bool:
        line = self._line()
        self.tokens = json.loads(line)["tokens"] if line else 0
        return bool(line)

    def ask(self, what: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def step(self, count: bool) -> None:
        spent, _ = json.loads(self.ask("step"))
        if count:
            self.times.append(spent)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("size", choices=["s", "m", "l"])
    parser.add_argument("dtype", choices=["f32", "bf16"])
    parser.add_argument("names", nargs="+")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--label", default="")
    parser.add_argument("--worker", action="store_true")
    arguments = parser.parse_args()
    if arguments.worker:
        return worker(arguments.names[0], arguments.size, arguments.dtype == "bf16")
    workers = {}
    for name in arguments.names:  # one after the other, so that compiling has the machine to itself
        workers[name] = Worker(name, arguments.size, arguments.dtype)
        if not workers[name].ready():
            raise SystemExit(f"{name} does not start")
    end, round_ = time.monotonic() + arguments.seconds, 0
    while time.monotonic() < end or round_ < 3:
        for one in workers.values():
            one.step(count=round_ > 0)
            time.sleep(0.02)
        round_ += 1
    first = workers[arguments.names[0]]
    record = {
        "size": arguments.size,
        "dtype": arguments.dtype,
        "rounds": round_ - 1,
        "label": arguments.label,
        "cells": {},
    }
    for name, one in workers.items():
        ratios = sorted(a / b for a, b in zip(one.times, first.times, strict=True))
        low, _, high = quantiles(ratios, n=4) if len(ratios) > 2 else (ratios[0], 0, ratios[-1])
        cell = {
            "tokens_per_s": round(one.tokens / median(one.times)),
            "ms": round(1e3 * median(one.times), 1),
            "best_ms": round(1e3 * min(one.times), 1),
            "times_the_first": round(median(ratios), 3),
            "quartiles": [round(low, 3), round(high, 3)],
            "beyond_mib": round(float(one.ask("memory"))),
        }
        record["cells"][name] = cell
        print(f"{name:30} {cell}")
    for one in workers.values():
        one.process.kill()
    import torch
    from steps import machine

    record["machine"] = machine() | {"torch": torch.__version__}
    with open(Path(__file__).with_name("pairs.jsonl"), "a", encoding="utf-8") as out:
        out.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
