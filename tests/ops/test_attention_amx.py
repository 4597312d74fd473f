"""bf16 attention on AMX: the kernel over emulated tiles on any processor, the real one down to its instructions.

No machine is asked to have AMX: one that has it runs ``test_attention_native.py`` and the contract on the real thing.
"""

import ctypes
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from phylon.ops.attention import AttentionCall, dispatch, explain
from phylon.ops.attention import native as kernel
from phylon.ops.attention.native import Native
from phylon.ops.attention.native_check import check
from phylon.ops.attention.reference import Reference
from phylon.ops.native import Library, amx, library
from phylon.ops.native.amx import AMX, EMULATED, PLAIN
from phylon.patterns import Causal, Full, Pattern, Records, Window

ROOT = Path(__file__).parents[2]
SOURCES = Path(kernel.__file__).parent
NATIVE = SOURCES / "native.cpp"
PART = """#include "paired.h"
extern "C" void part(const bf16* a, const uint32_t* b, float* c, bf16* d, uint32_t* e) {
    Tiles tiles;
    tile_product<true>(64, 64, 64, a, 64, b, 64, c, 64);
    tile_product<false>(16, 16, 32, a, 64, b, 64, c, 64);
    round_pairs(c, 64, 64, 64 / W, e);
    round_rows(c, 64, 64, d);
}
"""
REAL = [*AMX.flags, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16"]
pytestmark = pytest.mark.skipif(library.compiler() is None, reason="no C++ compiler on this machine")


def compiled(target: Path, *flags: str, source: Path = NATIVE) -> str:
    """The compiler's complaint, or nothing."""
    command = [library.compiler() or "c++", *library.flags(), *flags, f"-I{SOURCES}", "-o", str(target), str(source)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300).stderr


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The kernel over emulated tiles and its parts, compiled as quickly as can be."""
    target = tmp_path_factory.mktemp("amx") / "emulated.so"
    # The last -O counts.
    assert compiled(target, *EMULATED.flags, "-O0", source=Path(__file__).with_name("tile_products.cpp")) == ""
    functions = kernel.LIBRARY.functions | {
        "tiles_multiply": [*[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 3, ctypes.c_int64],
        "rows_to_pairs": [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p],
    }
    before = dict(library.LIBRARIES)
    made = Library(kernel.LIBRARY.module, kernel.LIBRARY.sources, functions, lambda: None, forms=(EMULATED,))
    library.LIBRARIES.clear()
    library.LIBRARIES.update(before)
    made.adopt(target)
    return made


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def multiply(made: Library, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    """``a`` (M, K) times ``b`` (K, N) in bf16, plus ``c``, by the kernel's own loop over tiles."""
    out = torch.full((len(a), b.shape[1]), math.nan) if c is None else c.clone()
    pairs = torch.stack([b[::2], b[1::2]], -1).contiguous()  # two rows in one
    sizes = (*out.shape, a.shape[1])
    made.tiles_multiply(*sizes, a.contiguous().data_ptr(), pairs.data_ptr(), out.data_ptr(), int(c is not None))
    return out


def documented(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """TDPBF16PS as Intel's manual has it, 32 elements of K at a time, all in numpy: even and odd products apart."""
    flush = lambda x: numpy.where(numpy.abs(x) < 2.0**-126, numpy.copysign(numpy.float32(0), x), x).astype("f4")
    left, right, total = (flush(x.float().numpy()) for x in (a, b, c))
    for first in range(0, left.shape[1], 32):
        sums = [numpy.zeros_like(total), numpy.zeros_like(total)]
        for k in range(first, first + 32):
            # bf16 products are exact in f64, and f64 sums of them round twice only where a test's numbers make them.
            exact = numpy.outer(left[:, k].astype("f8"), right[k].astype("f8")) + sums[k % 2].astype("f8")
            sums[k % 2] = flush(exact.astype("f4"))
        total = flush(total + flush(sums[0] + sums[1]))
    return torch.from_numpy(total)


@pytest.mark.parametrize("size", [(16, 16, 32), (64, 64, 64), (48, 16, 96), (16, 48, 32), (80, 112, 32)])
def test_products_of_tiles(size: tuple[int, int, int], emulated: Library) -> None:
    """Odd numbers of registers in either direction, sums as documented, denormals as zero."""
    m, n, k = size
    made = torch.Generator().manual_seed(m)
    a, b = torch.randn(m, k, generator=made).bfloat16(), torch.randn(k, n, generator=made).bfloat16()
    c = torch.randn(m, n, generator=made)
    assert torch.equal(multiply(emulated, a, b), documented(a, b, torch.zeros(m, n)))
    assert torch.equal(multiply(emulated, a, b, c), documented(a, b, c))
    torch.testing.assert_close(multiply(emulated, a, b, c), a.float() @ b.float() + c, atol=1e-4, rtol=1e-4)
    a[0, 0], b[0, :] = 2.0**-130, 2.0**20  # a denormal
    a[1, :], b[1, 0] = 2.0**-70, 2.0**-70  # a product that is one
    c[2, :] = 2.0**-140
    assert torch.equal(multiply(emulated, a, b, c), documented(a, b, c))
    assert not multiply(emulated, a[:16] * 0, b[:, :16] * 0, c[:16, :16])[2].any()


def test_pairs(emulated: Library) -> None:
    rows = torch.randn(64, 48).bfloat16()
    pairs = torch.empty(32, 48, 2, dtype=torch.bfloat16)
    emulated.rows_to_pairs(rows.data_ptr(), 48, pairs.data_ptr())
    assert torch.equal(pairs[..., 0], rows[::2])
    assert torch.equal(pairs[..., 1], rows[1::2])


def drawn(t: int, s: int, e: int, ev: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    made = torch.Generator().manual_seed(t * 1000 + s + e)
    shapes = ((2, t, 4, e), (2, s, 2, e), (2, s, 2, ev))
    return [(1.5 * torch.randn(shape, generator=made)).bfloat16().to(dtype).requires_grad_() for shape in shapes]


def both_ways(backend: Any, inputs: list[Tensor], **options: Any) -> list[Tensor]:
    q, k, v = inputs
    out = backend.run(AttentionCall(q=q, k=k, v=v, **options))
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]


CASES: list[tuple[tuple[int, ...], Pattern, dict[str, Any]]] = [
    ((1, 1, 1, 1), Full(), {}),
    ((7, 7, 5, 3), Causal(), {}),
    ((20, 130, 12, 20), Causal(), {"scale": -0.3}),
    ((65, 33, 40, 33), Full(), {"softcap": 2.0}),
    ((80, 70, 36, 16), Window(size=40), {"dropout": 0.25, "seed": 3}),
    ((66, 66, 48, 16), Causal(), {"sink": torch.tensor([0.3, -1.0, 2.0, 0.0]), "softcap": 3.0, "dropout": 0.5}),
]


@pytest.mark.parametrize(("sizes", "pattern", "options"), CASES)
def test_kernel(sizes: tuple[int, ...], pattern: Pattern, options: dict[str, Any], emulated: Library) -> None:
    """Both directions to fp64: the error is that of rounding weights, gradients of scores, and results."""
    exact = both_ways(Reference(), drawn(*sizes, torch.float64), pattern=pattern, **options)
    found = both_ways(Native(emulated), drawn(*sizes), pattern=pattern, **options)
    for i, (ours, theirs) in enumerate(zip(found, exact, strict=True)):
        error, size = float((ours.double() - theirs).norm()), float(theirs.norm())
        assert error <= (3e-3 if i == 0 else 6e-3) * size + 1e-6, f"result {i}: {error / size}"


def test_nothing_is_read_that_was_not_written(emulated: Library) -> None:
    """Padding, queries that see nothing and memory of an earlier call hold NaN, and no bit moves, on any threads."""
    segments = torch.tensor([[0] * 20 + [1] * 30 + [2] * 23, [1] * 60 + [0] * 13])
    records = Records(torch.arange(73)[None], segments)
    options: dict[str, Any] = {"pattern": Causal(), "query": records, "key": records}
    inputs = drawn(73, 73, 12, 36)
    clean = both_ways(Native(emulated), inputs, **options)
    empty = (segments == 0)[..., None, None]
    assert not clean[0][empty.expand_as(clean[0])].any()
    assert not clean[1][empty.expand_as(clean[1])].any()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        spoilt = [torch.full_like(x, math.nan).requires_grad_() for x in drawn(65, 65, 40, 40)]
        both_ways(Native(emulated), spoilt, pattern=Full(), dropout=0.5)
        with torch.no_grad():
            dirty = [x.masked_fill(empty, math.nan) for x in inputs]
        again = both_ways(Native(emulated), [x.requires_grad_() for x in dirty], **options)
        assert all(torch.equal(a, b) for a, b in zip(clean, again, strict=True))


def test_a_visible_nan_is_not_hidden(emulated: Library) -> None:
    q, k, v = (x.detach() for x in drawn(70, 70, 12, 12))
    k[:, 30] = math.nan
    out = Native(emulated).run(AttentionCall(q=q, k=k, v=v, pattern=Causal(), dropout=1e-9))
    assert bool(out[:, 30:].isnan().all())
    assert not out[:, :30].isnan().any()


@pytest.mark.slow
def test_contract_on_emulated_tiles() -> None:
    """All of the contract, and of the kernel's own tests, on a library made as a run makes it."""
    files = [str(ROOT / "tests" / x) for x in ("contract/test_attention_backends.py", "ops/test_attention_native.py")]
    environment = os.environ | {"PHYLON_AMX": "emulated", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", "native"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    ran = re.search(r"(\d+) passed", done.stdout)
    assert ran is not None
    assert int(ran[1]) > 150


def run_the_real_form(real: str, emulated: str, traps: str) -> None:
    """In a process of its own: whatever instruction the processor lacks is emulated when it is met."""
    libraries = []
    for path in (real, emulated):
        libraries.append(Library(kernel.LIBRARY.module, kernel.LIBRARY.sources, kernel.LIBRARY.functions, lambda: None))
        libraries[-1].adopt(Path(path))
    refused, handler = amx.refusal(), ctypes.CDLL(traps)
    if refused is not None:
        handler.install()
    for sizes, pattern, options in CASES:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results = [both_ways(Native(x), drawn(*sizes), pattern=pattern, **options) for x in libraries]
            same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
            # The processor's own sums may round otherwise than its manual says; no emulation does.
            assert same or refused is None, f"{sizes} {pattern}"
    assert check(Native(libraries[0])) is None
    assert refused is None or handler.instructions() > 1000
    print("it runs", "emulated" if refused else "on AMX")


@pytest.mark.slow
@pytest.mark.skipif(platform.system() != "Linux" or platform.machine() != "x86_64", reason="signals of x86-64 Linux")
def test_the_real_form_runs(tmp_path: Path) -> None:
    """Its machine code, instruction by instruction on a processor without AMX, equals the emulated form bit for bit."""
    kinds: dict[str, tuple[list[str], Path]] = {
        "real": ([*AMX.flags, "-mno-avx512bf16"], NATIVE),  # conversions to bf16 are not emulated
        "emulated": ([*EMULATED.flags, "-O1"], NATIVE),
        "traps": (["-O1"], Path(__file__).with_name("amx_traps.cpp")),
    }
    paths = [str(tmp_path / f"{name}.so") for name in kinds]
    for path, (flags, source) in zip(paths, kinds.values(), strict=True):
        assert compiled(Path(path), *flags, source=source) == ""
    folders = [ROOT / "src", ROOT / "tests", ROOT / "tests" / "ops"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders)), "PHYLON_NATIVE": "0"}
    code = f"import test_attention_amx as t; t.run_the_real_form(*{paths})"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "it runs" in done.stdout


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["products", "whole"])
def test_the_real_form_has_the_instructions(whole: bool, tmp_path: Path) -> None:
    """What not every machine can run: it compiles, and the machine code multiplies and converts in hardware."""
    if platform.machine() != "x86_64" or shutil.which("objdump") is None:
        pytest.skip("AMX is x86-64's, and objdump shows the code")
    part = tmp_path / "part.cpp"
    part.write_text(PART)
    complaint = compiled(tmp_path / "real.so", *REAL, *([] if whole else ["-O1"]), source=NATIVE if whole else part)
    if "unrecognized command-line option" in complaint or "unknown argument" in complaint:
        pytest.skip("this compiler knows no AMX (gcc 11 and later do)")
    assert complaint == ""
    code = subprocess.run(["objdump", "-d", str(tmp_path / "real.so")], capture_output=True, text=True).stdout
    for name in ("ldtilecfg", "tileloadd", "tilezero", "tdpbf16ps", "tilestored", "tilerelease", "vcvtne2ps2bf16"):
        assert name in code, name


