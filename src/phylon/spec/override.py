"""Dotted overrides with wildcards: ``decoder.blocks.*.attn.pattern.size=64`` on a spec tree."""

import re
import tomllib
import typing
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from phylon.spec.base import Mechanism, Spec
from phylon.spec.errors import UserError, did_you_mean
from phylon.spec.registry import find, slot_of
from phylon.spec.serial import from_data

S = TypeVar("S", bound=Spec)


class _NoSuchPlace(UserError):
    """The path names nothing here; under a ``*`` other elements may still have it."""


def parse_assignment(text: str) -> tuple[str, Any]:
    """``"a.b=3"`` -> ``("a.b", 3)``. The value is read as TOML; what is not TOML is a string.

    ``none`` and ``null`` are ``None``, which takes an optional part out.
    """
    path, sign, value = text.partition("=")
    if not sign or not path.strip():
        raise UserError(f"'{text}' is not an assignment; write path=value, for example optim.lr=3e-4")
    return path.strip(), parse_value(value.strip())


def parse_value(text: str) -> Any:
    """A TOML value, ``None`` for ``none`` and ``null``, else the text itself."""
    if text.lower() in ("none", "null"):
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def override(spec: S, changes: Mapping[str, Any]) -> S:
    """``spec`` with every path in ``changes`` set. ``*`` stands for every element that has the rest of the path."""
    for path, value in changes.items():
        spec = _set(spec, path.split("."), value, path)
    return spec


def _set(node: Any, parts: list[str], value: Any, path: str) -> Any:
    head, rest = parts[0], parts[1:]
    if isinstance(node, Mechanism) and parts == ["kind"]:
        return _of_kind(node, value, path)
    if isinstance(node, Spec):
        return _set_field(node, head, rest, value, path)
    if isinstance(node, tuple):
        indices = list(range(len(node))) if head == "*" else [_index(head, len(node), path)]
        return tuple(_set_items(dict(enumerate(node)), indices, rest, value, path).values())
    if isinstance(node, dict):
        keys = list(node) if head == "*" else [head]
        unknown = [key for key in keys if key not in node]
        if unknown:
            raise _NoSuchPlace(f"'{path}': no entry '{head}'{did_you_mean(head, node)}")
        return _set_items(node, keys, rest, value, path)
    raise _NoSuchPlace(f"'{path}': nothing below '{head}' can be set ({type(node).__name__} has no fields)")


def _set_items(items: dict[Any, Any], keys: list[Any], rest: list[str], value: Any, path: str) -> dict[Any, Any]:
    """``items`` with ``value`` at the places that exist; an error when none does."""
    changed, missing = {}, None
    for key in keys:
        try:
            changed[key] = _set(items[key], rest, value, path) if rest else value
        except _NoSuchPlace as error:
            missing = error
    if not changed:
        raise missing or _NoSuchPlace(f"'{path}': '*' matches nothing, there are no elements")
    return items | changed


def _set_field(node: Spec, head: str, rest: list[str], value: Any, path: str) -> Any:
    aliases: Mapping[str, str] = node.aliases() if hasattr(node, "aliases") else {}
    if head in aliases:
        return _set(node, aliases[head].split(".") + rest, value, path)
    if head not in node.__struct_fields__:
        known = [*node.__struct_fields__, *aliases]
        raise _NoSuchPlace(f"'{path}': unknown field '{head}' of {type(node).__name__}{did_you_mean(head, known)}")
    new = _convert(node, head, _set(getattr(node, head), rest, value, path) if rest else value, path)
    try:
        return node.replace(**{head: new})
    except (ValueError, TypeError) as error:
        raise UserError(f"'{path}': {error}") from None


def _of_kind(node: Mechanism, kind: Any, path: str) -> Any:
    """The mechanism ``kind`` in the place of ``node``: its defaults, and what ``node`` says beside its own defaults.

    A field of the same name goes over where the new kind takes it.
    """
    if not isinstance(kind, str):
        raise UserError(f"'{path}': a kind is a name, got {kind!r}")
    try:
        wanted = find(slot_of(type(node)), kind)
    except UserError as error:
        raise UserError(f"'{path}': {error}") from None
    if isinstance(node, wanted):
        return node
    said = {
        field.name: getattr(node, field.name)
        for field in msgspec.structs.fields(node)
        if field.name in wanted.__struct_fields__ and getattr(node, field.name) != _default(field)
    }
    needed = {field.name for field in msgspec.structs.fields(wanted) if field.required}
    data: dict[str, Any] = {"kind": kind, **{name: said.pop(name) for name in sorted(needed & said.keys())}}
    if lacking := sorted(needed - data.keys()):
        table = f'{{ kind = "{kind}", {", ".join(f"{name} = …" for name in lacking)} }}'
        raise UserError(f"'{path}': {kind} needs {', '.join(lacking)}; set it whole: {path.rpartition('.')[0]}={table}")
    new = _made(wanted, data, path)
    for name, value in said.items():
        with suppress(UserError):  # says something else there
            new = _made(wanted, data | {name: value}, path)
            data[name] = value
    return new


def _made(wanted: type[Mechanism], data: dict[str, Any], path: str) -> Any:
    try:
        return from_data(wanted, data)
    except UserError as error:
        raise UserError(f"'{path}': {error}") from None


def _default(field: msgspec.structs.FieldInfo) -> Any:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def _convert(node: Spec, name: str, value: Any, path: str) -> Any:
    hint = typing.get_type_hints(type(node))[name]
    try:
        return from_data(hint, value)
    except UserError as error:
        raise UserError(f"'{path}': {error}") from None


def _index(text: str, length: int, path: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,9}", text) or not -length <= int(text) < length:
        raise _NoSuchPlace(f"'{path}': '{text}' is not an index from 0 to {length - 1}, nor '*'")
    return int(text) % length
