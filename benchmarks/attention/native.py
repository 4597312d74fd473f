"""The native attention kernel beside PyTorch's SDPA on the shapes of small training runs and of decoding.

    python benchmarks/attention/native.py [train] [decode] [tiles]

A line of JSON for each cell: medians of interleaved rounds, their ratio, useful GFLOP/s. SDPA has its own (B, H, T, E)
layout for training, and on the state's (B, S, K, E) for decoding, as a model would call it. Whole figures, with memory
and stored results: ``phylon bench attention``.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F

from phylon.bench.cases.attention import PATTERNS
from phylon.ops import native as kernels
from phylon.ops.attention import attention
from phylon.ops.attention.call import AttentionCall
from phylon.ops.attention.plan import count_tiles
from phylon.patterns import Causal, Records

TRAIN = [(16, 4, 256, 32), (8, 6, 256, 64), (2, 12, 512, 64), (1, 8, 4096, 64)]
DECODE = [(1, 9, 3, 1, 512), (8, 9, 3, 1, 512), (1, 8, 8, 1, 1024), (1, 8, 8, 1, 4096), (1, 8, 8, 16, 512)]
LENGTHS = (4096, 16384, 65536)
DTYPES = (torch.float32, torch.bfloat16)


def clock(run: Callable[[], object], seconds: float) -> float:
    """Seconds a call, over at least ``seconds``."""
    start, n = time.perf_counter(), 0
    while True:
        run()
        n += 1
        if (spent := time.perf_counter() - start) >= seconds:
            return spent / n


def paired(ways: dict[str, Callable[[], object]], rounds: int = 7, seconds: float = 0.05) -> dict[str, float]:
    """The median milliseconds of every way, in turns."""
    for run in ways.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            times[name].append(clock(run, seconds))
    return {name: 1e3 * statistics.median(found) for name, found in times.items()}


def train(b: int, h: int, t: int, e: int, dtype: torch.dtype) -> dict[str, float]:
    """Forward and backward, causal."""
    ours = [torch.randn(b, t, h, e, dtype=dtype).requires_grad_() for _ in range(3)]
    theirs = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in ours]
    d_out = torch.randn(b, t, h, e, dtype=dtype)
    d_theirs = d_out.transpose(1, 2).contiguous()
    native = lambda: torch.autograd.grad(attention(*ours, pattern=Causal(), backend="native"), ours, d_out)
    sdpa = lambda: torch.autograd.grad(F.scaled_dot_product_attention(*theirs, is_causal=True), theirs, d_theirs)
    return paired({"native": native, "sdpa": sdpa})


def decode(b: int, h: int, k: int, t: int, s: int, dtype: torch.dtype) -> dict[str, float]:
    """The last ``t`` queries over ``s`` keys, forward."""
    q, keys, values = (torch.randn(b, n, heads, 64, dtype=dtype) for n, heads in ((t, h), (s, k), (s, k)))
    run = lambda backend: lambda: attention(q, keys, values, pattern=Causal(), backend=backend)
    with torch.no_grad():
        return paired({name: run(name) for name in ("native", "sdpa")})


def tiles(name: str, dtype: torch.dtype) -> dict[int, dict[str, float]]:
    """Forward and backward at every length, in turns: milliseconds, microseconds a kept tile of 64 by 64."""
    pattern, ways, kept = PATTERNS[name], {}, {}
    for n in LENGTHS:
        q, k, v = (torch.randn(1, n, 8, 64, dtype=dtype).requires_grad_() for _ in range(3))
        place = torch.arange(n)[None]
        records = Records(place, marks=(place < 64).int()) if name == "global" else None
        seen = {"pattern": pattern, "query": records, "key": records}
        kept[n] = count_tiles(AttentionCall(q=q, k=k, v=v, **seen), 64, 64) * 8 // pattern.heads
        d_out = torch.randn_like(q)
        ways[str(n)] = lambda inputs=(q, k, v), seen=seen, d=d_out: torch.autograd.grad(
            attention(*inputs, **seen, backend="native"), inputs, d
        )
    found = paired(ways, rounds=3, seconds=0.5)
    return {n: {"native": found[str(n)], "us_per_tile": 1e3 * found[str(n)] / kept[n]} for n in LENGTHS}


def cells(wanted: list[str]) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, dict[str, float]]]:
    for dtype in DTYPES:
        if "train" in wanted:
            yield from (("train", cell, dtype, train(*cell, dtype)) for cell in TRAIN)
        if "decode" in wanted:
            yield from (("decode", cell, dtype, decode(*cell, dtype)) for cell in DECODE)
        if "tiles" in wanted:
            for name in ("window", "banded", "global", "random"):
                yield from ((name, (n,), dtype, found) for n, found in tiles(name, dtype).items())


def main(wanted: list[str]) -> None:
    kernels.wait()
    for kind, cell, dtype, found in cells(wanted or ["train", "decode", "tiles"]):
        line = {
            "kind": kind,
            "cell": cell,
            "dtype": str(dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
        }
        line |= {name: round(value, 4) for name, value in found.items()}
        if "sdpa" in found:
            line["ratio"] = round(found["sdpa"] / found["native"], 2)
        if kind == "train":
            b, h, t, e = cell
            line["gflops"] = round(3.5 * 2 * b * h * t * t * e / found["native"] / 1e6, 1)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="of train, decode, tiles; without one, all")
    wanted = parser.parse_args().kinds
    if unknown := [kind for kind in wanted if kind not in ("train", "decode", "tiles")]:
        parser.error(f"there is no kind '{unknown[0]}'")
    main(wanted)
