"""Before a compiled library is used: every kernel of each is checked in every dtype, and a wrong one is found."""

import ctypes
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from phylon.ops import norm, rotary
from phylon.ops.attention import native as attention
from phylon.ops.native import library as module
from phylon.ops.native import make
from phylon.ops.native.library import LIBRARIES, Library
from phylon.ops.norm.call import NormCall
from phylon.ops.rows import check as rows_check
from phylon.ops.rows import native as rows
from phylon.ops.scan import check as scan_check
from phylon.ops.scan import native as scan
from phylon.ops.scan.ssd import check as ssd_check
from phylon.ops.scan.ssd import native as ssd

native = pytest.mark.skipif(
    any(library.reason() is not None for library in (rows.LIBRARY, scan.LIBRARY, ssd.LIBRARY, attention.LIBRARY)),
    reason="not all libraries are there",
)
LOW = (0, 1)


class Kernel(NamedTuple):
    """``way`` tells of a call's arguments in which dtypes it runs, ``ways`` which there are; ``results`` the addresses
    that it writes to, by name."""

    way: Callable[..., Any]
    ways: tuple[Any, ...]
    results: Callable[..., dict[str, int | None]]


def at(**places: int) -> Callable[..., dict[str, int | None]]:
    return lambda *args: {name: args[i] for name, i in places.items()}


def fields(place: int, *names: str) -> Callable[..., dict[str, int | None]]:
    """Of a structure that holds addresses, or structures that do."""

    def found(*args: Any) -> dict[str, int | None]:
        values = {name: getattr(args[place]._obj, name) for name in names}
        return {name: getattr(value, "data", value) for name, value in values.items()}

    return found


def views(*places: int) -> Callable[..., dict[str, int | None]]:
    return lambda *args: {str(i): getattr(args[i], "_obj", args[i]).data for i in places}


def packed(**places: int) -> Callable[..., dict[str, int | None]]:
    return lambda call, _: {name: attention._LAYOUT.unpack(call)[i] or None for name, i in places.items()}


def first(*args: Any) -> Any:
    return args[0]


def two(*args: Any) -> Any:
    return args[:2]


def half_of(name: str) -> Callable[..., Any]:
    return lambda *args: getattr(args[0]._obj, name).half


KINDS = tuple(product(rows.KINDS.values(), LOW))
KERNELS: dict[str, Kernel] = {
    "rows_norm": Kernel(
        first,
        (0, 2, 5, 7),
        lambda *a: {"total": a[5] if a[2] else None, "y": a[6], "mean": a[7], "rstd": a[8]},
    ),
    "rows_norm_backward": Kernel(first, (0, 5), at(dx=7, dw=9, db=10)),
    "rows_activation": Kernel(two, KINDS, at(y=6)),
    "rows_activation_backward": Kernel(two, KINDS, at(dx=7, dup=8, y=9, db=11, dub=12)),
    "rows_sum": Kernel(first, LOW, at(out=3)),
    "rows_cross_entropy": Kernel(lambda *a: a[-1], LOW, lambda *a: {"losses": a[4], "scores": a[0] if a[-1] else None}),
    "rows_adamw": Kernel(lambda *a: (a[0], a[2] is not None), tuple(product(LOW, LOW)), at(w=1, copy=2, m=4, v=5)),
    "rows_square_sum": Kernel(first, LOW, lambda *a: {}),
    "rows_gather": Kernel(first, LOW, at(y=3)),
    "rows_combine": Kernel(first, (0, 2, 3), at(y=4)),
    "rows_combine_backward": Kernel(first, (0, 2, 3), at(dx=5, dgates=6)),
    "rows_rotary": Kernel(first, LOW, at(y=4)),
    "scan_starts": Kernel(lambda *a: 0, (0,), lambda *a: {}),
    "scan_forward": Kernel(half_of("x"), LOW, lambda *a: {"y": a[1]._obj.data, "h": a[2]}),
    "scan_backward": Kernel(half_of("x"), LOW, fields(1, "x", "dt", "B", "C", "A", "D", "h0")),
    "ssd_starts": Kernel(lambda *a: 0, (0,), lambda *a: {}),
    "ssd_forward": Kernel(half_of("x"), LOW, lambda *a: {"y": a[1]._obj.data, "h": a[2]}),
    "ssd_backward": Kernel(half_of("x"), LOW, fields(1, "x", "dt", "B", "C", "A", "D", "h0")),
    "conv_forward": Kernel(half_of("x"), LOW, lambda *a: {"y": a[1]._obj.data, "last": a[2]._obj.data}),
    "conv_backward": Kernel(half_of("x"), LOW, fields(1, "x", "tail", "weight", "bias")),
    "mamba_step": Kernel(lambda s: s._obj.x_half, LOW, fields(0, "y", "new_tail", "new_h")),
    "attention_forward": Kernel(lambda call, dtype: dtype, LOW, packed(out=20, lse=24)),
    "attention_few": Kernel(lambda call, dtype: dtype, LOW, packed(out=20)),
    "attention_backward": Kernel(lambda call, dtype: dtype, LOW, packed(dq=29, dk=33, dv=37, d_sink=43, d_bias=45)),
}
ALL = [(library, name) for library in LIBRARIES.values() for name in library.functions]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Callable[[Library, str], None]:
    """Leaves of a library's check what concerns one kernel."""

    def only(library: Library, name: str) -> None:
        monkeypatch.setattr(library, "functions", {name: library.functions[name]})
        for table in (rows_check, scan_check, ssd_check):
            if name in table.CHECKS:
                monkeypatch.setattr(table, "CHECKS", {name: table.CHECKS[name]})

    return only


