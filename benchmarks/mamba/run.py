"""Mamba beside its peers in one process: pairs A B A B, medians, ratios; one JSON line for each cell.

    PYTHONPATH=src python benchmarks/mamba/run.py train --seq-len 2048 --against mambapy
    PYTHONPATH=src python benchmarks/mamba/run.py train --seq-len 1024 --against transformers --pairs 1
    PYTHONPATH=src python benchmarks/mamba/run.py length | memory | profile
    PYTHONPATH=src python benchmarks/mamba/run.py decode --against transformers
    PYTHONPATH=src python benchmarks/mamba/run.py ssd --seq-len 1024 --heads 8 --threads 1

``--peers DIR`` names the site-packages of an environment that has the peer, where this one has not.
"""

import argparse
import json
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import phylon
from phylon.families.mamba import mamba_spec
from phylon.ops import scan

V, D, LAYERS, N = 4096, 256, 4, 16


def ours() -> Any:
    return phylon.build(mamba_spec(d_model=D, n_layers=LAYERS, d_state=N, vocab_size=V), seed=0)


def mambapy() -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    from mambapy.mamba import Mamba, MambaConfig, RMSNorm

    class LM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(V, D)
            self.mamba = Mamba(MambaConfig(d_model=D, n_layers=LAYERS, d_state=N))
            self.norm = RMSNorm(D, 1e-5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.mamba(self.embed(x))) @ self.embed.weight.T

    model = LM()
    return model, lambda x: F.cross_entropy(model(x).flatten(0, 1), x.flatten())


def transformers() -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=V, hidden_size=D, num_hidden_layers=LAYERS, state_size=N))
    return model, lambda x: model(input_ids=x, labels=x, use_cache=False).loss


PEERS = {"mambapy": mambapy, "transformers": transformers}


def step(model: nn.Module, loss: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    model.zero_grad()
    loss(x).backward()


def our_step(x: torch.Tensor) -> Callable[[], None]:
    model = ours().train()
    return lambda: step(model, lambda x: model(x, targets=x, logits="none").losses["lm"].mean, x)


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def pairs(calls: dict[str, Callable[[], Any]], n: int, warm: int = 1) -> dict[str, list[float]]:
    """Seconds of every call, run in turn."""
    for _ in range(warm):
        for call in calls.values():
            call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(n):
        for name, call in calls.items():
            seconds[name].append(timed(call))
    return seconds


def spread(seconds: list[float]) -> dict[str, float]:
    return {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds)}


class PeakMemory:
    """The most resident memory above that at entry, MiB, sampled every millisecond."""

    def __enter__(self) -> "PeakMemory":
        self.base = self.peak = self._now()
        self.stop = False
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def _now(self) -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

    def _watch(self) -> None:
        while not self.stop:
            self.peak = max(self.peak, self._now())
            time.sleep(0.001)

    def __exit__(self, *_: object) -> None:
        self.stop = True
        self.thread.join()
        self.mib = self.peak - self.base


def train(args: argparse.Namespace) -> dict[str, Any]:
    x = torch.randint(0, V, (args.batch, args.seq_len))
    calls = {"phylon": our_step(x)}
    if args.against:
        model, loss = PEERS[args.against]()
        calls[args.against] = lambda: step(model, loss, x)
    if args.pairs == 1:  # a peer that takes minutes
        our_step(x)()
    seconds = pairs(calls, args.pairs, warm=0 if args.pairs == 1 else 1)
    rows = {name: spread(s) | {"tokens_per_s": x.numel() / statistics.median(s)} for name, s in seconds.items()}
    ratio = {f"over_{n}": rows["phylon"]["tokens_per_s"] / rows[n]["tokens_per_s"] for n in calls if n != "phylon"}
    return {"batch": args.batch, "seq_len": args.seq_len, **rows, **ratio}


def length(args: argparse.Namespace) -> dict[str, Any]:
    steps = {str(n): our_step(torch.randint(0, V, (1, n))) for n in (2048, 8192)}
    seconds = pairs(steps, args.pairs)
    ratios = [b / a for a, b in zip(*seconds.values(), strict=True)]
    return {n: spread(s) for n, s in seconds.items()} | {"ratio": statistics.median(ratios)}


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """Of one scan, forward and backward, in a fresh process; all states would be T x 512 x 16 x 4 bytes."""
    inner, n = 2 * D, args.seq_len
    x, dt = torch.randn(1, n, inner, requires_grad=True), torch.rand(1, n, inner, requires_grad=True)
    B, C = (torch.randn(1, n, N, requires_grad=True) for _ in range(2))
    A, skip = (-torch.rand(inner, N)).requires_grad_(), torch.ones(inner, requires_grad=True)
    g = torch.randn(1, n, inner)
    with torch.no_grad():
        scan.selective_scan(x[:, :64], dt[:, :64], A, B[:, :64], C[:, :64], skip)
    with PeakMemory() as peak:
        y, _ = scan.selective_scan(x, dt, A, B, C, skip)
        y.backward(g)
    kept = sum(t.numel() * 4 for t in (y, x, dt, B, C)) / 2**20
    states = n * inner * N * 4 / 2**20
    return {"seq_len": n, "peak_mib": peak.mib, "output_and_gradients_mib": kept, "all_states_mib": states}


