"""Saving: a whole folder or file is written beside its place and renamed into it."""

import itertools
import json
import os
import shutil
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from phylon.checkpoint import MemorySource, identity, write_gguf, write_safetensors
from phylon.families import Family, families
from phylon.families.base import Config, GGUFFormat, HFFormat
from phylon.hub.describe import NATIVE_CONFIG
from phylon.hub.load import UNREAD, stored_tensors
from phylon.hub.written import generation_config, hf_config
from phylon.model import Model, ModelSpec, build_meta
from phylon.model.passes import lora_tensors
from phylon.spec.base import Spec
from phylon.spec.errors import UserError, system_reason
from phylon.spec.serial import SCHEMA, to_data
from phylon.text import gguf_from_tokenizer

_SHARD_BYTES = 5 * 10**9
_NO_PLACE = "its configuration has no place for"


def save(
    model: Model, folder: str | Path, *, format: Literal["native", "hf"] = "native", replace: bool = False
) -> Path:
    """Write the model, its tokenizer and generation defaults into ``folder``; returns it.

    "native" keeps the spec and canonical names; "hf" is the layout of the family, readable by ``transformers``, with
    every tensor bit for bit. An existing folder is kept unless ``replace``; nothing half-written is ever left.
    """
    target = Path(folder)
    if format not in ("native", "hf"):
        raise UserError(f"unknown format '{format}' (known: native, hf; .gguf files by convert)")
    if lora_tensors(model):
        raise UserError(
            "this model has LoRA adapters: fold them in with merge_lora, or save them alone with save_adapter"
        )
    hf = None if format == "native" else _chosen(model, "hf")
    with new_folder(target, replace) as beside:
        if hf is None:
            data = {"schema": SCHEMA, "model": to_data(model.spec), "generation": to_data(model.generation)}
            data |= {} if model.family is None else {"family": model.family}
            data |= {"labels": model.labels} if model.labels else {}
            data |= {"kept": model.kept} if model.kept else {}
            data |= {} if model.kept_generation is None else {"kept_generation": model.kept_generation}
            _write_json(beside / NATIVE_CONFIG, data)
            mine = identity(stored_tensors(model)).unmap(stored_tensors(model), model.stored_dtypes)
            tensors: Any = _Together(mine, [(UNREAD + name, tensor) for name, tensor in model.unread.items()])
        else:
            tensors = hf.layout(model.spec).unmap(stored_tensors(model), model.stored_dtypes, model.unread)
            _write_json(beside / "config.json", hf_config(model, hf, tensors.names()))
            _write_json(beside / "generation_config.json", generation_config(model))
        metadata = {"format": "pt"}
        write_safetensors(beside / "model.safetensors", tensors, metadata, max_shard_bytes=_SHARD_BYTES)
        if model.tokenizer is not None:
            model.tokenizer.save(beside)
    return target


def save_gguf(model: Model, path: str | Path, *, quant: str | None = None, replace: bool = False) -> Path:
    """Write a ``.gguf`` file. ``quant`` (F32, F16, BF16, Q8_0, Q4_0, Q4_1) applies to matrices; vectors stay F32."""
    target = Path(path)
    if target.exists() and not replace:
        raise UserError(f"'{target}' exists; choose another name or remove it")
    fmt: GGUFFormat = _chosen(model, "gguf")
    metadata = {**fmt.write(model.spec), **({} if model.tokenizer is None else gguf_from_tokenizer(model.tokenizer))}
    kind = quant or {"float16": "F16", "bfloat16": "BF16"}.get(str(model.dtype).removeprefix("torch."), "F32")
    extra = fmt.extra(model.spec)
    tensors = _Together(fmt.layout(model.spec).unmap(stored_tensors(model)), extra.items())
    with _reported(target, target):
        write_gguf(target, metadata, tensors, quant=kind)
    return target


