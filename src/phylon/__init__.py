"""Phylon: one block, every Transformer. Public names load on first use, so that importing costs little."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phylon.account import account
    from phylon.families import build, preset
    from phylon.generate import encode, generate, stream
    from phylon.hub import load, save
    from phylon.model import Model, ModelSpec, record
    from phylon.spec import UserError, override
    from phylon.train import train

__version__ = "0.1.0"

_PUBLIC = {
    "Model": "phylon.model",
    "ModelSpec": "phylon.model",
    "UserError": "phylon.spec.errors",
    "account": "phylon.account",
    "build": "phylon.families",
    "encode": "phylon.generate",
    "generate": "phylon.generate",
    "load": "phylon.hub",
    "override": "phylon.spec",
    "preset": "phylon.families",
    "record": "phylon.model",
    "save": "phylon.hub",
    "stream": "phylon.generate",
    "train": "phylon.train",
}

__all__ = [
    "Model",
    "ModelSpec",
    "UserError",
    "account",
    "build",
    "encode",
    "generate",
    "load",
    "override",
    "preset",
    "record",
    "save",
    "stream",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'phylon' has no attribute '{name}'")
    module = importlib.import_module(_PUBLIC[name])
    # ``phylon.train`` is a package and a function in one (``spec.package``).
    value = module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
