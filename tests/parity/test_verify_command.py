"""`phylon verify`: a table, JSON, exit code 1 for a failing cell, and `transformers` as the reference."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from phylon.checkpoint import open_safetensors, write_safetensors
from phylon.cli.main import app
from phylon.families import family
from phylon.hub import save
from phylon.hub.save import save_gguf
from phylon.spec import UserError

from .harness import drawn


@pytest.fixture
def folder(tmp_path):
    return str(save(drawn(family("llama").cases()[0]), tmp_path / "a", format="hf"))


def run(*args: str):
    return CliRunner().invoke(app, ["verify", *args])


def test_passes(folder):
    done = run(folder)
    assert done.exit_code == 0, done.output
    lines = [line.split()[:2] for line in done.output.splitlines()]
    assert ["chunks", "ok"] in lines
    assert ["reference:heads.lm.logits", "ok"] in lines
    data = json.loads(run(folder, "--json", "--length", "9").stdout)
    assert data["passed"] is True
    assert data["lengths"][0] == 9
    assert {cell["name"] for cell in data["cells"]} >= {"chunks", "left_padding", "packing", "control_history"}


def test_a_failing_cell_exits_with_1(folder):
    """Attention that adds nothing: the controls fail, and say what they wanted."""
    source = open_safetensors(folder)
    tensors = {name: source.read(name) * ("o_proj" not in name) for name in source.tensors}
    write_safetensors(Path(folder) / "model.safetensors", tensors)
    done = run(folder, "--json")
    assert done.exit_code == 1
    failing = [cell["name"] for cell in json.loads(done.stdout)["cells"] if cell["passed"] is False]
    assert failing == ["control_history", "control_state"]
    assert torch.isfinite(tensors["model.norm.weight"]).all()


def test_bad_input(folder, tmp_path):
    gguf = save_gguf(drawn(family("llama").cases()[0]), tmp_path / "a.gguf")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "lacks.py").write_text("import no_such_package_at_all")
    for args, words in (
        ((folder, "--reference", "none.py"), "there is none"),
        ((str(gguf), "--reference", "transformers"), "Hugging Face folders"),
        ((folder, "--reference", str(tmp_path / "empty.py")), "defines no function"),
        ((folder, "--reference", str(tmp_path / "lacks.py")), "no_such_package_at_all"),
        ((folder, "--length", "2"), "6 tokens"),
    ):
        done = run(*args)
        assert done.exit_code in (1, 2)
        assert words in str(done.exception) + done.output


BROKEN = {
    "def reference(": "fails: SyntaxError",
    "1 / 0": "fails: ZeroDivisionError",
    "import sys; sys.exit(0)": "fails: SystemExit",
    "def reference(): pass": "fails: TypeError",
    "def reference(folder): return None": "must give a function, it gave NoneType",
    "def reference(folder): return lambda **k: {}": "it gives no value",
    "def reference(folder): return lambda **k: {}['x']": "it fails: KeyError",
    "def reference(folder): return lambda **k: [1]": "it fails: TypeError",
    "def reference(folder): return lambda **k: {'decoder.embed': 3}": "'decoder.embed' is no tensor but int",
}


@pytest.mark.parametrize("source", BROKEN)
def test_a_reference_that_compares_nothing_is_no_proof(folder, tmp_path, source):
    """Whoever names a reference by hand wants it compared."""
    (tmp_path / "own.py").write_text(source)
    done = run(folder, "--reference", str(tmp_path / "own.py"))
    assert done.exit_code != 0
    assert BROKEN[source] in str(done.exception) + done.output
    assert done.exception is None or isinstance(done.exception, UserError | SystemExit)


LEAKY = '''
from phylon.layers.part import Linear, Part
from phylon.spec.base import FeedForward, Mechanism
from phylon.spec.registry import register


class Leaky(Mechanism, FeedForward, frozen=True, kw_only=True):
    """A linear map of what a token has beyond the mean of the batch."""


class LeakyModule(Part):
    def __init__(self, spec, d_model):
        super().__init__()
        self.proj = Linear(d_model, d_model, bias=False)

    def forward(self, x, ctx):
        return self.proj(x - x.mean(0, keepdim=True) / 2)


register(Leaky, module=LeakyModule, paper="none", cases=lambda: [Leaky()], flops=lambda s, width, n: 2 * width**2)
'''
BUILDS = """
import sys
from phylon.cli.extend import import_files
from phylon.cli.main import main
from phylon import build, override, save
from phylon.families import family
file, folder = sys.argv[1:]
import_files([file])
spec = override(family("llama").cases()[0], {"decoder.blocks.1.ffn": {"kind": "leaky"}})
save(build(spec, seed=0, device="cpu"), folder)
"""


@pytest.mark.slow
def test_a_mechanism_of_the_users_that_breaks_the_law(tmp_path):
    """``--import`` brings it into the command; the cells that fail are those of neighbours in the batch."""
    (tmp_path / "leaky.py").write_text(LEAKY)
    model, file = str(tmp_path / "model"), str(tmp_path / "leaky.py")
    subprocess.run([sys.executable, "-c", BUILDS, file, model], check=True)
    command = [sys.executable, "-m", "phylon", "verify", model, "--json"]
    done = subprocess.run([*command, "--import", file], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    failing = {cell["name"] for cell in json.loads(done.stdout)["cells"] if cell["passed"] is False}
    assert failing >= {"batching", "left_padding", "right_padding"}
    assert not failing & {"chunks", "steps", "control_history"}
    without = subprocess.run(command, capture_output=True, text=True, check=False)
    assert without.returncode == 2
    assert "leaky" in without.stderr


def test_the_reference_is_never_sought_on_the_net(folder, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert run(folder).exit_code == 0
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    monkeypatch.delenv("HF_HUB_OFFLINE")