def ssd(args: argparse.Namespace) -> dict[str, Any]:
    """Mamba-2's scan, P = 64, N = 128, one group: the kernel and the PyTorch form in turn, f32 and bf16."""
    n, heads, found = args.seq_len, args.heads, {}
    for dtype in (torch.float32, torch.bfloat16):
        shapes = {"x": (heads, 64), "B": (1, 128), "C": (1, 128)}
        given = {name: torch.randn(args.batch, n, *s).to(dtype).requires_grad_() for name, s in shapes.items()}
        given["dt"] = F.softplus(torch.randn(args.batch, n, heads) - 3).requires_grad_()
        given |= {"A": (-16 * torch.rand(heads)).requires_grad_(), "D": torch.ones(heads, requires_grad=True)}
        g = torch.randn(args.batch, n, heads, 64).to(dtype)
        forward = torch.no_grad()(partial(scan.ssd_scan, **given))
        state = torch.randn(args.batch, heads, 64, 128)
        one = {name: t[:, :1].detach() if t.ndim > 1 else t for name, t in given.items()}
        step = torch.no_grad()(partial(scan.ssd_scan, **one, state=state, into=torch.empty_like(state)))

        def both(backend: str, given: dict[str, torch.Tensor] = given, g: torch.Tensor = g) -> None:
            y, _ = scan.ssd_scan(**given, backend=backend)
            torch.autograd.grad(y, list(given.values()), g)

        for kind, call in {"forward": forward, "forward_backward": both, "step": step}.items():
            calls = {name: partial(call, backend=name) for name in ("native", "chunked")}
            seconds = pairs(calls, args.pairs * (20 if kind == "step" else 1), warm=2)
            row = {name: spread(s) for name, s in seconds.items()}
            ratio = statistics.median(a / b for a, b in zip(seconds["chunked"], seconds["native"], strict=True))
            found[f"{kind}_{str(dtype).removeprefix('torch.')}"] = row | {"over_chunked": ratio}
    return {"batch": args.batch, "seq_len": n, "heads": heads} | found


def decode(args: argparse.Namespace) -> dict[str, Any]:
    model, n = ours().eval(), 128
    prompt = torch.randint(0, V, (1, 32))

    def generate(k: int) -> None:
        phylon.generate(model, [prompt[0].tolist()], max_new_tokens=k, temperature=0, eos_ids=(), logprobs=False)

    @torch.inference_mode()
    def loop() -> None:
        state = model.new_state(1)
        token = model(prompt, state=state, logits="last").logits[:, -1].argmax(-1, keepdim=True)
        for _ in range(n):
            token = model(token, state=state, logits="last").logits[:, -1].argmax(-1, keepdim=True)

    calls: dict[str, Callable[[], Any]] = {"phylon_generate": lambda: generate(n), "phylon_loop": loop}
    if args.against == "transformers":
        peer, _ = transformers()
        peer.eval()
        peer.generation_config.eos_token_id, peer.generation_config.pad_token_id = None, 0

        @torch.inference_mode()
        def theirs() -> None:
            peer.generate(prompt, max_new_tokens=n, min_new_tokens=n, do_sample=False)

        @torch.inference_mode()
        def their_loop() -> None:
            out = peer(prompt, use_cache=True)
            for _ in range(n):
                token = out.logits[:, -1:].argmax(-1)
                out = peer(token, cache_params=out.cache_params, use_cache=True)

        calls |= {"transformers_generate": theirs, "transformers_loop": their_loop}
    seconds = pairs(calls, args.pairs)
    rows = {name: spread(s) | {"tokens_per_s": n / statistics.median(s)} for name, s in seconds.items()}
    ratios = {}
    if args.against == "transformers":
        ratios = {
            f"{k}_ratio": rows[f"phylon_{k}"]["tokens_per_s"] / rows[f"transformers_{k}"]["tokens_per_s"]
            for k in ("generate", "loop")
        }
    return rows | ratios


def profile(args: argparse.Namespace) -> dict[str, Any]:
    call = our_step(torch.randint(0, V, (1, args.seq_len)))
    call()
    with torch.profiler.profile() as found:
        for _ in range(3):
            call()
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=25), file=sys.stderr)
    return {}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["train", "length", "memory", "decode", "ssd", "profile"])
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8, help="of Mamba-2's scan")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--against", choices=sorted(PEERS))
    parser.add_argument("--peers", help="site-packages of the peers' environment")
    parser.add_argument("--backend", help="force the scan and convolution backends (default: the dispatch's choice)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="append the JSON line here as well")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    if args.peers:
        sys.path.append(args.peers)
    if args.backend:
        scan.dispatch.forced = args.backend
    found = globals()[args.what](args)
    machine = {"cpu": platform.processor() or platform.machine(), "threads": args.threads, "torch": torch.__version__}
    line = json.dumps({"case": args.what, "against": args.against, "backend": args.backend, **found, **machine})
    print(line)
    if args.out:
        with args.out.open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
