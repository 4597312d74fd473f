"""Phylon: one block, every Transformer. Public names load on first use, so that importing costs little."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phylon.account import account
    from phylon.families import build, preset
    from phylon.generate import encode
    from phylon.hub import load, save
    from phylon.model import Model, ModelSpec, record
    from phylon.spec import UserError, override

__version__ = "0.1.0"

_PUBLIC = {
    "Model": "phylon.model",
    "ModelSpec": "phylon.model",
    "UserError": "phylon.spec.errors",
    "account": "phylon.account",
    "build": "phylon.families",
    "encode": "phylon.generate",
    "load": "phylon.hub",
    "override": "phylon.spec",
    "preset": "phylon.families",
    "record": "phylon.model",
    "save": "phylon.hub",
}

__all__ = [
    "Model",
    "ModelSpec",
    "UserError",
    "account",
    "build",
    "encode",
    "load",
    "override",
    "preset",
    "record",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'phylon' has no attribute '{name}'")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
