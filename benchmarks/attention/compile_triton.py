"""Compile the Triton kernels for a GPU (sm_90) on a machine that has none: what the interpreter takes, the compiler may
refuse. Prints a line per kernel with the shared memory it takes, which must fit 227 KiB.

    PYTHONPATH=src python benchmarks/attention/compile_triton.py [case ...]
"""

import argparse
import time
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from phylon.ops.attention import AlibiBias, AttentionCall, BucketBias
from phylon.ops.attention import triton_kernels as kernels
from phylon.ops.attention.triton import Triton
from phylon.ops.scan import Breaks, ScanCall
from phylon.ops.scan import triton_kernels as scan_kernels
from phylon.ops.scan.triton import ScanTriton
from phylon.patterns import Causal, Window

POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32"}
SHARED = 227 * 1024


class Compiled:
    """Stands where a kernel stood: compiles the launch instead of running it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.launch

    def launch(self, **values: Any) -> None:
        options = {name: values.pop(name) for name in ("num_warps", "num_stages") if name in values}
        names = self.kernel.arg_names
        assert set(names) == set(values), set(names) ^ set(values)
        constant = {p.name for p in self.kernel.params if p.is_constexpr}
        signature = {n: "constexpr" if n in constant else self.kind(values[n]) for n in names}
        source = ASTSource(self.kernel, signature, constexprs={(names.index(n),): values[n] for n in constant})
        start = time.perf_counter()
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert made.metadata.shared <= SHARED, f"{made.metadata.shared} bytes of shared memory"
        done = f"{made.metadata.shared:7d} bytes of shared memory, {time.perf_counter() - start:.1f} s"
        print(f"  {self.kernel.__name__:16s} {list(made.asm)[-1]}, {done}", flush=True)

    @staticmethod
    def kind(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return POINTERS.get(value.dtype, "*u8")
        if isinstance(value, float):
            return "fp32"
        return "i32" if -(2**31) <= value < 2**31 else "i64"


def compiled(dtype: torch.dtype, width: int, value_width: int, **options: Any) -> None:
    """Both directions of a call of two heads that share a key head."""
    shapes = ((1, 100, 2, width), (1, 100, 1, width), (1, 100, 1, value_width))
    q, k, v = (torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    Triton().run(AttentionCall(q=q, k=k, v=v, **options)).sum().backward()


def scanned() -> None:
    """Both directions of a selective scan with documents."""
    x, b, resets = torch.zeros(1, 100, 40), torch.zeros(1, 100, 16), torch.zeros(1, 100, dtype=torch.bool)
    breaks = Breaks(resets=resets)
    call = ScanCall(x=x.requires_grad_(), dt=x, A=torch.zeros(40, 16), B=b, C=b, D=x[0, 0], state=None, breaks=breaks)
    ScanTriton().run(call)[0].sum().backward()


def learned(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, requires_grad=True)


CASES: dict[str, Any] = {
    "causal": lambda: compiled(torch.bfloat16, 64, 64, pattern=Causal()),
    "wide": lambda: compiled(torch.bfloat16, 256, 256, pattern=Causal()),
    "latent": lambda: compiled(torch.bfloat16, 192, 128, pattern=Causal()),
    "alibi": lambda: compiled(torch.float16, 80, 80, pattern=Causal(), bias=AlibiBias(learned(2)), dropout=0.1),
    "float32": lambda: compiled(
        torch.float32,
        64,
        64,
        pattern=Window(size=9),
        bias=BucketBias(learned(32, 2), 20, True),
        softcap=3.0,
        sink=learned(2),
        dropout=0.2,
        seed=2**32 - 5,
    ),
    "scan": scanned,
}

for module, own in (
    (kernels, ("forward", "backward_queries", "backward_keys")),
    (scan_kernels, ("forward", "backward")),
):
    for kernel in own:
        setattr(module, kernel, Compiled(getattr(module, kernel)))
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; without one, all")
wanted = parser.parse_args().cases
if unknown := [case for case in wanted if case not in CASES]:
    parser.error(f"there is no case '{unknown[0]}'")
for case in wanted or CASES:
    print(case, flush=True)
    CASES[case]()
