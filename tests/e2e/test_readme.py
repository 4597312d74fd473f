"""The README's examples, run as they stand; the Chinese README has the same ones."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from phylon.hub import KNOWN

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def blocks(readme: str, language: str) -> list[str]:
    return [code for kind, code in BLOCK.findall((ROOT / readme).read_text("utf-8")) if kind == language]


def shell_lines() -> list[str]:
    return [line for block in blocks("README.md", "sh") for line in block.splitlines() if line]


def test_both_readmes_show_the_same_code() -> None:
    for language in ("sh", "python"):
        assert blocks("README.md", language) == blocks("README.zh.md", language) != []


def test_the_python_examples(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for code in blocks("README.md", "python"):
        exec(compile(code, "README.md", "exec"), names)
    assert int(capsys.readouterr().out) > 0


def test_what_the_readme_installs_is_what_the_error_names() -> None:
    installs = [line for line in shell_lines() if line.startswith("pip ")]
    assert installs == [KNOWN["smollm2"].install]


@pytest.mark.slow
def test_the_commands(tmp_path: Path) -> None:
    """In order, in one folder: later ones use what earlier ones wrote."""
    environment = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT / "src")}
    for line in shell_lines():
        if line.startswith("pip "):
            continue
        if "smollm2" in line and importlib.util.find_spec(KNOWN["smollm2"].package) is None:
            continue
        command = [sys.executable, "-c", "from phylon.cli.main import main; main()", *line.split()[1:]]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            input="What is the capital of France?\n",
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"{line}: {done.stderr[-800:]}"
        assert done.stdout.strip() or line.startswith("phylon train"), line
        if line.startswith("phylon chat"):
            assert "The capital of France is Paris." in done.stdout
