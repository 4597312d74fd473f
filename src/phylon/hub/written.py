"""What the files beside the weights say of a model: the words of the file it came from, as far as they are true."""

from collections import Counter
from collections.abc import Collection
from typing import Any

import torch

from phylon.families.base import Config, HFFormat
from phylon.hub.describe import SAMPLING, read_generation
from phylon.hub.labels import hf_tables, names_the_classes
from phylon.hub.load import stored_tensors
from phylon.model import GenerationDefaults, Model
from phylon.spec.errors import UserError

_TABLES = ("id2label", "label2id")
_DTYPES = ("dtype", "torch_dtype")
_DROPPED = ("auto_map", "add_pooling_layer")
"""The code that the first names is not copied. The second, in a file, keeps `transformers` from being told so by its
caller, and the tensors say it."""


def hf_config(model: Model, hf: HFFormat, tensors: Collection[str]) -> dict[str, Any]:
    """``config.json`` of a model whose tensors have these names.

    It is that of the file the model came from (`Model.kept`), in its own words, with what has changed since. Ids and
    dtype say what is in use, and names of classes those of the model.
    """
    written, file = hf.write(model.spec), {key: value for key, value in model.kept.items() if key not in _DROPPED}
    if file.get("model_type", hf.model_types[0]) not in hf.model_types:
        file = {}
    said = _in_its_words(model, hf, written, file, tensors)
    said |= {key: value for key, value in _spelled_ids(model, file).items() if key not in written}
    if _sampling(model.generation) != _sampling(_meant(model)):
        said = {key: value for key, value in said.items() if key not in SAMPLING}
    if not names_the_classes(file.get("id2label"), model):
        said = {key: value for key, value in said.items() if key not in _TABLES}
        said |= {key: written[key] for key in _TABLES if key in written} | hf_tables(model)
    dtypes = [key for key in _DTYPES if key in file] or ["torch_dtype"]
    return said | dict.fromkeys(dtypes, _most(model))


def _in_its_words(
    model: Model, hf: HFFormat, written: dict[str, Any], file: dict[str, Any], tensors: Collection[str]
) -> dict[str, Any]:
    """The file with what the format now ``written`` of the model says otherwise than it would of the file's own.

    Where that is not this model, ``written`` with those values of the file, one at a time, that change nothing.
    """

    def read(data: dict[str, Any]) -> Any:
        return hf.read(Config(data, stored=lambda: tensors)).replace(init=model.spec.init)

    def same(data: dict[str, Any]) -> bool:
        try:
            return read(data) == model.spec
        except UserError:
            return False

    if not file:
        return written
    try:
        before = hf.write(read(file))
    except UserError:
        before = {}
    changed = {key: value for key, value in written.items() if key not in before or before[key] != value}
    patched = {key: value for key, value in file.items() if key in written or key not in before} | changed
    patched = {key: written[key] for key in ("architectures", "model_type")} | patched
    if same(patched):
        return patched
    said = written
    for key, value in file.items():
        said = {**said, key: value} if same({**said, key: value}) else said
    return said


def _most(model: Model) -> str:
    """The dtype of most numbers, as they are written."""
    count: Counter[torch.dtype] = Counter()
    for name, tensor in stored_tensors(model).items():
        stored, loaded = model.stored_dtypes.get(name, (tensor.dtype, tensor.dtype))
        count[stored if loaded == tensor.dtype else tensor.dtype] += tensor.numel()
    return str(count.most_common(1)[0][0]).removeprefix("torch.")


def generation_config(model: Model) -> dict[str, Any]:
    """``generation_config.json``: that of the file the model came from, with what has changed since.

    Where there was none: the special ids there are and the sampler's defaults.
    """
    now, file = model.generation, model.kept_generation
    before = GenerationDefaults() if file is None else _meant(model)
    said = dict(file or {})
    changed = {key: value for key, value in _ids(now).items() if value != _ids(before)[key]}
    said = {key: value for key, value in said.items() if key not in changed}
    said |= {key: value for key, value in changed.items() if value is not None}
    if _sampling(now) == _sampling(before):
        return said
    # A sampler that is turned on would also bring back settings that were written and not in use.
    said = {key: value for key, value in said.items() if key not in SAMPLING} | _sampling(now)
    on, was_on = (any(name != "repetition_penalty" for name in _sampling(x)) for x in (now, before))
    return said if on == was_on else said | {"do_sample": on}


def _meant(model: Model) -> GenerationDefaults:
    """What the words that came with a model say of generation."""
    files = {"config.json": model.kept, "generation_config.json": model.kept_generation or {}}
    try:
        return read_generation(model.spec, files)
    except UserError:
        return GenerationDefaults()


def _sampling(generation: GenerationDefaults) -> dict[str, Any]:
    return {name: value for name in SAMPLING if (value := getattr(generation, name)) is not None}


def _ids(generation: GenerationDefaults) -> dict[str, Any]:
    eos: Any = list(generation.eos_ids)
    return {
        "bos_token_id": generation.bos_id,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else eos,
        "pad_token_id": generation.pad_id,
        "decoder_start_token_id": generation.decoder_start_id,
    }


def _spelled_ids(model: Model, file: dict[str, Any]) -> dict[str, Any]:
    """The ids: in the words of a file, or its silence, where the files still mean what is in use."""
    now, before = _ids(model.generation), _ids(_meant(model))
    if not file:
        return {key: value for key, value in now.items() if value is not None or key != "decoder_start_token_id"}
    own = {key: file[key] for key in now if key in file and now[key] == before[key]}
    new = {key: value for key, value in now.items() if value != before[key] and (value is not None or key in file)}
    return own | new
