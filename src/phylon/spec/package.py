"""Packages that are also functions: ``phylon.train`` is a package, and ``phylon.train(…)`` is the public function."""

import sys
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):
    """A package that runs its function of the same name when it is called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **kwargs)


def make_callable(package: str) -> None:
    """Let the package of that name be called; at the end of its ``__init__.py``."""
    sys.modules[package].__class__ = CallablePackage