def calls(library: Library, name: str, monkeypatch: pytest.MonkeyPatch, spoil: Callable[..., Any]) -> None:
    """``spoil`` gets the result and the arguments of every call of a kernel, and gives its result."""
    real = getattr(library, name)
    monkeypatch.setitem(library.__dict__, name, lambda *args: spoil(real(*args), *args))


def test_every_kernel_is_known_here() -> None:
    assert {name for _, name in ALL} == KERNELS.keys()
    assert rows_check.CHECKS.keys() == rows.LIBRARY.functions.keys()
    assert scan_check.CHECKS.keys() == scan.LIBRARY.functions.keys()
    assert ssd_check.CHECKS.keys() == ssd.LIBRARY.functions.keys()


@native
@pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)
def test_every_kernel_is_checked_in_every_dtype(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[Any]] = {name: set() for name in library.functions}
    for name in library.functions:

        def spy(result: Any, *args: Any, name: str = name) -> Any:
            seen[name].add(KERNELS[name].way(*args))
            return result

        calls(library, name, monkeypatch, spy)
    assert library.check() is None
    assert seen == {name: set(KERNELS[name].ways) for name in library.functions}


PLANTED = [
    pytest.param(library, name, way, id=f"{name}-{way}", marks=[pytest.mark.slow] * (way in KINDS[4:]))
    for library, name in ALL
    for way in KERNELS[name].ways
    if library is not attention.LIBRARY and name not in ("scan_starts", "ssd_starts")
]


@native
@pytest.mark.parametrize(("library", "name", "way"), PLANTED)
def test_a_wrong_result_is_found_wherever_it_is(
    library: Library, name: str, way: Any, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One number of one result, in one dtype."""
    alone(library, name)
    kernel, results = KERNELS[name], {"what is returned"}

    def look(result: Any, *args: Any) -> Any:
        if kernel.way(*args) == way:
            results.update(what for what, address in kernel.results(*args).items() if address)
        return result

    calls(library, name, monkeypatch, look)
    assert library.check() is None
    if library.returns.get(name) is None:
        results.remove("what is returned")
    assert results
    for what in sorted(results):

        def spoil(result: Any, *args: Any, what: str = what) -> Any:
            if kernel.way(*args) != way:
                return result
            address = kernel.results(*args).get(what)
            if address:  # two bytes that are a large number in bf16, and in fp32 with whatever was below them
                ctypes.memset(address, 0x47, 4)
            return result if result is None else 1.01 * result

        monkeypatch.delitem(library.__dict__, name)
        calls(library, name, monkeypatch, spoil)
        reason = library.check()
        assert reason is not None, what
        assert "is off by" in reason
        assert "\n" not in reason


@native
@pytest.mark.parametrize("name", list(attention.LIBRARY.functions))
@pytest.mark.parametrize("way", LOW)
def test_a_wrong_result_of_attention_is_found(name: str, way: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from phylon.ops.attention import native_check

    small = [c for dtype in (torch.float32, torch.bfloat16) for c in [*native_check._calls(dtype)][-1:]]
    monkeypatch.setattr(native_check, "_calls", lambda dtype: [c for c in small if c.q.dtype is dtype])
    kernel = KERNELS[name]
    names = {"out", "lse"} if name == "attention_forward" else {"out"}
    names = {"dq", "dk", "dv", "d_sink", "d_bias"} if name == "attention_backward" else names
    for what in sorted(names):

        def spoil(result: Any, *args: Any, what: str = what) -> Any:
            address = kernel.results(*args)[what]
            if kernel.way(*args) == way and address:  # one row's sum leaves one row's gradient out, and bf16 is coarse
                ctypes.memset(address, 0x47, 400 if what == "lse" else 4)
            return result

        calls(attention.LIBRARY, name, monkeypatch, spoil)
        reason = attention.LIBRARY.check()
        assert reason is not None, what
        assert "off by" in reason
        monkeypatch.delitem(attention.LIBRARY.__dict__, name)


@native
def test_a_kernel_without_a_check_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in (rows.LIBRARY, scan.LIBRARY, ssd.LIBRARY):
        monkeypatch.setattr(library, "functions", library.functions | {"a_new_one": []})
        assert library.check() == "nothing checks a_new_one"


@pytest.mark.slow
@pytest.mark.skipif(module.compiler() is None, reason="no C++ compiler on this machine")
def test_a_wrong_source_is_one_reason_and_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sign of the rotation, as compiled: all ops over this library say why they do without it."""
    for source in rows.LIBRARY.sources:
        text = source.read_text()
        if source.name == "rotary.h":
            assert "second * co + first * si" in text
            text = text.replace("second * co + first * si", "second * co - first * si")
        (tmp_path / source.name).write_text(text)
    monkeypatch.setenv("PHYLON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "LIBRARIES", {})
    sources = [tmp_path / source.name for source in rows.LIBRARY.sources]
    library = Library(rows.__name__, sources, rows.LIBRARY.functions, rows_check.check, rows.LIBRARY.returns)
    monkeypatch.setattr(rows, "LIBRARY", library)
    library.path.parent.mkdir(parents=True)
    reason = make.make(library)
    assert reason is not None
    assert reason.startswith("its check against the reference failed: a rotation in float32 is off by")
    fresh = Library(rows.__name__, sources, rows.LIBRARY.functions, rows_check.check, rows.LIBRARY.returns)
    monkeypatch.setattr(rows, "LIBRARY", fresh)
    assert not fresh.path.exists()
    x = torch.randn(64, 256)
    call = NormCall(x=x, added=None, weight=None, bias=None, eps=1e-5, centred=False)
    told = {line.backend: line for line in norm.dispatch.explain(call)}
    assert (told["native"].chosen, told["native"].reason) == (False, reason)
    assert rotary.dispatch.backends["native"].available() == reason
