"""Saving: a whole folder or file is written beside its place and renamed into it."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from phylon.checkpoint import write_gguf, write_safetensors
from phylon.families import Family, families
from phylon.families.base import Config, GGUFFormat, HFFormat
from phylon.hub.describe import NATIVE_CONFIG
from phylon.hub.load import stored_tensors
from phylon.model import GenerationDefaults, Model, ModelSpec
from phylon.spec.errors import UserError
from phylon.spec.serial import SCHEMA, to_data
from phylon.text import gguf_from_tokenizer

_SHARD_BYTES = 5 * 10**9


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
    hf = None if format == "native" else _chosen(model.spec, "hf")
    with _new_folder(target, replace) as beside:
        if hf is None:
            data = {"schema": SCHEMA, "model": to_data(model.spec), "generation": to_data(model.generation)}
            _write_json(beside / NATIVE_CONFIG, data)
            tensors: Any = stored_tensors(model)
        else:
            dtype = str(model.dtype).removeprefix("torch.")
            _write_json(
                # What the family writes itself (RoBERTa's pad id places its positions) is part of the maths.
                beside / "config.json",
                {**_ids(model.generation), **hf.write(model.spec), "torch_dtype": dtype},
            )
            _write_json(beside / "generation_config.json", _generation_config(model.generation))
            tensors = hf.layout(model.spec).unmap(stored_tensors(model))
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
    fmt: GGUFFormat = _chosen(model.spec, "gguf")
    metadata = {**fmt.write(model.spec), **({} if model.tokenizer is None else gguf_from_tokenizer(model.tokenizer))}
    kind = quant or {"float16": "F16", "bfloat16": "BF16"}.get(str(model.dtype).removeprefix("torch."), "F32")
    tensors = dict(fmt.layout(model.spec).unmap({name: t.detach().cpu() for name, t in stored_tensors(model).items()}))
    extra = fmt.extra(model.spec)

    def quant_of(name: str, tensor: Any) -> str:
        return kind if tensor.ndim >= 2 and name not in extra else "F32"

    write_gguf(target, metadata, (tensors | extra).items(), quant=quant_of)
    return target


def _chosen(spec: ModelSpec, kind: Literal["hf", "gguf"]) -> Any:
    """The format of the first family that says ``spec`` exactly."""
    reasons = []
    for family in families():
        fmt: HFFormat | GGUFFormat | None = getattr(family, kind)
        if fmt is None:
            continue
        reason = _refusal(spec, family, fmt)
        if reason is None:
            return fmt
        reasons.append(f"{family.name}: {reason}")
    shown = "; ".join(reasons[:4]) + ("; …" if len(reasons) > 4 else "")
    raise UserError(f"no family's {kind} format says this model exactly; save it as native ({shown})")


def _refusal(spec: ModelSpec, family: Family, fmt: HFFormat | GGUFFormat) -> str | None:
    try:
        written = fmt.write(spec)
        if isinstance(fmt, GGUFFormat):
            return None
        back = fmt.read(Config(written)).replace(init=spec.init)
    except (UserError, KeyError) as error:
        return str(error)
    return None if back == spec else "its configuration has no place for a part of the spec"


def _ids(generation: GenerationDefaults) -> dict[str, Any]:
    eos: Any = list(generation.eos_ids)
    start = generation.decoder_start_id
    return {
        "bos_token_id": generation.bos_id,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else eos,
        "pad_token_id": generation.pad_id,
        **({} if start is None else {"decoder_start_token_id": start}),
    }


def _generation_config(generation: GenerationDefaults) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    sampling = {name: value for name in names if (value := getattr(generation, name)) is not None}
    turned_on = any(name != "repetition_penalty" for name in sampling)
    ids = {key: value for key, value in _ids(generation).items() if value is not None}
    return {**ids, **sampling, **({"do_sample": True} if turned_on else {})}


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def _new_folder(target: Path, replace: bool) -> Iterator[Path]:
    """A folder beside ``target`` that takes its place when the block succeeds, and vanishes when it fails."""
    if target.exists() and not replace and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"'{target}' exists and is not empty; choose another folder or remove it")
    beside = target.parent / f".{target.name}.{os.getpid()}.tmp"
    old = target.parent / f".{target.name}.{os.getpid()}.old"

    def attempt(action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            reason = "the disk is full" if full else (error.strerror or str(error)).lower()
            raise UserError(f"cannot save to '{target}': {reason}; nothing was left behind") from None

    attempt(lambda: beside.mkdir(parents=True))
    try:
        try:
            yield beside
        except OSError as error:
            failure = error
            attempt(lambda: (_ for _ in ()).throw(failure))
        if target.exists():
            target.rename(old)
        beside.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
