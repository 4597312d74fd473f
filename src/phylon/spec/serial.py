"""Specs to plain data and back: JSON, TOML, schema version, refused unknown keys.

Equal neighbours in a tuple are written once as ``{"repeat": n, "of": …}``, so that a 32-block model stays one page.
``None`` is left out (TOML has no null), which is why optional fields must default to ``None``.
"""

import re
import tomllib
import typing
from typing import Any, TypeVar

import msgspec
import tomli_w

from phylon.spec.base import Slot, Spec
from phylon.spec.errors import UserError, did_you_mean
from phylon.spec.registry import find

SCHEMA = 1
_MOST_NODES = 1_000_000
T = TypeVar("T")


def to_data(spec: Spec) -> dict[str, Any]:
    """Plain dicts, lists, strings and numbers."""
    return _compact(msgspec.to_builtins(spec))


def from_data(kind: type[T], data: Any) -> T:
    """The spec that ``data`` describes; a ``UserError`` with the path of whatever does not fit."""
    try:
        return msgspec.convert(_expand(data), kind, dec_hook=structure_slot)
    except msgspec.ValidationError as error:
        raise UserError(_one_line(str(error), kind)) from None
    except RecursionError:
        raise UserError("the spec is nested too deeply") from None


def to_json(spec: Spec, *, name: str = "model") -> str:
    """JSON with the schema version."""
    return msgspec.json.format(msgspec.json.encode({"schema": SCHEMA, name: to_data(spec)}), indent=2).decode()


def from_json(kind: type[T], text: str | bytes, *, name: str = "model") -> T:
    """The reverse of ``to_json``."""
    try:
        data = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise UserError(f"not JSON: {error}") from None
    except RecursionError:
        raise UserError("not a spec: the JSON is nested too deeply") from None
    return from_data(kind, unwrap(data, name))


def to_toml(spec: Spec, *, name: str = "model") -> str:
    """TOML with the schema version."""
    return tomli_w.dumps({"schema": SCHEMA, name: to_data(spec)})


def from_toml(kind: type[T], text: str, *, name: str = "model") -> T:
    """The reverse of ``to_toml``."""
    return from_data(kind, unwrap(parse_toml(text), name))


def parse_toml(text: str) -> dict[str, Any]:
    """A TOML document, or a one-line error."""
    try:
        return tomllib.loads(text)
    except ValueError as error:
        # No TOML, or a whole number of more digits than Python reads.
        raise UserError(f"not TOML: {error}") from None
    except RecursionError:
        raise UserError("not a spec: the TOML is nested too deeply") from None


def unwrap(data: Any, name: str) -> Any:
    """Check the schema version and the keys of a document that holds one spec under ``name``."""
    check_schema(data)
    extra = set(data) - {"schema", name}
    if extra or name not in data:
        raise UserError(f"expected the keys 'schema' and '{name}', got {', '.join(map(repr, data)) or 'none'}")
    return data[name]


def check_schema(data: Any) -> None:
    """Refuse a document that is not a table, or written for another schema version."""
    if not isinstance(data, dict):
        raise UserError(f"expected a table at the top, got {type(data).__name__}")
    if "schema" not in data:
        raise UserError(f"the line 'schema = {SCHEMA}' is missing")
    if data["schema"] != SCHEMA:
        raise UserError(f"schema is {data['schema']!r}; this release reads schema = {SCHEMA}")


def structure_slot(kind: type, data: Any) -> Any:
    """msgspec's hook for types it does not know: fill a slot from ``{"kind": …}`` or from a bare word."""
    if isinstance(data, kind):
        return data
    if not issubclass(kind, Slot):
        raise TypeError(f"expected {kind.__name__}, got {type(data).__name__}")
    if isinstance(data, str):
        data = kind.from_word(data)
        if isinstance(data, kind):
            return data
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
        raise TypeError(f"{kind.__name__} needs a table with a 'kind'")
    spec = find(kind, data["kind"])
    try:
        return msgspec.convert(data, spec, dec_hook=structure_slot)
    except msgspec.ValidationError as error:
        # A plain ValueError, so that msgspec adds the path to this slot; the inner path goes in front.
        raise ValueError(_one_line(str(error), spec)) from None


def _compact(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _compact(value) for key, value in data.items() if value is not None}
    if not isinstance(data, list | tuple):
        return data
    runs: list[tuple[int, Any]] = []
    for item in map(_compact, data):
        if runs and isinstance(item, dict) and runs[-1][1] == item:
            runs[-1] = (runs[-1][0] + 1, item)
        else:
            runs.append((1, item))
    return [item if count == 1 else {"repeat": count, "of": item} for count, item in runs]


def _expand(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _expand(value) for key, value in data.items()}
    if not isinstance(data, list):
        return data
    items: list[Any] = []
    for item in map(_expand, data):
        if isinstance(item, dict) and set(item) == {"repeat", "of"}:
            if not isinstance(item["repeat"], int) or not 1 <= item["repeat"] <= 10_000:
                raise UserError(f"'repeat' must be a whole number from 1 to 10000, got {item['repeat']!r}")
            if item["repeat"] * _n_nodes(item["of"]) > _MOST_NODES:
                raise UserError(f"'repeat' {item['repeat']} makes more than {_MOST_NODES} parts of a spec")
            items += [item["of"]] * item["repeat"]
        else:
            items.append(item)
    return items


def _n_nodes(data: Any) -> int:
    children = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return 1 + sum(map(_n_nodes, children))


def _one_line(message: str, kind: Any) -> str:
    """msgspec's message with the inner path joined to the outer one, and the nearest field for an unknown one."""
    paths = re.findall(r" - at `\$\.?([^`]*)`", message)
    message = re.sub(r" - at `[^`]*`", "", message)
    unknown = re.search(r"unknown field `([^`]+)`", message)
    if unknown and "(" not in message:
        fields = getattr(_class_at(kind, paths[0] if paths else ""), "__struct_fields__", ())
        message = f"unknown field '{unknown[1]}'{did_you_mean(unknown[1], fields)}"
    word = re.search(r"Invalid enum value (.+)$", message)
    if word and (choices := typing.get_args(_literal_at(kind, paths[0] if paths else ""))):
        message = f"{word[1]} is none of {', '.join(map(str, choices))}"
    path = ".".join(p for p in reversed(paths) if p)
    return f"{message} - at `$.{path}`" if path else message


def _class_at(kind: Any, path: str) -> Any:
    """The class that msgspec's path (``run.steps``, ``blocks[0]``, ``heads[...]``) leads to from ``kind``."""
    options = [option for option in _options(_type_at(kind, path)) if isinstance(option, type)]
    return next((option for option in options if issubclass(option, Spec)), None)


def _literal_at(kind: Any, path: str) -> Any:
    """The choice of words that the path leads to."""
    options = _options(_type_at(kind, path))
    return next((option for option in options if typing.get_origin(option) is typing.Literal), None)


def _options(kind: Any) -> list[Any]:
    """What a type may be, ``None`` aside."""
    return [option for option in (*typing.get_args(kind), kind) if option is not type(None)]


def _type_at(kind: Any, path: str) -> Any:
    for step in re.findall(r"[^.\[\]]+|\[[^\]]*\]", path):
        if step.startswith("["):
            kind = typing.get_args(kind)[-1 if typing.get_origin(kind) is dict else 0]
            continue
        owner = next((o for o in _options(kind) if isinstance(o, type) and issubclass(o, Spec)), None)
        if owner is None or step not in owner.__struct_fields__:
            return None
        kind = typing.get_type_hints(owner)[step]
    return kind
