"""Loading: the format by what is there, the spec from its configuration, every check before memory is allocated."""

from pathlib import Path
from typing import Any

import torch

from phylon.checkpoint import Layout, TensorSource, identity, open_safetensors
from phylon.checkpoint.source import DTYPES
from phylon.hub.describe import describe
from phylon.model import GenerationDefaults, Model, ModelSpec, build_meta, materialise, resolve_device, resolve_dtype
from phylon.text import Tokenizer, load_tokenizer, tokenizer_from_gguf

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
    found = describe(path_or_name)
    if found.family is None:
        source, layout = open_safetensors(found.path), None
    elif found.format == "hf":
        assert found.family.hf is not None
        source, layout = open_safetensors(found.path), found.family.hf.layout(found.spec)
    else:
        assert found.family.gguf is not None
        assert found.source is not None
        source, layout = found.source, found.family.gguf.layout(found.spec)
    model = _filled(found.spec, source, layout, found.path, dtype, device)
    model.tokenizer, model.generation = _tokenizer(found.path), found.generation
    model.family = found.written_as
    if found.format == "gguf":
        model.tokenizer, model.generation = _gguf_vocabulary(source)
    return model.eval()


def stored_tensors(model: Model) -> dict[str, torch.Tensor]:
    """Every parameter and stored buffer once, by canonical name; a tied name is not stored."""
    tied = {tie.name for tie in model.spec.ties}
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in tied}


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


def _gguf_vocabulary(source: TensorSource) -> tuple[Tokenizer | None, GenerationDefaults]:
    if "tokenizer.ggml.model" not in source.metadata:
        return None, GenerationDefaults()
    made = tokenizer_from_gguf(source.metadata)
    return made, GenerationDefaults(bos_id=made.bos_id, eos_ids=made.eos_ids, pad_id=made.pad_id)


def _tokenizer(path: Path) -> Tokenizer | None:
    return load_tokenizer(path) if path.is_dir() and any((path / name).exists() for name in _TOKENIZER_FILES) else None
