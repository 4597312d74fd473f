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


class Policies(Mechanism, DataSource, frozen=True, kw_only=True):
    """Fields of a source of many items.

    ``empty``: what is done about one that holds no text where some is wanted. ``unreadable``: about one that is
    damaged, or in which something is missing or wrong.
    """

    empty: Policy = "refuse"
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
        raise UserError(f"nothing of the data can be used; the first problem: {first}") from None


def passed_over(source: object, problem: UserError) -> None:
    """Raise the problem, or say once in this process that the item it names is passed over."""
    if policy(source, "empty" if isinstance(problem, Empty) else "unreadable") == "refuse":
        raise problem
    message = f"passed over: {problem}"
    if message not in _named:
        _named.add(message)
        _log.warning(message)


def policy(source: Any, name: Literal["empty", "unreadable"]) -> Policy:
    """What a source, or the one that it is a part of, says; items of a source that says nothing are refused."""
    while hasattr(inner := getattr(source, "source", None), "fingerprint"):
        source = inner
    return getattr(source, name, "refuse")
