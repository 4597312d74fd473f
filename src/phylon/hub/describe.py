"""What lies at a path, from its configuration alone: the format, the family and the spec. No weight is read."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from phylon.checkpoint import TensorSource, open_gguf, open_safetensors
from phylon.checkpoint.files import quoted
from phylon.families import Family, gguf_format, hf_format
from phylon.families.base import Config, HFFormat, shown
from phylon.hub.labels import hf_labels, native_labels
from phylon.hub.names import find_model
from phylon.model import GenerationDefaults, ModelSpec
from phylon.spec.errors import UserError
from phylon.spec.files import read_file, there
from phylon.spec.serial import check_schema, from_data, to_json

NATIVE_CONFIG = "phylon.json"

_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, kw_only=True)
class Description:
    """A checkpoint before its weights. ``family`` is ``None`` for native folders; ``source`` is an opened GGUF file.

    ``written_as`` names the family in whose foreign format the model is to be saved again, where that is known.
    ``labels`` are the names of classes, by head.
    ``kept`` is the ``config.json`` that the model came from, by this folder or an earlier one.
    ``blame`` gives a refusal that names our arguments the keys of the file.
    """

    path: Path
    format: Literal["native", "hf", "gguf"]
    family: Family | None
    spec: ModelSpec
    generation: GenerationDefaults
    source: TensorSource | None = None
    written_as: str | None = None
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    blame: Callable[[UserError], UserError] = lambda error: error
    kept: Mapping[str, Any] = field(default_factory=dict)


def describe(path_or_name: str | Path) -> Description:
    """The format, family and spec of a native folder, a Hugging Face folder, a ``.gguf`` file or a known package name.

    Raises:
        UserError: the path is no checkpoint, or its configuration does not fit.
    """
    path = find_model(path_or_name)
    if not path.is_dir():
        if path.suffix != ".gguf":
            raise UserError(f"'{path}' is not a .gguf file; give the folder that holds config.json and the weights")
        return _gguf(path)
    if there(path / NATIVE_CONFIG):
        return _native(path)
    if there(path / "config.json"):
        return _hf(path)
    raise UserError(f"'{path}' is not a checkpoint: it has neither {NATIVE_CONFIG} nor config.json")


def _native(path: Path) -> Description:
    data = read_json(path / NATIVE_CONFIG)
    try:
        check_schema(data)
        unknown = [key for key in data if key not in ("schema", "family", "model", "generation", "labels", "kept")]
        if unknown:
            raise UserError(f"unknown key {quoted(unknown[0])}")
        if not isinstance(data.get("family", ""), str):
            raise UserError(f"'family' must be a name, got {data['family']!r}")
        spec = from_data(ModelSpec, data.get("model"))
        generation = from_data(GenerationDefaults, data.get("generation", {}))
        labels = native_labels(spec, data.get("labels", {}))
        kept = _native_kept(data.get("kept", {}))
    except UserError as error:
        raise UserError(f"{path / NATIVE_CONFIG}: {error}") from None
    return Description(
        path=path,
        format="native",
        family=None,
        spec=spec,
        generation=generation,
        written_as=data.get("family"),
        labels=labels,
        kept=kept,
    )


def _native_kept(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict) or (data and not isinstance(data.get("model_type"), str)):
        raise UserError("'kept' must be the table of a config.json, with its model_type")
    return data


def _hf(path: Path) -> Description:
    data = read_json(path / "config.json")
    model_type = data.get("model_type")
    if not isinstance(model_type, str):
        raise UserError(f"{path / 'config.json'} names no model_type")
    refuse_quantised(data, path)
    where = str(path / "config.json")
    with named(where):
        family, fmt = hf_format(model_type, data)
    config = Config(data, where, lambda: _stored_names(path))
    try:
        _one_architecture(config, fmt, data.get("architectures"))
        spec = fmt.read(config)
    except UserError as error:
        raise config.blame(error) from None
    extra = path / "generation_config.json"
    files = {where: data} | ({str(extra): read_json(extra)} if there(extra) else {})
    vocab_size = getattr(spec.last_stack.embed, "vocab_size", None)
    generation = generation_defaults(files, vocab_size)
    with named(str(path)):
        labels = hf_labels(spec, data.get("id2label"))
    if spec.encoder is not None and spec.decoder is not None and generation.decoder_start_id is None:
        # T5 and Marian start from padding, also where a file does not say so.
        pad = data.get("pad_token_id")
        if pad is not None and generation.pad_id is None:
            raise UserError(f"{where}: {_outside('pad_token_id', pad, vocab_size)}")
        generation = generation.replace(decoder_start_id=generation.pad_id)
    return Description(
        path=path,
        format="hf",
        family=family,
        spec=spec,
        generation=generation,
        written_as=family.name,
        labels=labels,
        blame=config.blame,
        kept=data,
    )


def _one_architecture(config: Config, fmt: HFFormat, names: Any) -> None:
    """Several architectures must be names of one model: nothing says which of them the weights are of."""
    if not isinstance(names, list):
        return
    if not all(isinstance(name, str) and name for name in names):
        raise UserError(f"{config.where}: 'architectures' must be a list of names, got {shown(names)}")
    first, *others = dict.fromkeys(names) or [""]
    for other in others:
        try:
            same = len({to_json(fmt.read(config.but({"architectures": [name]}))) for name in (first, other)}) == 1
        except UserError:
            same = False
        if not same:
            raise UserError(
                f"{config.where}: 'architectures' names {quoted(first)} and {quoted(other)}, which are different "
                "models: keep the one that the weights are of"
            )


@contextmanager
def named(where: str) -> Iterator[None]:
    """Refusals of a builder, which knows no file, begin with the file."""
    try:
        yield
    except UserError as error:
        raise error if where in str(error) else UserError(f"{where}: {error}") from None


def _stored_names(path: Path) -> frozenset[str] | None:
    """The names of the tensors in a folder, or ``None`` where there are no weights that can be read."""
    try:
        return frozenset(open_safetensors(path).tensors)
    except UserError:
        return None


def _gguf(path: Path) -> Description:
    source = open_gguf(path)
    architecture = source.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise UserError(f"'{path}' names no general.architecture")
    with named(str(path)):
        family, fmt = gguf_format(architecture)
    own = {key: value for key, value in source.metadata.items() if key.startswith(f"{architecture}.")}
    with named(str(path)):
        spec = fmt.read(Config(own, str(path)), source)
    nothing = GenerationDefaults()
    return Description(
        path=path,
        format="gguf",
        family=family,
        spec=spec,
        generation=nothing,
        source=source,
        written_as=family.name,
    )


def generation_defaults(files: Mapping[str, Mapping[str, Any]], vocab_size: int | None = None) -> GenerationDefaults:
    """Special ids and sampling defaults from ``config.json`` and ``generation_config.json``, by path; later files win.

    ``vocab_size``: what the ids must be below, where that is known.

    Raises:
        UserError: a value that no generation can use, also where a later file or ``do_sample`` would hide it.
    """
    merged: dict[str, Any] = {}
    for where, table in files.items():
        said = {key: value for key, value in table.items() if value is not None}
        with named(where):
            merged |= said | {key: _ids(key, said[key], vocab_size) for key in _ID_KEYS if key in said}
            _check_sampling(said)
    sampling = {name: merged[name] for name in _SAMPLING if name in merged}
    if sampling.get("top_k") == 0:
        del sampling["top_k"]
    if not merged.get("do_sample", False):
        # Settings of a sampler that the checkpoint does not turn on are not its defaults.
        sampling = {k: v for k, v in sampling.items() if k == "repetition_penalty"}
    bos, eos, pad, start = (merged.get(key, ()) for key in _ID_KEYS)
    return GenerationDefaults(
        bos_id=next(iter(bos), None),
        eos_ids=eos,
        pad_id=next(iter(pad), None),
        decoder_start_id=next(iter(start), None),
        **sampling,
    )


def _ids(key: str, value: Any, vocab_size: int | None) -> tuple[int, ...]:
    found = value if isinstance(value, list | tuple) else (value,)
    wrong = [i for i in found if not isinstance(i, int) or isinstance(i, bool) or abs(i) >= 2**31]
    if wrong:
        raise UserError(f"'{key}' must be a token id or a list of them, got {shown(wrong[0])}")
    above = [i for i in found if vocab_size is not None and i >= vocab_size]
    if above and key == "decoder_start_token_id":
        raise UserError(_outside(key, above[0], vocab_size))
    # A negative id is how some files say that there is none. One above comes of the defaults of a larger model (small
    # GPT-2s of the reference), or of a tokenizer that pads with a token its model lacks (LLaMA 2).
    return tuple(i for i in found if i >= 0 and i not in above)


def _outside(key: str, token: int, vocab_size: int | None) -> str:
    return f"'{key}' is {shown(token)}, which is no token of a vocabulary of {vocab_size}: correct or remove it"


def _check_sampling(said: Mapping[str, Any]) -> None:
    if not isinstance(said.get("do_sample", False), bool):
        raise UserError(f"'do_sample' must be true or false, got {shown(said['do_sample'])}")
    for name in _SAMPLING:
        # 0 is how the reference says that all tokens are candidates.
        if name in said and not (name == "top_k" and said[name] == 0 and not isinstance(said[name], bool)):
            try:
                GenerationDefaults(**{name: said[name]})
            except UserError as error:
                raise UserError(f"'{name}'{str(error).removeprefix(name)}") from None


def refuse_quantised(data: Mapping[str, Any], path: Path) -> None:
    """A foreign quantisation is refused before anything else is read."""
    if data.get("quantization_config"):
        table = data["quantization_config"]
        method = quoted(str(table.get("quant_method", "unknown") if isinstance(table, dict) else "unknown"))
        raise UserError(f"{path / 'config.json'}: weights quantised by {method} are not read; use GGUF or full weights")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of at most 64 MB."""
    content = read_file(path, most=64 << 20)
    try:
        data = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        # No JSON, no UTF-8, or a whole number of more digits than Python reads.
        raise UserError(f"'{path}' is not JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(data, dict):
        raise UserError(f"'{path}' must hold a JSON object")
    return data
