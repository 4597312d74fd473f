"""What is done about an item of the data that is empty or cannot be used: it ends the run, or is named and passed over.

Every source of many items has the fields of ``Policies``, and everything that reads items walks them with ``usable``.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeVar

from phylon.data.documents import DataSource
from phylon.spec.base import Mechanism
from phylon.spec.errors import UserError

A = TypeVar("A")
B = TypeVar("B")
Policy = Literal["refuse", "skip"]
"""``refuse`` ends the run with the item's name; ``skip`` names it in the log and goes on."""

_log = logging.getLogger("phylon.data")
_named: set[str] = set()


class Empty(UserError):
    """An item that holds nothing, which is not the same as one that is damaged or wrong."""


class Refused(UserError):
    """A problem that a source could pass over, with the setting that says so: ``place`` is the source's in a recipe."""

    def __init__(self, problem: UserError, name: str, place: str = "data.source") -> None:
        super().__init__(f"{problem}; {place}.{name}=skip passes over such items")
        self.problem, self.name, self.place = problem, name, place

    def within(self, place: str) -> "Refused":
        """The same of a source that is a part of another: ``place`` is where in it."""
        inner = self.place.removeprefix("data.source")
        return Refused(self.problem, self.name, f"data.source.{place}{inner}")


class Policies(Mechanism, DataSource, frozen=True, kw_only=True):
    """Fields of a source of many items.

    ``empty``: what is done about one that holds nothing where something is wanted, by which nothing is lost, so that it
    is passed over unless a recipe says otherwise. ``unreadable``: about one that is damaged, or in which something is
    missing or wrong, which somebody should know of.
    """

    empty: Policy = "skip"
    unreadable: Policy = "refuse"


def usable(source: object, items: Iterable[A], make: Callable[[A], B]) -> Iterator[B]:
    """What ``make`` gives for every item; one it refuses is passed over or ends the run, as ``source`` says.

    Where nothing at all can be used, the first problem is the error: then it is more likely the recipe's mistake.
    """
    found, first = False, None
    for item in items:
        try:
            made = make(item)
        except UserError as problem:
            passed_over(source, problem)
            first = first or problem
            continue
        found = True
        yield made
    if not found and first is not None:
        raise UserError(nothing_left(first)) from None


def nothing_left(first: UserError) -> str:
    """What is said where every item was passed over."""
    return f"nothing of the data can be used; the first problem: {first}"


def passed_over(source: object, problem: UserError) -> None:
    """Raise the problem, or say once in this process that the item it names is passed over."""
    if policy(source, _name(problem)) != "skip":
        raise refused(source, problem)
    message = f"passed over: {problem}"
    if message not in _named:
        _named.add(message)
        _log.warning(message)


def refused(source: object, problem: UserError) -> UserError:
    """The problem of an item that nobody passes over any more, with the setting that would have, if there is one."""
    name = _name(problem)
    return Refused(problem, name) if policy(source, name) == "refuse" and not isinstance(problem, Refused) else problem


def _name(problem: UserError) -> Literal["empty", "unreadable"]:
    return "empty" if isinstance(problem, Empty) else "unreadable"


def policy(source: Any, name: Literal["empty", "unreadable"]) -> Policy | None:
    """What a source, or the one that it is a part of, says; ``None`` where it has no such setting."""
    while hasattr(inner := getattr(source, "source", None), "fingerprint"):
        source = inner
    return getattr(source, name, None)