@pytest.mark.parametrize(
    ("features", "reason"),
    [
        ({"avx512f"}, "this processor lacks amx_tile"),
        ({"avx512f", "amx_tile"}, "this processor lacks amx_bf16"),
        ({"amx_tile", "amx_bf16"}, "this processor lacks avx512f"),
    ],
)
def test_who_gets_it(features: set[str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PHYLON_AMX", raising=False)
    monkeypatch.setattr(amx, "features", lambda: frozenset(features))
    assert amx.refusal() == reason
    monkeypatch.setenv("PHYLON_AMX", "0")
    assert amx.refusal() == "switched off by PHYLON_AMX=0"


def test_the_kernel_of_linux_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the processor says of itself, the registers are given by the kernel, or not: then in f32."""
    monkeypatch.delenv("PHYLON_AMX", raising=False)
    has = amx.refusal() is None
    monkeypatch.setattr(amx, "features", lambda: frozenset({"amx_tile", "amx_bf16", "avx512f"}))
    amx._refused.cache_clear()
    reason = amx.refusal()
    assert (reason is None) == has
    assert has or reason is not None
    assert has or re.match(r"the kernel does not give its registers: \w|only Linux on x86-64", str(reason))


def made(monkeypatch: pytest.MonkeyPatch) -> Library:
    """The kernel's library, before anything is looked for."""
    monkeypatch.setattr(library, "LIBRARIES", {})
    old = kernel.LIBRARY
    return Library(old.module, old.sources, old.functions, old.check, forms=old.forms)


def test_choice_and_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each form has a file of its own, and ``explain`` says which it is and why."""
    monkeypatch.setenv("PHYLON_AMX", "0")
    plain = made(monkeypatch)
    assert plain.form == PLAIN
    files = [plain.path]
    assert Native(plain).note() == "bf16 products: f32 (AMX: switched off by PHYLON_AMX=0)"
    monkeypatch.setenv("PHYLON_AMX", "emulated")
    other = made(monkeypatch)
    assert (other.form, other.label) == (EMULATED, "attention (emulated AMX)")
    assert Native(other).note() == "bf16 products: emulated AMX"
    files.append(other.path)
    monkeypatch.delenv("PHYLON_AMX")
    monkeypatch.setattr(amx, "features", lambda: frozenset(amx._NEEDED))
    monkeypatch.setattr(amx, "_refused", lambda: None)
    real = made(monkeypatch)
    assert real.form == AMX
    assert Native(real).note() == "bf16 products: AMX"
    assert len({*files, real.path}) == 3
    x = torch.zeros(1, 1, 1, 1)
    assert (
        next(line for line in explain(x, x, x) if line.backend == "native").note == dispatch.backends["native"].note()
    )
    assert next(line for line in explain(x, x, x) if line.backend == "sdpa").note is None


def test_an_unfit_form_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A compiler without the flags, a wrong result, a crash: f32 is made instead, and the reason is told."""
    monkeypatch.setenv("PHYLON_CACHE", str(tmp_path))
    monkeypatch.delenv("PHYLON_AMX", raising=False)
    monkeypatch.setattr(amx, "features", lambda: frozenset(amx._NEEDED))
    monkeypatch.setattr(amx, "_refused", lambda: None)
    begun: list[str] = []

    class Process:
        def __init__(self, code: int | None) -> None:
            self.code = code

        def poll(self) -> int | None:
            return self.code

    found = made(monkeypatch)

    def make(log: Any) -> Any:
        begun.append(found.form.name)
        found.path.parent.mkdir(parents=True, exist_ok=True)
        return Process(-4 if found.form == AMX else None)  # an instruction the processor lacks

    monkeypatch.setattr(found, "_make", make)
    assert found.reason() == "being compiled beside this run"
    assert begun == ["AMX", "f32"]
    why = "its check against the reference crashed (SIGILL)"
    assert Native(found).note() == f"bf16 products: f32 (AMX: {why})"
    again = made(monkeypatch)
    monkeypatch.setattr(again, "_make", lambda log: Process(None))
    assert again.reason() == "being compiled beside this run"
    assert again.against(AMX) == why, "the next process does not try it"
