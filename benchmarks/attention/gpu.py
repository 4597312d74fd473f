"""On a GPU: the Triton kernels against the reference, then TFLOP/s beside PyTorch's SDPA and FlexAttention.

    PYTHONPATH=src python benchmarks/attention/gpu.py [--out benchmarks/attention/gpu.json]

Batch 4, 16 heads of 64 or 128, bf16; medians of interleaved rounds; only visible pairs count as work: 4 E a pair
forward, 14 E forward and backward (seven products, one of them the recomputation of the scores).
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phylon.ops.attention import AlibiBias, AttentionCall, BucketBias, dispatch
from phylon.ops.attention.reference import Reference
from phylon.ops.attention.triton import Triton
from phylon.patterns import BigBird, Causal, Full, Pattern, Window

ROUNDS, BATCH, HEADS, WINDOW = 10, 4, 16, 1024
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def inputs(b: int, n: int, h: int, kv: int, e: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(n)
    shapes = ((b, n, h, e), (b, n, kv, e), (b, n, kv, e))
    return [torch.randn(x, generator=generator, device="cuda").to(dtype).requires_grad_() for x in shapes]


def both_ways(run: Callable[[AttentionCall], Tensor], call: AttentionCall, extra: list[Tensor]) -> list[Tensor]:
    out = run(call)
    weights = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda").to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), [call.q, call.k, call.v, *extra])]


def check() -> None:
    """Every feature, dtype and width at a length that is no multiple of a block; stops at the first error."""
    table, slopes, sink = (torch.linspace(-1, 1, n, device="cuda") for n in (32, 4, 4))
    features: dict[str, tuple[dict[str, Any], list[Tensor]]] = {
        "full": ({"pattern": Full()}, []),
        "causal": ({"pattern": Causal()}, []),
        "window": ({"pattern": Window(size=100), "softcap": 3.0}, []),
        "random": ({"pattern": BigBird(block=16, n_heads=4, n_random=1), "dropout": 0.2, "seed": 2**32 - 5}, []),
        "sink": ({"pattern": Causal(), "sink": sink.requires_grad_()}, [sink]),
        "alibi": ({"pattern": Causal(), "bias": AlibiBias(slopes.requires_grad_())}, [slopes]),
    }
    table = table.view(8, 4).detach().requires_grad_()
    features["buckets"] = ({"bias": BucketBias(table, 50, True), "dropout": 0.1}, [table])
    for dtype, limit in LIMITS.items():
        for width in (16, 64, 80, 128, 256):
            for name, (options, extra) in features.items():
                q, k, v = inputs(2, 333, 4, 2, width, dtype)
                ours = both_ways(Triton().run, AttentionCall(q=q, k=k, v=v, **options), extra)
                wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
                call = AttentionCall(q=wide[0], k=wide[1], v=wide[2], **options)
                for i, (a, c) in enumerate(zip(ours, both_ways(Reference().run, call, extra), strict=True)):
                    error = float((a.float() - c).norm() / c.norm().clamp(min=1e-6))
                    # The gradient of a bias's parameter is a sum of both signs: most of it cancels.
                    if not error <= (limit if i < 4 else 10 * limit):
                        raise SystemExit(f"{name}, {dtype}, width {width}: tensor {i} is off by {error:.1e}")
    print("right: every feature, dtype and width")


def timed(run: Callable[[], Any]) -> float:
    """Milliseconds."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def speed(n: int, e: int, name: str, pattern: Pattern, backward: bool) -> dict[str, Any]:
    q, k, v = inputs(BATCH, n, HEADS, HEADS, e, torch.bfloat16)
    call = AttentionCall(q=q, k=k, v=v, pattern=pattern)
    gradient = torch.randn_like(q)

    def work(run: Callable[[AttentionCall], Tensor]) -> Callable[[], Any]:
        if backward:
            return lambda: torch.autograd.grad(run(call), (q, k, v), gradient)
        still = AttentionCall(q=q.detach(), k=k.detach(), v=v.detach(), pattern=pattern)
        return lambda: run(still)

    ways = {f"triton {block}": Triton(block) for block in (32, 64, 128)}
    ways |= {name: dispatch.backends[name] for name in ("sdpa", "flex")}
    runs: dict[str, Callable[[], Any]] = {}
    for way, backend in ways.items():
        run = work(backend.run)
        try:
            run()
            runs[way] = run
        except Exception as error:  # a tile may be too large, or a PyTorch too old for FlexAttention
            print(f"  {way}: {str(error).splitlines()[0][:100]}")
    times: dict[str, list[float]] = {way: [] for way in runs}
    for _ in range(ROUNDS):
        for way, run in runs.items():
            times[way].append(timed(run))
    seen = min(n, WINDOW) if name == "window" else n
    pairs = n * seen - seen * (seen - 1) // 2
    operations = BATCH * HEADS * pairs * e * (14 if backward else 4)
    rates = {way: operations / statistics.median(ms) / 1e9 for way, ms in times.items()}
    direction = "forward + backward" if backward else "forward"
    print(f"n {n:6d} width {e:3d} {name:7s} {direction}: " + ", ".join(f"{w} {r:.0f}" for w, r in rates.items()))
    return {"n": n, "width": e, "pattern": name, "backward": backward, "tflops": rates}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    out = parser.parse_args().out
    if not torch.cuda.is_available():
        raise SystemExit("no GPU")
    torch.backends.cuda.matmul.allow_tf32 = False
    check()
    print(f"TFLOP/s on {torch.cuda.get_device_name()}")
    patterns = {"causal": Causal(), "window": Window(size=WINDOW)}
    rows = [
        speed(n, e, name, pattern, backward)
        for n in (2048, 8192)
        for e in (64, 128)
        for name, pattern in patterns.items()
        for backward in (False, True)
    ]
    if out:
        whole = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "gpu": rows}
        out.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
