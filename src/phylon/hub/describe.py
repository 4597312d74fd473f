"""What lies at a path, from its configuration alone: the format, the family and the spec. No weight is read."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from phylon.checkpoint import TensorSource, open_gguf, open_safetensors
from phylon.checkpoint.files import quoted
from phylon.families import Family, gguf_format, hf_format, passed
from phylon.families.architectures import check_architectures, check_stacks
from phylon.families.base import Config, HFFormat, shown
from phylon.hub.labels import hf_labels, native_labels
from phylon.hub.names import find_model
from phylon.model import GenerationDefaults, ModelSpec
from phylon.spec.errors import UserError
from phylon.spec.files import read_file, there
from phylon.spec.serial import check_schema, from_data, to_json

NATIVE_CONFIG = "phylon.json"

_NATIVE_KEYS = ("schema", "family", "model", "generation", "labels", "kept", "kept_generation")
ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_OF_A_SAMPLER = ("typical_p", "epsilon_cutoff", "eta_cutoff")
_NOT_APPLIED: dict[str, Any] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "encoder_repetition_penalty", "typical_p"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("diversity_penalty", "penalty_alpha", "epsilon_cutoff", "eta_cutoff"), 0),
    **{key: [] for key in ("bad_words_ids", "force_words_ids", "suppress_tokens", "begin_suppress_tokens")},
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "sequence_bias", "guidance_scale"), None),
    **dict.fromkeys(("exponential_decay_length_penalty", "forced_decoder_ids", "constraints"), None),
}
"""What changes a generation, is not applied here, and is told; each with the value that changes nothing."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """A checkpoint before its weights. ``family`` is ``None`` for native folders; ``source`` is an opened GGUF file.

    ``written_as`` names the family in whose foreign format the model is to be saved again, where that is known.
    ``labels`` are the names of classes, by head.
    ``kept`` is the ``config.json`` that the model came from, by this folder or an earlier one, ``kept_generation`` the
    ``generation_config.json`` beside it, if there was one.
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
    kept_generation: dict[str, Any] | None = None


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
        unknown = [key for key in data if key not in _NATIVE_KEYS]
        if unknown:
            raise UserError(f"unknown key {quoted(unknown[0])}")
        if not isinstance(data.get("family", ""), str):
            raise UserError(f"'family' must be a name, got {data['family']!r}")
        spec = from_data(ModelSpec, data.get("model"))
        generation = from_data(GenerationDefaults, data.get("generation", {}))
        labels = native_labels(spec, data.get("labels", {}))
        kept, kept_generation = (_native_kept(data, key) for key in ("kept", "kept_generation"))
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
        kept=kept or {},
        kept_generation=kept_generation,
    )


def _native_kept(data: dict[str, Any], key: str) -> dict[str, Any] | None:
    """The words of a foreign file, or ``None``. A ``kept`` of an early version may lack the model_type."""
    kept = data.get(key)
    if key in data and (not isinstance(kept, dict) or not isinstance(kept.get("model_type", ""), str)):
        raise UserError(f"{key!r} must be the table of a JSON file, and a model_type in it a name")
    return kept


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
        names = data.get("architectures") or []
        check_architectures(config, family, names)
        _one_architecture(config, fmt, names)
        spec = fmt.read(config)
        check_stacks(config, family, spec)
    except UserError as error:
        raise config.blame(error) from None
    extra = path / "generation_config.json"
    beside = read_json(extra) if there(extra) else None
    generation = read_generation(spec, {where: data} | ({} if beside is None else {str(extra): beside}))
    with named(str(path)):
        labels = hf_labels(spec, data.get("id2label"))
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
        kept_generation=beside,
    )


def _one_architecture(config: Config, fmt: HFFormat, names: list[str]) -> None:
    """Several architectures must be names of one model: nothing says which of them the weights are of."""
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


def read_generation(spec: ModelSpec, files: Mapping[str, Mapping[str, Any]]) -> GenerationDefaults:
    """`generation_defaults` of a model: ids are of its vocabulary, and an encoder-decoder starts from one."""
    vocab_size = getattr(spec.last_stack.embed, "vocab_size", None)
    found = generation_defaults(files, vocab_size)
    if spec.encoder is None or spec.decoder is None or found.decoder_start_id is not None:
        return found
    # T5 and Marian start from padding, also where a file does not say so.
    said = [(where, table["pad_token_id"]) for where, table in files.items() if table.get("pad_token_id") is not None]
    for where, pad in said if found.pad_id is None else ():
        raise UserError(f"{where}: {_outside('pad_token_id', pad, vocab_size)}")
    return found.replace(decoder_start_id=found.pad_id)


def generation_defaults(files: Mapping[str, Mapping[str, Any]], vocab_size: int | None = None) -> GenerationDefaults:
    """Special ids and sampling defaults from ``config.json`` and ``generation_config.json``, by path; later files win.

    ``vocab_size``: what the ids must be below, where that is known.

    Raises:
        UserError: a value that no generation can use, also where a later file or ``do_sample`` would hide it.

    What is no id is taken from the last file that says anything, as in the reference.
    """
    merged: dict[str, Any] = {}
    last: dict[str, Any] = {}
    for where, table in files.items():
        said = {key: value for key, value in table.items() if value is not None}
        with named(where):
            merged |= {key: _ids(key, said[key], vocab_size) for key in ID_KEYS if key in said}
            _check_sampling(said)
        last = said or last
    sampling = {name: last[name] for name in SAMPLING if name in last}
    if sampling.get("top_k") == 0:
        del sampling["top_k"]
    samples = last.get("do_sample", False)
    if not samples:
        # Settings of a sampler that the checkpoint does not turn on are not its defaults.
        sampling = {k: v for k, v in sampling.items() if k == "repetition_penalty"}
    bos, eos, pad, start = (merged.get(key, ()) for key in ID_KEYS)
    return GenerationDefaults(
        bos_id=next(iter(bos), None),
        eos_ids=eos,
        pad_id=next(iter(pad), None),
        decoder_start_id=next(iter(start), None),
        not_applied=tuple(
            key
            for key, neutral in _NOT_APPLIED.items()
            if last.get(key, neutral) != neutral and (samples or key not in _OF_A_SAMPLER)
        ),
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
    for key in _NOT_APPLIED:
        words = passed.wrong(key, said.get(key))
        if words is not None:
            raise UserError(f"'{key}' must be {words}, got {shown(said[key])}")
    for name in SAMPLING:
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
