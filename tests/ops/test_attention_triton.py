"""The Triton kernels against the reference, in Triton's interpreter on a CPU, and compiled for a GPU that is not there.

Triton asks for ``TRITON_INTERPRET`` when it is imported, so the tests that use it run in a process of their own.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import assert_close
from phylon.ops.attention import AlibiBias, BucketBias, attention, dispatch, explain
from phylon.ops.attention.call import AttentionCall
from phylon.ops.attention.reference import Reference
from phylon.ops.attention.triton import Triton
from phylon.ops.triton import interpreted
from phylon.patterns import BigBird, Causal, Full, Pattern, Records, SymmetricWindow, Window
from phylon.spec import UserError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
inside = pytest.mark.skipif(not interpreted(), reason="runs inside test_in_the_interpreter")
outside = pytest.mark.skipif(interpreted(), reason="starts the interpreter")
ROOT = Path(__file__).parents[2]


def in_a_process(*arguments: str, seconds: int = 60, interpret: bool = True) -> str:
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "TRITON_INTERPRET": "1" if interpret else "0",
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@outside
def test_in_the_interpreter() -> None:
    """All tests named so, of this file and of the scan."""
    files = [str(path) for path in Path(__file__).parent.glob("test_*_triton.py")]
    said = in_a_process("-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", *files, "-k", "inside")
    ran = re.search(r"(\d+) passed", said)
    assert ran is not None
    assert int(ran[1]) >= len(CASES)


@outside
@pytest.mark.slow
def test_contract_in_the_interpreter() -> None:
    """The contract of all backends, for this one: every feature and size."""
    contract = str(ROOT / "tests" / "contract" / "test_attention_backends.py")
    said = in_a_process("-m", "pytest", "-q", "-p", "no:cacheprovider", contract, "-k", "[triton", seconds=900)
    ran = re.search(r"(\d+) passed", said)
    assert ran is not None
    assert int(ran[1]) > 50


@outside
@pytest.mark.slow
def test_kernels_compile_for_a_gpu() -> None:
    """Down to machine code for sm_90, which needs no GPU: what the interpreter takes, the compiler may refuse."""
    said = in_a_process(str(ROOT / "benchmarks" / "attention" / "compile_triton.py"), seconds=300, interpret=False)
    assert said.count("cubin") == 17


@outside
def test_refusals() -> None:
    x = torch.randn(1, 4, 2, 8)
    if not torch.cuda.is_available():
        assert Triton().available() == "no GPU"
        assert "triton" not in {line.backend for line in explain(x, x, x) if line.reason is None}
    with pytest.raises(UserError, match=r"attention backend 'triton' cannot run this call: (no GPU|it runs on GPUs)"):
        attention(x, x, x, backend="triton")


def call(t: int, s: int, dtype: torch.dtype = torch.float32, *, kv: int = 1, **options: Any) -> AttentionCall:
    generator = torch.Generator().manual_seed(t)
    shapes = ((options.pop("b", 1), t, 2, 10), (1, s, kv, 10), (1, s, kv, 20))
    b = shapes[0][0]
    q, k, v = (torch.randn((b, *x[1:]), generator=generator).to(dtype).requires_grad_() for x in shapes)
    return AttentionCall(q=q, k=k, v=v, **options)


def segments(n: int, kind: str) -> Records:
    """Padding at the left; or two documents with a gap."""
    index = torch.arange(n)
    own = (index >= n // 3).long() if kind == "left" else torch.where(index % 20 == 19, 0, 1 + index // 20)
    return Records((index - n // 3).clamp(min=0)[None] if kind == "left" else index[None] % 20, own[None])


def far(n: int) -> Records:
    """The second half stands far from the first."""
    index = torch.arange(n)
    return Records(torch.where(index < n // 2, index, index + 10_000_000)[None])


def learned(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, int(torch.Size(shape).numel())).view(shape).requires_grad_()


CASES: dict[str, Any] = {
    "full": lambda: call(5, 40, pattern=Full()),
    "causal": lambda: call(45, 45, pattern=Causal()),
    "more queries than keys": lambda: call(45, 33, pattern=Causal()),
    "window": lambda: call(50, 50, kv=2, pattern=Window(size=9)),
    "heads apart": lambda: call(33, 33, pattern=BigBird(block=8, n_heads=2, n_random=1)),
    "rows": lambda: call(33, 33, b=2, pattern=SymmetricWindow(radius=3)),
    "left padding": lambda: call(45, 45, pattern=Causal(), query=segments(45, "left"), key=segments(45, "left")),
    "bfloat16": lambda: call(24, 24, torch.bfloat16, pattern=Causal(), dropout=0.2),
    "float16": lambda: call(24, 24, torch.float16, pattern=Causal()),
    "buckets": lambda: call(33, 33, pattern=Full(), bias=BucketBias(learned(8, 2), 20, True)),
    "buckets of far positions": lambda: call(
        33, 33, pattern=Full(), query=far(33), key=far(33), bias=BucketBias(learned(8, 2), 20, True)
    ),
    "all": lambda: call(
        45,
        45,
        pattern=Window(size=40),
        query=segments(45, "packed"),
        key=segments(45, "packed"),
        bias=AlibiBias(learned(2)),
        softcap=3.0,
        sink=learned(2),
        dropout=0.3,
        seed=2**32 - 5,
        scale=0.4,
    ),
}


def both_ways(backend: Any, made: AttentionCall) -> list[Tensor]:
    learns = [x for x in (made.sink, *vars(made.bias or object).values()) if isinstance(x, Tensor) and x.requires_grad]
    out = backend.run(made)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), [made.q, made.k, made.v, *learns])]


@inside
@pytest.mark.parametrize("name", CASES)
def test_inside_equals_the_reference(name: str) -> None:
    """Forward and backward; what nobody sees holds NaN; the same bits when it is run again."""
    made = CASES[name]()
    assert Triton().available() is Triton().supports(made) is None
    mask = made.mask()
    if mask is not None:
        unseen = ~mask.any(2).any(1)[0]
        with torch.no_grad():
            made.k[:, unseen], made.v[:, unseen] = torch.nan, torch.nan
    ours, exact = both_ways(Triton(block=32), made), both_ways(Reference(), made)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[made.q.dtype]
    for i, (mine, other) in enumerate(zip(ours, exact, strict=True)):
        error = float((mine.double() - other.double()).norm() / other.double().norm().clamp(min=1e-3))
        assert error <= tolerance, f"tensor {i} is off by {error:.1e}"
    if mask is not None:
        assert not ours[0].transpose(1, 2)[:, :, ~mask.any(-1)[0, 0]].any(), "a query that sees nothing gives zero"
    if name == "bfloat16":
        assert all(torch.equal(a, b) for a, b in zip(ours, both_ways(Triton(block=32), made), strict=True))


@inside
def test_inside_blocks_give_the_same() -> None:
    pattern: Pattern = Causal()
    results = [both_ways(Triton(block=block), call(24, 24, pattern=pattern, dropout=0.5)) for block in (16, 64)]
    for one, other in zip(*results, strict=True):
        assert_close(one, other, floor=1.0)


@inside
def test_inside_refusals() -> None:
    made = call(4, 4)
    wide = AttentionCall(q=made.q.double(), k=made.k.double(), v=made.v.double())
    assert "float64" in (Triton().supports(wide) or "")
    broad = torch.zeros(1, 2, 1, 257)
    slopes = call(33, 33, query=far(33), key=far(33), bias=AlibiBias(learned(2)))
    assert "too far for a table" in (Triton().supports(slopes) or "")
    assert "wider than 256" in (Triton().supports(AttentionCall(q=broad, k=broad, v=broad)) or "")
    assert "triton" in dispatch.backends
