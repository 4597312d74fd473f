"""What can be measured: a case is a name and its cells, a cell is one piece of work and the sides that do it."""

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from phylon.spec.errors import UserError, did_you_mean

Key = Mapping[str, str | int]
"""What a cell measures: ``{"n": 4096, "pattern": "causal", "dtype": "f32", "pass": "forward"}``."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One piece of work.

    ``sides`` do it, by name: a call is what is timed, and it returns all that it made (outputs, gradients), which is
    not counted as its memory. ``oracle`` gets a side's name and what it returned: ``None``, or what is wrong with it; a
    side that fails has no speed. ``amounts`` is the work of a call by its unit, for rates: ``{"tokens": 4096}``.
    ``refused`` says why sides are missing.
    """

    sides: Mapping[str, Callable[[], Any]]
    oracle: Callable[[str, Any], str | None]
    amounts: Mapping[str, float] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Planned:
    """A cell that is not built yet: ``build(peers)`` makes its inputs, with those of ``peers`` as further sides."""

    key: Key
    build: Callable[[frozenset[str]], Cell]


@dataclass(frozen=True)
class Case:
    """A name, its cells, and the peers it can be measured against: ``None``, or why one is not at hand."""

    name: str
    title: str
    plan: Callable[[], Iterable[Planned]]
    peers: Mapping[str, Callable[[], str | None]]


_cases: dict[str, Case] = {}


def case(
    name: str, *, peers: Mapping[str, Callable[[], str | None]] | None = None
) -> Callable[[Callable[[], Iterable[Planned]]], Callable[[], Iterable[Planned]]]:
    """Register a function that plans the cells of ``name``; its docstring's first line is the title."""

    def enter(plan: Callable[[], Iterable[Planned]]) -> Callable[[], Iterable[Planned]]:
        assert plan.__doc__, "a case says what it measures"
        _cases[name] = Case(name, plan.__doc__.splitlines()[0], plan, peers or {})
        return plan

    return enter


def all_cases() -> dict[str, Case]:
    """Every case by name."""
    import phylon.bench.cases as topics

    for info in pkgutil.iter_modules(topics.__path__, f"{topics.__name__}."):
        importlib.import_module(info.name)
    return dict(sorted(_cases.items()))


def find(name: str) -> Case:
    """The case of that name, with a near-miss hint where there is none."""
    known = all_cases()
    if name not in known:
        raise UserError(f"there is no benchmark '{name}'{did_you_mean(name, known)}; known: {', '.join(known)}")
    return known[name]


def package(name: str) -> Callable[[], str | None]:
    """For ``peers``: a package that must be installed."""
    return lambda: None if importlib.util.find_spec(name) else f"{name} is not installed"
