"""What a family is: a builder, presets, and how foreign formats say it. One registration a file."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from phylon.checkpoint import Layout
from phylon.checkpoint.files import quoted
from phylon.checkpoint.source import TensorSource
from phylon.families.lacking import lacking
from phylon.families.neutral import CHECKED, NEUTRAL, refusal, shown
from phylon.families.passed import wrong
from phylon.model.spec import ModelSpec
from phylon.spec.errors import UserError, did_you_mean

_MISSING = object()
MOST = 1e12


def _quoted_values(message: str) -> list[tuple[str, str]]:
    """What a refusal quotes, each with the word it is said of: what it got and the arguments it is held against, else
    every number that is no limit."""
    pairs = re.findall(r"(\w+) '?(-?\d[\w.+-]*(?<![.]))", message)
    _, found, got = message.rpartition("got ")
    if found:
        values = [(message.split()[0], value.strip(".")) for value in re.findall(r"[^\s',;()]+", got)]
        return values + [(word, value) for word, value in pairs if "_" in word]
    return [(word, value) for word, value in pairs if word not in ("least", "below", "above", "from", "to", "most")]


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The values of a table, a list and what is in them, each with the way to it; an item's is that of its list."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    elif isinstance(value, list):
        for inner in value[:64]:
            yield from _leaves(key, inner)
    else:
        yield key, value


def _is(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Whether ``value`` is of a kind; true and false are no numbers."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds)


def _as_float(value: Any) -> str:
    """How a message shows a whole number that a builder has made a float of."""
    return str(float(value)) if isinstance(value, int) and abs(value) < 2**53 else str(value)


class Config:
    """A foreign configuration, read completely: every key is taken, expected, or ignored with a reason."""

    def __init__(
        self,
        data: Mapping[str, Any],
        where: str = "config.json",
        stored: Callable[[], Collection[str] | None] | None = None,
    ) -> None:
        self._data = dict(data)
        self._left = set(data) - NEUTRAL - CHECKED
        self._stored = stored
        self._taken: list[tuple[str, Any]] = []
        self.where = where
        refused = refusal(data)
        if refused is not None:
            raise UserError(f"{where}: {refused}")
        self._pass_over(NEUTRAL & data.keys())

    def but(self, changes: Mapping[str, Any], without: Collection[str] = ()) -> "Config":
        """The same file with other values of some keys, and without those that are understood already."""
        data = {key: value for key, value in self._data.items() if key not in without}
        return Config(data | dict(changes), self.where, self._stored)

    def stores(self, part: str, default: bool) -> bool:
        """Whether a tensor with ``part`` in its name lies beside the file; ``default`` where that is not known.

        For what a format says by its tensors alone: BERT's pooler. Only headers are read.
        """
        names = None if self._stored is None else self._stored()
        return default if names is None else any(part in name for name in names)

    def __contains__(self, key: str) -> bool:
        """Whether the file holds ``key``, be it null."""
        return key in self._data

    def take(self, key: str, default: Any = _MISSING, kind: type | tuple[type, ...] | None = None) -> Any:
        """The value of ``key``; a one-line error where it is missing or of the wrong kind.

        Null is no value: it stands for the default only where that is null too, or "no", which is how it is read.
        """
        self._left.discard(key)
        value = self._data.get(key, _MISSING)
        if value is _MISSING or (value is None and default is not _MISSING):
            if default is _MISSING:
                raise UserError(f"{self.where} lacks '{key}'")
            if value is None and default is not None and default is not False:
                raise self._null(key, default)
            return default
        if kind is not None and not _is(value, kind):
            wanted = kind.__name__ if isinstance(kind, type) else " or ".join(k.__name__ for k in kind)
            raise UserError(f"{self.where}: '{key}' must be {wanted}, got {shown(value)}")
        if isinstance(value, str) and (len(value) > 100 or not value.isprintable()):
            raise UserError(f"{self.where}: '{key}' is {shown(value)}, which is no plain name")
        self._taken += _leaves(key, value)
        return value

    def agree(self, said: Mapping[str, Any]) -> None:
        """Refuse values of keys that say the same thing where two of them differ; null says nothing."""
        held = [(key, value) for key, value in said.items() if value is not None]
        for key, value in held[1:]:
            first, other = held[0]
            if value != other or isinstance(value, bool) != isinstance(other, bool):
                raise UserError(
                    f"{self.where}: {quoted(first)} is {shown(other)} and {quoted(key)} is {shown(value)}, which say "
                    "the same thing: correct or remove one of them"
                )

    def name_of(self, key: str, *others: str) -> str:
        """Which of the names of one thing the file gives it, ``key`` where it gives none; all of them must agree."""
        said = {name: self._data[name] for name in (key, *others) if self._data.get(name) is not None}
        self.agree(said)
        self.ignore(*others)
        return next(iter(said), key)

    def blame(self, error: UserError) -> UserError:
        """A builder's refusal, which names our arguments, with the file and the keys whose values it quotes."""
        message = str(error)
        if self.where in message:
            return error
        keys = [key for word, quoted_value in _quoted_values(message) for key in self._holding(word, quoted_value)]
        said = ", ".join(quoted(key) for key in dict.fromkeys(keys))
        return UserError(f"{self.where}: {message}{f' (from {said})' if said else ''}")

    def _holding(self, word: str, value: str) -> list[str]:
        """The keys of one value; of several those that share a part of their name with our word for it."""
        keys = [k for k, v in self._taken if not isinstance(v, bool) and value in (str(v), _as_float(v))]
        parts = {part.rstrip("s") for part in word.split("_")} - {"n", "d"}
        return [key for key in keys if any(part in key for part in parts)] or keys

    def size(self, key: str, default: Any = _MISSING, most: int = 2**28) -> int:
        """A whole number from 1 to ``most``, so that a hostile file cannot ask for the impossible."""
        value = self.take(key, default, int)
        if value is not None and not 1 <= value <= most:
            raise UserError(f"{self.where}: '{key}' is {shown(value)}; it must be from 1 to {most}")
        return value

    def depth(self, key: str) -> int:
        """A number of blocks or layers."""
        return self.size(key, most=4096)

    def number(self, key: str, default: Any = _MISSING, above: float = -MOST) -> float:
        """A finite number above ``above`` (and at most 1e12: none that is meant is greater)."""
        value = self.take(key, default, (int, float))
        if not above < value <= MOST:
            limits = f"above {above:g} and at most {MOST:g}" if above > -MOST else "a finite number of sensible size"
            raise UserError(f"{self.where}: '{key}' is {shown(value)}; it must be {limits}")
        return float(value)

    def expect(self, key: str, *allowed: Any, why: str) -> None:
        """Refuse a value that changes the maths in a way this family does not compute."""
        if key in self and self._data[key] is None and None not in allowed and allowed[0] is not False:
            raise self._null(key, allowed[0])
        value = self.take(key, None)
        if value is not None and not any(
            value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed
        ):
            raise UserError(f"{self.where}: '{key}' is {shown(value)}, which is not supported: {why}")

    def _null(self, key: str, default: Any) -> UserError:
        return UserError(f"{self.where}: '{key}' is null; give its value, or remove it for {shown(default)}")

    def ignore(self, *keys: str) -> None:
        """Keys that do not change the maths of a forward pass; each still holds what the reference has there."""
        self._left.difference_update(keys)
        self._pass_over(keys)

    def _pass_over(self, keys: Collection[str]) -> None:
        for key in keys:
            wanted = wrong(key, self._data.get(key))
            if wanted is not None:
                raise UserError(f"{self.where}: '{key}' must be {wanted}, got {shown(self._data[key])}")

    def finish(self, beside: str = "") -> None:
        """Refuse what nobody read: an unknown key may change the maths. ``beside``: the key that decides what may stand
        here."""
        if self._left:
            names = ", ".join(quoted(key) for key in sorted(self._left)[:6])
            where = f" beside '{beside}' {shown(self._data.get(beside))}" if beside else ""
            raise UserError(f"{self.where}: not understood{where}, and it may change the maths: {names}")


