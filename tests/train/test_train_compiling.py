"""A run with ``run.compile``: the compiler is heard beside the run, and where it fails the run goes on without."""

import logging
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from phylon.train.compiling import compiler_log

SOURCE = str(Path(__file__).resolve().parents[2] / "src")
INSIDE = os.path.join(os.path.dirname(torch.__file__), "_dynamo", "variables.py")


def test_the_compilers_warnings_go_beside_the_run(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    logger = logging.getLogger("torch._dynamo.convert_frame")
    with warnings.catch_warnings(record=True) as others, compiler_log(tmp_path):
        warnings.simplefilter("always")
        logger.warning("torch._dynamo hit config.%s", "recompile_limit")
        warnings.warn_explicit("Dynamo detected a wrapped function", UserWarning, INSIDE, 1)
        warnings.warn("of the user's own", stacklevel=1)
    said = (tmp_path / "compiler.log").read_text()
    assert said == "torch._dynamo hit config.recompile_limit\nUserWarning: Dynamo detected a wrapped function\n"
    assert capfd.readouterr().err.count("recompile_limit") == 0
    assert [str(found.message) for found in others] == ["of the user's own"]
    with warnings.catch_warnings(record=True) as after:
        warnings.simplefilter("always")
        warnings.warn_explicit("Dynamo detected a wrapped function", UserWarning, INSIDE, 1)
    assert len(after) == 1, "outside of a run nothing is kept back"


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [True, False])
def test_a_run_is_compiled_or_goes_on_without_with_one_reason(tmp_path, compiler):
    """Without a C++ compiler on PATH the run is the plain one. Evaluations, of other lengths, are not compiled."""
    if compiler and shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler here")
    empty = tmp_path / "bin"
    empty.mkdir()
    own = {"PYTHONPATH": SOURCE, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    path = os.environ["PATH"] if compiler else str(empty)
    command = [sys.executable, "-m", "phylon", "train", "tinygpt", "--out", str(tmp_path / "run"), "--device", "cpu"]
    sets = ["--set", "run.compile=blocks", "--set", "run.steps=3"]
    environment = {name: value for name, value in os.environ.items() if name not in ("CXX", "TORCH_LOGS")}
    done = subprocess.run([*command, *sets], env=environment | own | {"PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reasons = [line for line in done.stderr.splitlines() if "torch.compile" in line]
    assert len(reasons) == (0 if compiler else 1), reasons
    assert compiler or reasons[0].startswith("torch.compile does not work here, going on without: ")
    assert "C++ compiler" in "".join(reasons) or compiler
    for word in ("Warning", "[rank", "W1", "_dynamo/"):
        assert word not in done.stderr
