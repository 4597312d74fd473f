"""Case 12: loading takes at most 1.1 times the final size plus one tensor of anonymous memory."""

import sys

import pytest
import torch

from phylon.checkpoint import write_gguf, write_safetensors

from .memory import peak_anonymous_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")

COUNT, ROWS, WIDTH = 24, 2048, 1024  # 8.4 MB of float32 each, 201 MB together
ONE = ROWS * WIDTH * 4

SETUP = """
import torch
from phylon.checkpoint import *
torch.ones(1 << 16).bfloat16().float().t().contiguous()
"""
LOAD = """
source = {opener}({path!r})
layout = Layout([
    Concat("h.{{i}}.qkv.weight", ("q.{{i}}.weight", "k.{{i}}.weight"), (1536, 512)),
    Transpose("h.{{i}}.up.weight", "up.{{i}}.weight"),
    PermuteRotary("h.{{i}}.rot.weight", "rot.{{i}}.weight", 16, 128),
    Rename("h.{{i}}.down.weight", "down.{{i}}.weight"),
])
shapes = {{}}
for i in range(6):
    shapes |= {{f"q.{{i}}.weight": (1536, 1024), f"k.{{i}}.weight": (512, 1024)}}
    shapes |= {{f"{{n}}.{{i}}.weight": (2048, 1024) for n in ("rot", "down")}} | {{f"up.{{i}}.weight": (1024, 2048)}}
plan = layout.plan(source.tensors, shapes)
params = {{name: torch.empty(shape, dtype=torch.{dtype}) for name, shape in shapes.items()}}
layout.load(plan, source, params)
"""


def _tensors():
    torch.manual_seed(0)
    return {
        f"h.{i}.{n}.weight": torch.randn(ROWS, WIDTH) for i in range(COUNT // 4) for n in ("qkv", "up", "rot", "down")
    }


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_safetensors(tmp_path, dtype):
    path = tmp_path / "model.safetensors"
    write_safetensors(path, _tensors())
    peak = peak_anonymous_bytes(SETUP, LOAD.format(opener="open_safetensors", path=str(path), dtype=dtype))
    final = COUNT * ROWS * WIDTH * getattr(torch, dtype).itemsize
    assert 0.9 * final < peak <= 1.1 * final + ONE


@pytest.mark.parametrize("quant", ["Q8_0", pytest.param("F32", marks=pytest.mark.slow)])
def test_gguf(tmp_path, quant):
    path = tmp_path / "model.gguf"
    write_gguf(path, {"general.architecture": "test"}, _tensors(), quant)
    peak = peak_anonymous_bytes(SETUP, LOAD.format(opener="open_gguf", path=str(path), dtype="bfloat16"))
    final = COUNT * ROWS * WIDTH * 2
    assert 0.9 * final < peak <= 1.1 * final + ONE


def test_the_measure_sees_a_second_copy():
    body = "a = torch.ones(1 << 24)\nb = a.clone()\ntime.sleep(0.05)\ndel b"
    assert peak_anonymous_bytes(SETUP, body) >= 2 * 4 << 24
