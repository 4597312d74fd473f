"""Case 36: a damaged file loads or is refused in one line, whatever the damage, and never takes memory of its own."""

import json
import random
import resource
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from phylon.checkpoint import open_gguf, open_safetensors, write_gguf, write_safetensors
from phylon.spec.errors import UserError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")


@contextmanager
def little_memory(room: int = 24 << 20):
    """No more than ``room`` bytes of new address space: a larger allocation fails, and so does the test."""
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def damaged(whole: bytes, rng: random.Random, head: int) -> bytes:
    """One to three changes, mostly in the first ``head`` bytes: a byte, a number, a cut, a removed or doubled span."""
    data = bytearray(whole)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(min(head, len(data)) if rng.random() < 0.9 else len(data))
        kind = rng.randrange(6)
        if kind < 2:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[at] = rng.choice(b'\x00\xff\x7f0123456789{}[],":\\')
        elif kind == 3:
            number = rng.choice((0, 1, (1 << 64) - 1, 1 << 60, 1 << 31, rng.getrandbits(64)))
            data[at : at + 8] = number.to_bytes(8, "little")
        elif kind == 4:
            del data[at : at + rng.choice((1, 4, 8, 1 << 20))]
        else:
            data[at:at] = data[at : at + rng.randint(1, 40)]
        if not data:
            break
    return bytes(data)


def load_or_refuse(opener: Callable, path: Path, seen: dict[str, int]) -> None:
    message = ""
    try:
        source = opener(path)
        for name, info in source.tensors.items():
            assert tuple(source.read(name).shape) == info.shape
    except UserError as error:
        message = str(error)
    assert message.isprintable()
    seen["refused" if message else "loaded"] += 1


def run(opener: Callable, path: Path, head: int, count: int) -> None:
    whole, rng, seen = path.read_bytes(), random.Random(0), {"loaded": 0, "refused": 0}
    with little_memory():
        for _ in range(count):
            path.write_bytes(damaged(whole, rng, head))
            load_or_refuse(opener, path, seen)
    assert seen["refused"] > count // 3
    assert seen["loaded"] > 0


def test_safetensors(tmp_path):
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a.weight": torch.randn(3, 4), "b": torch.ones(5).half(), "c": torch.arange(3)})
    run(open_safetensors, path, 8 + int.from_bytes(path.read_bytes()[:8], "little"), 700)


def test_gguf(tmp_path):
    path = tmp_path / "x.gguf"
    metadata = {"general.architecture": "llama", "tokens": ["a", "bc", ""], "types": [1, 2], "eps": 1e-5, "yes": True}
    tensors = {"a.weight": torch.randn(3, 64), "q.weight": torch.randn(2, 32), "n": torch.ones(4)}
    write_gguf(path, metadata, tensors, lambda name, shape: {"a.weight": "Q4_1", "q.weight": "Q8_0"}.get(name, "F32"))
    run(open_gguf, path, len(path.read_bytes()) - 300, 700)


def test_index(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", {f"x{k}": torch.ones(4) for k in range(4)}, max_shard_bytes=32)
    index = tmp_path / "model.safetensors.index.json"
    assert len(json.loads(index.read_text())["weight_map"]) == 4
    run(open_safetensors, index, 1 << 20, 300)


def test_the_limit_catches_an_allocation():
    with little_memory(), pytest.raises((RuntimeError, MemoryError)):
        torch.ones(16 << 20)