@dataclass(frozen=True, kw_only=True)
class HFFormat:
    """Hugging Face folders of a family. ``write`` raises ``UserError`` for a spec the format cannot say.

    ``stems``: what its classes' names begin with where that is not its model_type. ``departs``: why the reference's
    class computes something else than the configuration says, where it does.
    """

    model_types: tuple[str, ...]
    read: Callable[[Config], ModelSpec]
    write: Callable[[ModelSpec], dict[str, Any]]
    layout: Callable[[ModelSpec], Layout]
    stems: tuple[str, ...] = ()
    departs: Callable[[ModelSpec], str | None] = lambda spec: None


@dataclass(frozen=True, kw_only=True)
class GGUFFormat:
    """GGUF files of a family. Some numbers are stored as tensors: ``read`` sees the source, ``extra`` writes them."""

    architectures: tuple[str, ...]
    read: Callable[[Config, TensorSource], ModelSpec]
    write: Callable[[ModelSpec], dict[str, Any]]
    layout: Callable[[ModelSpec], Layout]
    extra: Callable[[ModelSpec], dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One paper's architecture. ``cases`` are tiny specs for the tests, with every variant the family has."""

    name: str
    title: str
    paper: str
    builder: Callable[..., ModelSpec]
    presets: Mapping[str, Callable[[], ModelSpec]]
    cases: Callable[[], list[ModelSpec]]
    hf: HFFormat | None = None
    gguf: GGUFFormat | None = None
    golden: Mapping[str, int] = field(default_factory=dict)


_families: dict[str, Family] = {}


def register_family(family: Family) -> None:
    """Enter a family; its name and its presets' names must be new."""
    _families[family.name] = family


def families() -> list[Family]:
    """Every registered family, by name."""
    return sorted(_families.values(), key=lambda f: f.name)


def family(name: str) -> Family:
    """The family of one name."""
    if name not in _families:
        raise UserError(f"unknown family '{name}'{did_you_mean(name, _families)}")
    return _families[name]


def presets() -> dict[str, Callable[[], ModelSpec]]:
    """Every preset of every family, by name."""
    return {name: make for f in families() for name, make in f.presets.items()}


def _folded(name: str) -> str:
    return re.sub(r"[-_.\s]", "", name.lower())


def preset(name: str) -> ModelSpec:
    """The spec of a named model; dashes, dots and case do not matter."""
    return presets()[_preset_name(name)]()


def family_of_preset(name: str) -> Family:
    """The family that a named model belongs to."""
    name = _preset_name(name)
    return next(f for f in families() if name in f.presets)


def _preset_name(name: str) -> str:
    known = presets()
    found = name if name in known else {_folded(key): key for key in known}.get(_folded(name))
    if found is None:
        raise UserError(f"unknown preset '{name}'{did_you_mean(name, known)}")
    return found


def hf_format(model_type: str, config: Mapping[str, Any] | None = None) -> tuple[Family, HFFormat]:
    """The family that reads one ``model_type``; ``config``: what may say why there is none."""
    known = {m: f for f in families() if f.hf for m in f.hf.model_types}
    found = known.get(model_type)
    if found is None or found.hf is None:
        near = did_you_mean(model_type, known)
        raise UserError(
            f"unknown model_type {quoted(model_type)}{near if 'did you mean' in near else ''}: "
            f"{lacking(model_type, config or {})} (known: {', '.join(sorted(known))})"
        )
    return found, found.hf


def gguf_format(architecture: str) -> tuple[Family, GGUFFormat]:
    """The family that reads one GGUF architecture."""
    known = {a: f for f in families() if f.gguf for a in f.gguf.architectures}
    found = known.get(architecture)
    if found is None or found.gguf is None:
        raise UserError(f"unknown GGUF architecture {quoted(architecture)}{did_you_mean(architecture, known)}")
    return found, found.gguf
