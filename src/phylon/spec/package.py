"""Packages that are also functions: ``phylon.train`` is a package, and ``phylon.train(…)`` is the public function."""

import inspect
import sys
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):
    """A package that runs its function of the same name when it is called."""

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function())

    def _function(self) -> Any:
        return getattr(self, self.__name__.rpartition(".")[2])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function()(*args, **kwargs)


def make_callable(package: str) -> None:
    """Let the package of that name be called; at the end of its ``__init__.py``."""
    sys.modules[package].__class__ = CallablePackage
