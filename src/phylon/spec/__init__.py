"""Typed specs: base classes, registry, serialisation, overrides, errors."""

from phylon.spec.base import (
    Embed,
    FeedForward,
    Head,
    Init,
    Mechanism,
    Mixer,
    Norm,
    Op,
    Pool,
    Position,
    RopeScaling,
    ScoreBias,
    Shared,
    Slot,
    Spec,
)
from phylon.spec.errors import UserError, did_you_mean
from phylon.spec.override import override, parse_assignment
from phylon.spec.registry import build, entries, entry_of, register
from phylon.spec.serial import from_data, from_json, from_toml, to_data, to_json, to_toml

__all__ = [
    "Embed",
    "FeedForward",
    "Head",
    "Init",
    "Mechanism",
    "Mixer",
    "Norm",
    "Op",
    "Pool",
    "Position",
    "RopeScaling",
    "ScoreBias",
    "Shared",
    "Slot",
    "Spec",
    "UserError",
    "build",
    "did_you_mean",
    "entries",
    "entry_of",
    "from_data",
    "from_json",
    "from_toml",
    "override",
    "parse_assignment",
    "register",
    "to_data",
    "to_json",
    "to_toml",
]
