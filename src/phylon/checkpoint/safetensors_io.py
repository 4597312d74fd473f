"""Safetensors: a header that is checked before anything is allocated, data through a memory map, sharded or not.

Format: 8 bytes little-endian header length, a JSON object ``name -> {dtype, shape, data_offsets}``, the data without
gaps (https://github.com/huggingface/safetensors#format).
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from phylon.checkpoint.files import MappedFile, finish, quoted, write_tensor, written_beside
from phylon.checkpoint.source import DTYPE_NAMES, DTYPES, TensorInfo, TensorSource, is_possible_shape
from phylon.spec.errors import UserError
from phylon.spec.files import there

INDEX_SUFFIX = ".index.json"
MAX_HEADER = 100_000_000  # the format's own limit
PLAIN_NAME = re.compile(r"(?!\.)[\w.+ -]{1,200}")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def open_safetensors(path: str | Path) -> TensorSource:
    """Open a ``.safetensors`` file, an index file, or a folder that holds one of them.

    Every header is checked here: sizes, dtypes, offsets without overlap or gap, duplicate names; with an index, that it
    and its shards name exactly the same tensors.

    Raises:
        UserError: there is no such checkpoint, it is damaged, or it is a pickle (which is never loaded).
    """
    path = Path(path)
    if path.is_dir():
        path = _find(path)
    if path.name.endswith(INDEX_SUFFIX):
        return _open_sharded(path)
    _refuse_pickle(path)
    file = MappedFile(path)
    tensors, spans, metadata = _checked_header(file)
    return SafetensorsSource(tensors, {name: (file, start) for name, start in spans.items()}, metadata)


class SafetensorsSource:
    """Tensors of one or more mapped safetensors files."""

    def __init__(
        self, tensors: dict[str, TensorInfo], places: dict[str, tuple[MappedFile, int]], metadata: dict[str, str]
    ):
        self.tensors: Mapping[str, TensorInfo] = tensors
        self.metadata: Mapping[str, Any] = metadata
        self._places = places

    def read(self, name: str) -> torch.Tensor:
        info, (file, start) = self.tensors[name], self._places[name]
        return file.tensor(start, info.nbytes, DTYPES[info.dtype], info.shape)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        stored = self.read(name)
        assert out.shape == stored.shape, (name, out.shape, stored.shape)
        out.detach().copy_(stored)


def _find(folder: Path) -> Path:
    """The checkpoint file of a folder: the single file, else the index, else the only ``*.safetensors`` there."""
    for name in ("model.safetensors", "model.safetensors" + INDEX_SUFFIX):
        if there(folder / name):
            return folder / name
    indexes = sorted(folder.glob("*.safetensors" + INDEX_SUFFIX))
    files = sorted(folder.glob("*.safetensors"))
    if len(indexes) == 1:
        return indexes[0]
    if len(files) == 1:
        return files[0]
    if files:
        raise UserError(f"{folder} holds {len(files)} safetensors files and no model.safetensors{INDEX_SUFFIX}")
    for file in sorted(folder.iterdir()):
        _refuse_pickle(file)
    raise UserError(f"{folder} holds no safetensors file: it is not a checkpoint folder")


def _refuse_pickle(path: Path) -> None:
    if path.suffix.lower() in PICKLES:
        raise UserError(f"{path} is a pickle, which can run code and is not loaded: convert it to safetensors first")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {quoted(twice)} appears twice")
    return found


def _json_object(path: Path, text: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text.decode(), object_pairs_hook=_object)
    except RecursionError:
        raise UserError(f"{path}: the {what} is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{path}: the {what} is not valid JSON: {str(error).splitlines()[0][:120]}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: the {what} is not a JSON object")
    return value


def _checked_header(file: MappedFile) -> tuple[dict[str, TensorInfo], dict[str, int], dict[str, str]]:
    """The tensors, where their data starts in the file, and the metadata; refuses whatever does not add up."""
    length = int.from_bytes(file.bytes[:8], "little")
    if file.size < 8 or bytes(file.bytes[8:9]) != b"{":
        raise UserError(f"{file.path} is not a safetensors file")
    if length > file.size - 8:
        raise UserError(f"{file.path} is truncated: its header says {length} bytes and the file has {file.size}")
    if length > MAX_HEADER:
        raise UserError(f"{file.path}: a header of {length} bytes is above the format's limit of {MAX_HEADER}")
    header = _json_object(file.path, bytes(file.bytes[8 : 8 + length]), "header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise UserError(f"{file.path}: __metadata__ must map strings to strings")
    base, room = 8 + length, file.size - 8 - length
    entries = [_checked_entry(file.path, name, entry) for name, entry in header.items()]
    end, previous = 0, ""
    for info, start in sorted(entries, key=lambda entry: (entry[1], entry[0].nbytes)):
        if start != end:
            kind = "overlaps" if start < end else "leaves a gap after"
            place = f"tensor {quoted(previous)}" if previous else "the header"
            raise UserError(f"{file.path} is damaged: tensor {quoted(info.name)} {kind} {place}")
        end, previous = start + info.nbytes, info.name
    if end > room:
        raise UserError(f"{file.path} is truncated: its tensors need {end} bytes and {room} are there")
    if end < room:
        raise UserError(f"{file.path} is damaged: {room - end} bytes follow the last tensor")
    return {info.name: info for info, _ in entries}, {info.name: base + start for info, start in entries}, metadata


def _checked_entry(path: Path, name: str, entry: Any) -> tuple[TensorInfo, int]:
    where = f"{path} is damaged: tensor {quoted(name)}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise UserError(f"{where} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UserError(f"{path}: tensor {quoted(name)} has the dtype {quoted(str(dtype))}, which is not supported")
    for value, what in ((shape, "shape"), (offsets, "data_offsets")):
        if not isinstance(value, list) or any(type(number) is not int for number in value):
            raise UserError(f"{where} has a {what} that is not a list of integers")
    if not is_possible_shape(tuple(shape)):
        raise UserError(f"{where} has an impossible shape {quoted(str(shape))}")
    if len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1]:
        raise UserError(f"{where} has data_offsets that run backwards")
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise UserError(f"{where} of shape {shape} needs {nbytes} bytes and is given {offsets[1] - offsets[0]}")
    return TensorInfo(name, tuple(shape), dtype, nbytes), offsets[0]


def _open_sharded(path: Path) -> TensorSource:
    index = _json_object(path, bytes(MappedFile(path).bytes[:]), "index")
    where = index.get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(shard, str) for shard in where.values()):
        raise UserError(f"{path}: weight_map must map tensor names to shard files")
    tensors: dict[str, TensorInfo] = {}
    places: dict[str, tuple[MappedFile, int]] = {}
    metadata: dict[str, str] = {}
    for shard in sorted(set(where.values())):
        if not PLAIN_NAME.fullmatch(shard):
            raise UserError(f"{path} names the shard {quoted(shard)}, which is not a plain file name")
        _refuse_pickle(path.with_name(shard))
        if not there(path.with_name(shard)):
            raise UserError(f"{path.with_name(shard)} is missing: {path.name} names it")
        file = MappedFile(path.with_name(shard))
        found, starts, extra = _checked_header(file)
        unnamed = [name for name in found if where.get(name) != shard]
        if unnamed:
            raise UserError(
                f"{path} omits {len(unnamed)} of the {len(found)} tensors in {shard}, the first {quoted(unnamed[0])}"
            )
        tensors |= found
        places |= {name: (file, start) for name, start in starts.items()}
        metadata |= extra
    absent = [name for name in where if name not in tensors]
    if absent:
        raise UserError(f"{path} puts {quoted(absent[0])} in {where[absent[0]]}, which does not hold it")
    return SafetensorsSource({name: tensors[name] for name in where}, places, metadata)


def write_safetensors(
    path: str | Path,
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: int | None = None,
) -> list[Path]:
    """Write ``path`` (``….safetensors``), or shards and an index beside it when above ``max_shard_bytes``.

    Each file is written beside and renamed, the index last; what an earlier save of another kind left under the same
    name (a single file against an index) is removed afterwards. ``tensors`` is walked twice, first for the headers:
    give a mapping or a re-iterable to keep only one computed tensor in memory. ``metadata`` defaults to
    ``{"format": "pt"}``, which other readers ask for.

    Returns: the files written, the index last. Raises UserError where the disk is full or may not be written.
    """
    path = Path(path)
    pairs = list(tensors) if iter(tensors) is tensors else tensors
    extra = dict({"format": "pt"} if metadata is None else metadata)
    shards = _shards(pairs, max_shard_bytes)
    index = path.with_name(path.name + INDEX_SUFFIX)
    if len(shards) == 1:
        targets, stale = [path], index
    else:
        count = len(shards)
        names = [f"{path.stem}-{k + 1:05d}-of-{count:05d}{path.suffix}" for k in range(count)]
        targets, stale = [*(path.with_name(name) for name in names), index], path
    with written_beside(*targets) as temporary:
        walk = iter(_items(pairs))
        for shard, target in zip(shards, temporary, strict=False):
            with target.open("wb") as file:
                file.write(_header(shard, extra))
                for info in shard.values():
                    name, tensor = next(walk)
                    assert (name, tuple(tensor.shape)) == (info.name, info.shape)
                    write_tensor(file, tensor)
                finish(file)
        if len(shards) > 1:
            where = {name: target.name for shard, target in zip(shards, targets, strict=False) for name in shard}
            total = sum(info.nbytes for shard in shards for info in shard.values())
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2)
            with temporary[-1].open("wb") as file:
                file.write(text.encode() + b"\n")
                finish(file)
    stale.unlink(missing_ok=True)
    return targets


def _shards(pairs: Any, limit: int | None) -> list[dict[str, TensorInfo]]:
    """Which tensors go in which file: in order, a new file where ``limit`` bytes of data would be passed."""
    shards: list[dict[str, TensorInfo]] = [{}]
    filled, seen = 0, set()
    for name, tensor in _items(pairs):
        assert name not in seen, f"tensor {name} is written twice"
        if tensor.dtype not in DTYPE_NAMES:
            raise UserError(f"tensor {quoted(name)}: safetensors cannot hold {tensor.dtype}")
        info = TensorInfo(name, tuple(tensor.shape), DTYPE_NAMES[tensor.dtype], tensor.numel() * tensor.element_size())
        if limit is not None and filled and filled + info.nbytes > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = info
        seen.add(name)
        filled += info.nbytes
    return shards


def _items(tensors: Any) -> Iterable[tuple[str, torch.Tensor]]:
    return tensors.items() if isinstance(tensors, Mapping) else tensors


def _header(infos: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for info in infos.values():
        entries[info.name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": [end, end + info.nbytes]}
        end += info.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
