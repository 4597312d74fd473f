"""Compiling beside the run: ready, being made, no compiler, does not compile, wrong, crashing; all in one line."""

import ctypes
import os
import sys
from pathlib import Path

import pytest

from phylon.ops.native import library as module
from phylon.ops.native import ready

GOOD = 'extern "C" void twice(float* x, long n) { for (long i = 0; i < n; ++i) x[i] *= 2; }\n'
MODULE = """
from pathlib import Path
from phylon.ops.native.library import Form, Library
import ctypes

def check():
    {check}

SOURCES = [Path(__file__).with_name("{name}.cpp")]
LIBRARY = Library("{name}", SOURCES, {{"twice": [ctypes.c_void_p, ctypes.c_long]}}, check, forms=[{forms}])
"""
CHECK = "x = (ctypes.c_float * 3)(1, 2, 3); LIBRARY.twice(ctypes.addressof(x), 3); return None if x[2] == 6 else 'x'"

pytestmark = pytest.mark.skipif(module.compiler() is None, reason="no C++ compiler on this machine")


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A library from a source and a check, in a cache of its own."""
    monkeypatch.setenv("PHYLON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(module, "LIBRARIES", {})
    monkeypatch.setattr(ready, "LIBRARIES", module.LIBRARIES)

    def make(name: str, source: str = GOOD, check: str = CHECK, forms: str = "Form()") -> module.Library:
        (tmp_path / f"{name}.cpp").write_text(source)
        (tmp_path / f"{name}.py").write_text(MODULE.format(name=name, check=check, forms=forms))
        found = __import__(name).LIBRARY
        del sys.modules[name]
        return found

    return make


def test_made_beside_then_used(made) -> None:
    library = made("lib_good")
    assert library.reason() == "being compiled beside this run"
    assert library.wait(60) is None
    x = (ctypes.c_float * 2)(1.5, -4)
    library.twice(ctypes.addressof(x), 2)
    assert list(x) == [3, -8]
    again = made("lib_good")
    assert again.reason() is None, "the second process finds it in the cache"


def test_the_answer_holds_until_refresh(made) -> None:
    library = made("lib_hold")
    assert library.reason() is not None
    library._process.wait(60)
    assert library.reason() == "being compiled beside this run"
    ready.refresh()
    assert library.reason() is None
    assert ready.names() == ["lib_hold"]
    ready.limit([])
    assert library.reason() == "this run began without it"
    ready.limit(None)
    assert library.reason() is None


def test_a_damaged_library_is_made_again_and_never_loaded(made) -> None:
    """Loading a truncated one ends the process, beyond any exception."""
    path = made("lib_torn").path
    assert made("lib_torn").wait(60) is None
    torn = path.with_suffix(".torn")
    torn.write_bytes(path.read_bytes()[:5000])
    torn.replace(path)  # a new file: the old one is mapped into this process
    again = made("lib_torn")
    assert again.reason() == "being compiled beside this run"
    assert again.wait(60) is None
    assert len(path.read_bytes()) > 5000


def test_a_damaged_note_is_a_reason(made) -> None:
    library = made("lib_note")
    library.failed.parent.mkdir(parents=True)
    library.failed.write_bytes(b"\xff\xfe\x80")
    assert "\n" not in library.wait(5)


def test_a_note_that_is_a_folder_is_a_reason(made) -> None:
    library = made("lib_folder")
    library.failed.mkdir(parents=True)
    reason = library.wait(5)
    assert "cannot be read: Is a directory; remove it" in reason
    assert "\n" not in reason


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        ("{tmp}/file", "Not a directory"),
        ("{tmp}/file/below", "Not a directory"),
        ("{tmp}/" + "x" * 300, "File name too long"),
        ("/proc/phylon", "No such file or directory"),
        ("~nobody-of-this-name/cache", "no such home folder"),
        ("{tmp}/closed", "Permission denied"),
    ],
)
def test_a_cache_that_keeps_nothing(
    made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chosen: str, why: str
) -> None:
    """The reason names the folder and the variable, for every form alike; the readable backends go on."""
    (tmp_path / "file").touch()
    (tmp_path / "closed").mkdir(mode=0)
    if why == "Permission denied" and os.access(tmp_path / "closed", os.W_OK):
        pytest.skip("this user may write anywhere")
    if chosen.startswith("/proc") and not Path("/proc").is_dir():
        pytest.skip("no /proc on this machine")
    chosen = chosen.format(tmp=tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHYLON_CACHE", chosen)
    library = made("lib_cache", forms='Form("odd", ("-DODD",)), Form()')
    wanted = f"'{chosen}/native' keeps no kernels: {why}; set PHYLON_CACHE to a folder that you can write to"
    assert library.wait(5) == library.reason() == wanted
    assert not list(tmp_path.glob("~*"))


def test_the_cache_may_be_told_from_home(made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PHYLON_CACHE", "~/kept")
    assert module.cache_folder() == tmp_path / "kept" / "native"
    monkeypatch.setenv("PHYLON_CACHE", "")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert module.cache_folder() == tmp_path / ".cache" / "phylon" / "native"


@pytest.mark.parametrize(
    "end",
    [
        "echo 'x.s: fatal error: No space left on device' >&2; exit 1",
        "kill -9 $$",
    ],
)
def test_what_fails_for_a_passing_reason_is_tried_again(
    made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: str
) -> None:
    words, real = tmp_path / "cxx", module.compiler()
    words.write_text(f'#!/bin/sh\nif [ -e {tmp_path}/full ]; then {end}; fi\nexec {real} "$@"\n')
    words.chmod(0o755)
    (tmp_path / "full").touch()
    monkeypatch.setenv("CXX", str(words))
    library = made("lib_full")
    assert library.wait(60).startswith("compiling it ended with code 1 (see '")
    assert not library.failed.exists()
    (tmp_path / "full").unlink()
    assert made("lib_full").wait(60) is None


def test_the_words_of_cxx(made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "  ")
    assert module.compiler() is not None
    monkeypatch.setenv("CXX", "/usr/bin/env g++")
    assert made("lib_words").wait(60) is None


def test_no_compiler(made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert made("lib_none").wait(5).startswith("no C++ compiler on this machine")


def test_does_not_compile(made) -> None:
    reason = made("lib_bad", source="int x = ;\n").wait(60)
    assert reason.startswith("it does not compile: ")
    assert "\n" not in reason
    assert made("lib_bad", source="int x = ;\n").reason() == reason, "it is not tried again"


def test_wrong_result_is_never_used(made) -> None:
    library = made("lib_wrong", source=GOOD.replace("*= 2", "*= 3"))
    assert library.wait(60) == "its check against the reference failed: x"
    assert not library.path.exists()


def test_crash_in_the_check_stays_outside(made) -> None:
    library = made("lib_crash", check="ctypes.string_at(0)")
    assert library.wait(60) == "its check against the reference crashed (SIGSEGV)"
    assert not library.path.exists()
    assert made("lib_crash", check="ctypes.string_at(0)").reason() == library.reason(), "it is not tried again"


@pytest.mark.slow
def test_forms_in_order_of_preference(made) -> None:
    """A form that does not compile, or that crashes, gives way to the next, in this process and in later ones."""
    crash = "#ifdef CRASH\nstatic int now = (__builtin_trap(), 0);\n#endif\n"
    forms = 'Form("odd", ("-fno-such-flag",)), Form("bad", ("-DCRASH",)), Form()'
    library = made("lib_forms", source=crash + GOOD, forms=forms)
    assert library.wait(60) is None
    odd, bad, plain = library.forms
    assert (library.form, library.label) == (plain, "lib_forms")
    assert (library.against(odd) or "").startswith("it does not compile: ")
    assert (library.against(bad) or "").startswith("its check against the reference crashed")
    again = made("lib_forms", source=crash + GOOD, forms=forms)
    assert again.reason() is None
    assert (again.form, again.against(bad)) == (plain, library.against(bad))


def test_switched_off(made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHYLON_NATIVE", "0")
    assert made("lib_off").wait(5) == "switched off by PHYLON_NATIVE=0"
