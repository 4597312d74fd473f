"""Where the time of a training step goes, by kind of work: ``python profile_step.py NAME SIZE f32|bf16``.

Prints milliseconds a step and shares, and appends one JSON line to ``profile.jsonl`` beside this file. Time is the
operators' own (self CPU time of the main thread); "elsewhere" is what no operator accounts for (Python, autograd).
"""

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import torch
from steps import STEPS, machine, raise_malloc_thresholds
from torch.profiler import ProfilerActivity, profile

KINDS = {
    "loss": (
        "LinearCrossEntropy",
        "log_softmax",
        "nll_loss",
        "logsumexp",
        "cross_entropy",
        "aten::exp",
        "scatter",
        "gather",
    ),
    "attention": ("scaled_dot_product", "flash_attention", "Attention"),
    "matrix products": ("mm", "linear", "matmul", "Product", "Linear", "mkldnn"),
    "norms": ("norm", "Norm", "rsqrt", "aten::mean", "aten::pow"),
    "activations": ("gelu", "silu", "tanh", "relu", "Gated", "Activation"),
    "copies and casts": ("copy", "clone", "contiguous", "_to_copy", "aten::cat", "fill", "zero", "stack"),
    "optimizer": ("adam", "Adam", "foreach"),
    "sums and products by element": ("aten::add", "aten::mul", "aten::sub", "aten::sum", "aten::neg", "aten::div"),
    "embedding": ("embedding", "index"),
}


def kind_of(name: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=sorted(STEPS))
    parser.add_argument("size", choices=["s", "m", "l"])
    parser.add_argument("dtype", choices=["f32", "bf16"])
    parser.add_argument("--label", default="now")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--top", type=int, default=0)
    arguments = parser.parse_args()
    raise_malloc_thresholds()
    torch.manual_seed(0)
    step = STEPS[arguments.name](arguments.size, arguments.dtype == "bf16")
    for _ in range(3):
        step()
    times = []
    for _ in range(max(3, arguments.steps)):
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        begun = time.perf_counter()
        for _ in range(arguments.steps):
            step()
        wall = (time.perf_counter() - begun) / arguments.steps
    spent: dict[str, float] = defaultdict(float)
    events = recorded.key_averages()
    for event in events:
        spent[kind_of(event.key)] += event.self_cpu_time_total / 1e3 / arguments.steps
    spent["elsewhere"] = max(0.0, 1e3 * wall - sum(spent.values()))
    total = sum(spent.values())
    if arguments.top:
        print(events.table(sort_by="self_cpu_time_total", row_limit=arguments.top, max_name_column_width=50))
    print(f"{arguments.name} {arguments.size} {arguments.dtype}: {1e3 * median(times):.0f} ms a step unprofiled")
    for kind, ms in sorted(spent.items(), key=lambda item: -item[1]):
        print(f"  {kind:30} {ms:8.1f} ms {100 * ms / total:5.1f} %")
    record = {
        "label": arguments.label,
        "name": arguments.name,
        "size": arguments.size,
        "dtype": arguments.dtype,
        "step_ms": round(1e3 * median(times), 1),
        "profiled_ms": round(1e3 * wall, 1),
        "kinds_ms": {kind: round(ms, 1) for kind, ms in sorted(spent.items(), key=lambda item: -item[1])},
        "machine": machine(),
    }
    with open(Path(__file__).with_name("profile.jsonl"), "a", encoding="utf-8") as out:
        out.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
