"""Attention by length, pattern, dtype and pass: every backend that supports the call, and PyTorch's own as peers."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from phylon.bench.case import Cell, Key, Planned, case
from phylon.bench.oracle import off
from phylon.ops.attention import AttentionCall, dispatch
from phylon.patterns import BigBird, Causal, Global, Pattern, Records, Strided, SymmetricWindow, Window, measured

HEADS, WIDTH = 8, 64
PATTERNS: dict[str, Pattern] = {
    "causal": Causal(),
    "window": Window(size=1024),
    "banded": Window(size=128) | Strided(stride=128),
    "global": SymmetricWindow(radius=256) | Global(),
    "random": BigBird(block=64, n_heads=HEADS),
}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
_DENSE = 2**31
"""Bytes of scores that a backend without tiles may make."""
_ALL, _WHOLE = 2**12, 2**15
"""Lengths up to which all heads, and one head, are checked as a whole."""
_STEP = 512


def _installed() -> str | None:
    return None


@case("attention", peers={"sdpa-mask": _installed, "flex-compiled": _installed})
def attention() -> Iterator[Planned]:
    """Attention forward and backward, batch 1, 8 heads of 64, by n, pattern, dtype and pass."""
    passes = ("forward", "forward+backward")
    for n, pattern, dtype, way in product((1024, 4096, 16384, 65536), PATTERNS, DTYPES, passes):
        key: Key = {"n": n, "pattern": pattern, "dtype": dtype, "pass": way}
        yield Planned(key, partial(_cell, n, PATTERNS[pattern], DTYPES[dtype], way == "forward+backward"))


def _cell(n: int, pattern: Pattern, dtype: torch.dtype, backward: bool, peers: frozenset[str]) -> Cell:
    generator = torch.Generator().manual_seed(n)
    q, k, v, g = (torch.randn(1, n, HEADS, WIDTH, generator=generator).to(dtype) for _ in range(4))
    inputs = [x.requires_grad_(backward) for x in (q, k, v)]
    records = Records(torch.arange(n)[None], marks=(torch.arange(n)[None] < 64).int()) if _marked(pattern) else None
    make = partial(AttentionCall, *(), pattern=pattern, query=records, key=records)
    whole = make(q=q, k=k, v=v)
    refused, ways = {}, {}
    for name, backend in dispatch.backends.items():
        reason = backend.available() or backend.supports(whole) or _too_large(name, n, dtype, pattern)
        if reason:
            refused[name] = reason
        else:
            ways[name] = lambda q, k, v, backend=backend: backend.run(make(q=q, k=k, v=v))
    ways |= {name: _peer(name, whole) for name in sorted(peers)}
    sides = {name: partial(_both if backward else _forward, way, inputs, g) for name, way in ways.items()}
    expected: list[list[Tensor]] = []

    def oracle(side: str, result: list[Tensor]) -> str | None:
        if not expected:
            expected.extend(_exact(whole, g, backward, heads, first) for heads, first in _judged(n))
        limit = 1e-4 if dtype == torch.float32 else 2e-2
        for (heads, first), exact in zip(_judged(n), expected, strict=True):
            names = ("output", "dq", "dk", "dv")[: len(exact)]
            wrong = off(names, [x[:, first:, heads] for x in result[: len(exact)]], exact, limit)
            if wrong:
                return wrong
        return None

    pairs = _pairs(whole)
    flops = 4 * WIDTH * pairs * (3.5 if backward else 1)
    return Cell(sides=sides, oracle=oracle, amounts={"TFLOP": flops / 1e12, "tokens": n}, refused=refused)


def _marked(pattern: Pattern) -> bool:
    return any(isinstance(part, Global) for part in getattr(pattern, "patterns", (pattern,)))


def _too_large(name: str, n: int, dtype: torch.dtype, pattern: Pattern) -> str | None:
    masked = not isinstance(pattern, Causal)
    need = {"reference": 4 * HEADS * n * n, "sdpa": n * n * (1 + dtype.itemsize) * pattern.heads if masked else 0}
    if need.get(name, 0) > _DENSE:
        return f"its {n} x {n} tensors would take {need[name] / 2**30:.1f} GiB"
    return None


def _forward(way: Callable[..., Tensor], inputs: list[Tensor], g: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [way(*inputs)]


def _both(way: Callable[..., Tensor], inputs: list[Tensor], g: Tensor) -> list[Tensor]:
    out = way(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, g)]


def _peer(name: str, call: AttentionCall) -> Callable[..., Tensor]:
    """PyTorch as its users call it, masks made beforehand: tensors (B, H, N, E) inside."""
    run: Callable[..., Tensor]
    if name == "sdpa-mask":
        causal = isinstance(call.pattern, Causal)
        options: dict[str, Any] = {"is_causal": True} if causal else {"attn_mask": call.mask()}
        run = partial(F.scaled_dot_product_attention, **options)
    else:
        from phylon.ops.attention.flex import block_mask, compiled

        run = partial(compiled(), block_mask=block_mask(call))
    return lambda q, k, v: run(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def _pairs(call: AttentionCall) -> int:
    """Visible pairs of all heads, from the exact block map."""
    from phylon.ops.attention.plan import FULL, tile_plan

    plan = tile_plan(call, 128, 128)
    full = int((plan.masks == FULL).sum()) * 128 * 128
    ones = torch.tensor([bin(i).count("1") for i in range(256)])[plan.bits.long()].flatten(1).sum(1)
    counted = full + int(ones[plan.masks[plan.masks != FULL].long()].sum())
    return counted * (HEADS // plan.heads)


def _judged(n: int) -> list[tuple[slice, int]]:
    """Which heads are checked, from which token on: all as a whole; of longer texts the last, and the ends of all."""
    every, last, end = slice(0, HEADS), slice(HEADS - 1, HEADS), n - _STEP
    return [(every, 0)] if n <= _ALL else [(last, 0), (every, end)] if n <= _WHOLE else [(every, end)]


def _exact(call: AttentionCall, g: Tensor, backward: bool, heads: slice, first: int) -> list[Tensor]:
    """The results and gradients of some heads in fp32, some queries at a time, for the tokens from ``first`` on."""
    n = call.q.shape[1]
    q, k, v = (x.detach()[:, :, heads].float() for x in (call.q, call.k, call.v))
    query, key = measured(*call.records())
    found = [torch.zeros_like(x) for x in (q, q, k, v)]
    for at in range(first, n, _STEP):
        rows = slice(at, at + _STEP)
        masks = call.pattern.allowed(query.map(lambda x, r=rows: x[:, r]).as_queries(), key.as_keys())[0]
        for h, mask in enumerate(masks.expand(HEADS, -1, -1)[heads]):
            scores = (q[0, rows, h] @ k[0, :, h].T / math.sqrt(WIDTH)).masked_fill_(~mask, -math.inf)
            weights = scores.softmax(-1)
            found[0][0, rows, h] = out = weights @ v[0, :, h]
            if backward:
                grad = g[0, rows, heads][:, h].float()
                inner = weights * (grad @ v[0, :, h].T - (grad * out).sum(-1, keepdim=True)) / math.sqrt(WIDTH)
                found[1][0, rows, h] = inner @ k[0, :, h]
                found[2][0, :, h] += inner.T @ q[0, rows, h]
                found[3][0, :, h] += weights.T @ grad
    # Keys at the end have their whole gradient from the queries there only where nothing earlier sees them.
    kept = 1 if not backward else 4 if first == 0 or call.pattern.streams else 2
    return [x[:, first:] for x in found[:kept]]
