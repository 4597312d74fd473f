"""Loading: the format by what is there, the spec from its configuration, every check before memory is allocated."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from phylon.checkpoint import Layout, TensorSource, identity, open_gguf, open_safetensors
from phylon.checkpoint.source import DTYPES
from phylon.families import gguf_format, hf_format
from phylon.families.base import Config
from phylon.hub.names import find_model
from phylon.model import GenerationDefaults, Model, ModelSpec, build_meta, materialise, resolve_device, resolve_dtype
from phylon.spec.errors import UserError
from phylon.spec.serial import check_schema, from_data
from phylon.text import Tokenizer, load_tokenizer, tokenizer_from_gguf

NATIVE_CONFIG = "phylon.json"
_COMPUTE = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "encoder.json", "spiece.model")


def load(
    path_or_name: str | Path, *, dtype: str | torch.dtype | None = None, device: str | torch.device = "auto"
) -> Model:
    """A model in eval mode from a native folder, a Hugging Face folder, a ``.gguf`` file, or a known package name.

    ``dtype`` of the parameters defaults to the stored one (fp32 for quantised files). Names, shapes and spans are
    checked before anything is allocated; peak memory is the model and one tensor. Nothing is unpickled or executed.

    Raises:
        UserError: the path, format, configuration or tensors do not fit; one line says what and how to mend it.
    """
    path = find_model(path_or_name)
    if path.is_file():
        if path.suffix != ".gguf":
            raise UserError(f"'{path}' is not a .gguf file; give the folder that holds config.json and the weights")
        return _load_gguf(path, dtype, device)
    if (path / NATIVE_CONFIG).exists():
        return _load_native(path, dtype, device)
    if (path / "config.json").exists():
        return _load_hf(path, dtype, device)
    raise UserError(f"'{path}' is not a checkpoint: it has neither {NATIVE_CONFIG} nor config.json")


def stored_tensors(model: Model) -> dict[str, torch.Tensor]:
    """Every parameter and stored buffer once, by canonical name; a tied name is not stored."""
    tied = {tie.name for tie in model.spec.ties}
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in tied}


def _load_native(path: Path, dtype: Any, device: Any) -> Model:
    data = read_json(path / NATIVE_CONFIG)
    try:
        check_schema(data)
        spec = from_data(ModelSpec, data.get("model"))
        generation = from_data(GenerationDefaults, data.get("generation", {}))
    except UserError as error:
        raise UserError(f"{path / NATIVE_CONFIG}: {error}") from None
    source = open_safetensors(path)
    model = _filled(spec, source, None, path, dtype, device)
    return _equipped(model, generation, _tokenizer(path))


def _load_hf(path: Path, dtype: Any, device: Any) -> Model:
    data = read_json(path / "config.json")
    model_type = data.get("model_type")
    if not isinstance(model_type, str):
        raise UserError(f"{path / 'config.json'} names no model_type")
    refuse_remote_code(data, path)
    _, fmt = hf_format(model_type)
    spec = fmt.read(Config(data, str(path / "config.json")))
    source = open_safetensors(path)
    model = _filled(spec, source, fmt.layout(spec), path, dtype, device)
    extra = path / "generation_config.json"
    generation = generation_defaults(data, read_json(extra) if extra.exists() else {})
    return _equipped(model, generation, _tokenizer(path))


def _load_gguf(path: Path, dtype: Any, device: Any) -> Model:
    source = open_gguf(path)
    metadata = source.metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise UserError(f"'{path}' names no general.architecture")
    _, fmt = gguf_format(architecture)
    own = {key: value for key, value in metadata.items() if key.startswith(f"{architecture}.")}
    spec = fmt.read(Config(own, str(path)), source)
    model = _filled(spec, source, fmt.layout(spec), path, dtype, device)
    tokenizer = tokenizer_from_gguf(metadata) if "tokenizer.ggml.model" in metadata else None
    generation = GenerationDefaults()
    if tokenizer is not None:
        generation = GenerationDefaults(bos_id=tokenizer.bos_id, eos_ids=tokenizer.eos_ids, pad_id=tokenizer.pad_id)
    return _equipped(model, generation, tokenizer)


def _filled(spec: ModelSpec, source: TensorSource, layout: Layout | None, path: Path, dtype: Any, device: Any) -> Model:
    model = build_meta(spec)
    layout = layout or identity(stored_tensors(model))
    shapes = {name: tuple(tensor.shape) for name, tensor in stored_tensors(model).items()}
    plan = layout.plan(source.tensors, shapes, str(path))
    materialise(model, resolve_dtype(dtype, _stored_dtype(source)), resolve_device(device))
    layout.load(plan, source, stored_tensors(model))
    model.stored_dtype = "+".join(sorted(plan.dtypes, key=lambda name: (-plan.dtypes[name], name)))
    return model


def _stored_dtype(source: TensorSource) -> torch.dtype:
    """The dtype that holds the most numbers; fp32 where anything is quantised."""
    sizes: dict[str, int] = {}
    for info in source.tensors.values():
        if info.dtype not in DTYPES:
            return torch.float32
        sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    floats = {name: size for name, size in sizes.items() if name in _COMPUTE}
    return _COMPUTE[max(floats, key=floats.__getitem__)] if floats else torch.float32


def _equipped(model: Model, generation: GenerationDefaults, tokenizer: Tokenizer | None) -> Model:
    model.generation = generation
    model.tokenizer = tokenizer
    return model.eval()


def _tokenizer(path: Path) -> Tokenizer | None:
    return load_tokenizer(path) if any((path / name).exists() for name in _TOKENIZER_FILES) else None


def generation_defaults(*tables: Mapping[str, Any]) -> GenerationDefaults:
    """Special ids and sampling defaults from ``config.json`` and ``generation_config.json``; later tables win."""
    merged = {key: value for table in tables for key, value in table.items() if value is not None}

    def ids(key: str) -> tuple[int, ...]:
        value = merged.get(key, ())
        found = (value,) if isinstance(value, int) else tuple(value) if isinstance(value, list) else ()
        return tuple(i for i in found if isinstance(i, int) and i >= 0)

    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    sampling = {name: merged[name] for name in names if isinstance(merged.get(name), int | float)}
    if sampling.get("top_k") == 0:
        del sampling["top_k"]
    if not merged.get("do_sample", False):
        # Settings of a sampler that the checkpoint does not turn on are not its defaults.
        sampling = {k: v for k, v in sampling.items() if k == "repetition_penalty"}
    return GenerationDefaults(
        bos_id=next(iter(ids("bos_token_id")), None),
        eos_ids=ids("eos_token_id"),
        pad_id=next(iter(ids("pad_token_id")), None),
        decoder_start_id=next(iter(ids("decoder_start_token_id")), None),
        **sampling,
    )


def refuse_remote_code(data: Mapping[str, Any], path: Path) -> None:
    """A configuration that names code to fetch or a foreign quantisation is refused."""
    if data.get("auto_map"):
        raise UserError(
            f"{path / 'config.json'} asks for code of its own (auto_map), which is never run; convert it first"
        )
    if data.get("quantization_config"):
        method = (
            data["quantization_config"].get("quant_method", "unknown")
            if isinstance(data["quantization_config"], dict)
            else "unknown"
        )
        raise UserError(
            f"{path / 'config.json'}: weights quantised by '{method}' are not read; use GGUF or full weights"
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of at most 64 MB."""
    if path.stat().st_size > 64 * 2**20:
        raise UserError(f"'{path}' is too large to be a configuration")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"'{path}' is not JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(data, dict):
        raise UserError(f"'{path}' must hold a JSON object")
    return data