class _Together(Iterable[tuple[str, torch.Tensor]]):
    """One walk after the other, made anew each time, so that a writer keeps one made tensor in memory."""

    def __init__(self, *parts: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return itertools.chain(*self._parts)


def _chosen(model: Model, kind: Literal["hf", "gguf"]) -> Any:
    """The format of the model's family if that says its spec exactly, else of the first one that does."""
    spec, reasons = model.spec, []
    for family in sorted(families(), key=lambda family: family.name != model.family):
        fmt: HFFormat | GGUFFormat | None = getattr(family, kind)
        if fmt is None:
            continue
        reason = _refusal(spec, family, fmt)
        if reason is None:
            return fmt
        if family.name == model.family and kind == "hf" and (other := _other_heads(spec, fmt)):
            raise UserError(f"{family.name}'s hf format {reason.removeprefix('its configuration ')}: {other}")
        reasons.append(f"{family.name}: {reason}")
    # Nearest first: families that have other parts altogether say so with "this format".
    reasons.sort(key=lambda reason: 2 * (": this format " in reason) + (_NO_PLACE in reason))
    shown = "; ".join(reasons[:4]) + ("; …" if len(reasons) > 4 else "")
    raise UserError(f"no family's {kind} format says this model exactly; save it as native ({shown})")


def _refusal(spec: ModelSpec, family: Family, fmt: HFFormat | GGUFFormat) -> str | None:
    try:
        written = fmt.write(spec)
        if isinstance(fmt, GGUFFormat):
            return None if _said_by_gguf(spec, fmt, written) else "its header has no place for a part of the spec"
        back = fmt.read(Config(written, stored=lambda: _names(spec, fmt))).replace(init=spec.init)
    except (UserError, KeyError) as error:
        return str(error)
    return None if back == spec else f"{_NO_PLACE} {_difference(spec, back)}"


def _other_heads(spec: ModelSpec, fmt: Any) -> str | None:
    """What can be done for a model of which the format says all but its heads."""
    try:
        back = fmt.read(Config(fmt.write(spec), stored=lambda: _names(spec, fmt))).replace(init=spec.init)
    except (UserError, KeyError):
        return None
    if back.heads.keys() != spec.heads.keys() or back.replace(heads=spec.heads) != spec:
        return None
    theirs = ", ".join(f"{name} = {head}" for name, head in back.heads.items() if head != spec.heads[name])
    return f"save it as native, or train it with that format's head, {theirs}"


def _names(spec: ModelSpec, fmt: HFFormat) -> list[str]:
    """The tensors of a folder."""
    return list(fmt.layout(spec).unmap(stored_tensors(build_meta(spec))).names())


def _difference(ours: Any, said: Any, path: str = "") -> str:
    """The first part of a spec that a configuration says otherwise, by its path."""
    pairs: dict[Any, tuple[Any, Any]] = {}
    if isinstance(ours, Spec) and type(ours) is type(said):
        pairs = {name: (getattr(ours, name), getattr(said, name)) for name in ours.__struct_fields__}
    elif isinstance(ours, Mapping) and isinstance(said, Mapping) and ours.keys() == said.keys():
        pairs = {name: (value, said[name]) for name, value in ours.items()}
    elif isinstance(ours, tuple) and isinstance(said, tuple) and len(ours) == len(said):
        pairs = dict(enumerate(zip(ours, said, strict=True)))
    for name, (mine, theirs) in pairs.items():
        if mine != theirs:
            return _difference(mine, theirs, f"{path}.{name}" if path else str(name))
    shown = type(ours).__name__ if isinstance(ours, Spec) else "" if isinstance(ours, Mapping | tuple) else ours
    return f"{path} {shown}".rstrip()


def _said_by_gguf(spec: ModelSpec, fmt: GGUFFormat, written: dict[str, Any]) -> bool:
    """Whether a GGUF header gives back the spec, training matters and frequencies stored as tensors aside."""
    extra = fmt.extra(spec)
    tensors = dict(fmt.layout(spec).unmap(stored_tensors(build_meta(spec)))) | extra
    own = {key: value for key, value in written.items() if not key.startswith("general.")}
    back = fmt.read(Config(own), MemorySource(tensors))

    def maths(value: Any) -> Any:
        if isinstance(value, dict):
            aside = {"init", "dropout", "drop", *(("scaling",) if extra else ())}
            return {key: maths(inner) for key, inner in value.items() if key not in aside}
        return [maths(inner) for inner in value] if isinstance(value, list) else value

    return maths(to_data(back)) == maths(to_data(spec))


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def new_folder(target: Path, replace: bool) -> Generator[Path]:
    """A folder beside ``target`` that takes its place when the block succeeds, and vanishes when it fails."""
    if target.exists() and not replace and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"'{target}' exists and is not empty; choose another folder or remove it")
    beside = target.parent / f".{target.name}.{os.getpid()}.tmp"
    old = target.parent / f".{target.name}.{os.getpid()}.old"

    with _reported(target, beside):
        beside.mkdir(parents=True)
        try:
            yield beside
            if target.exists():
                target.rename(old)
            try:
                beside.rename(target)
            except OSError:
                if old.exists():
                    old.rename(target)
                raise
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(beside, ignore_errors=True)


@contextmanager
def _reported(target: Path, beside: Path) -> Generator[None]:
    """What the operating system refuses, as one line about ``target``; ``beside`` is where it was being written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot save to '{target}': {system_reason(error)}; nothing was left behind") from None
    except UserError as error:
        raise UserError(str(error).replace(str(beside), str(target))) from None
