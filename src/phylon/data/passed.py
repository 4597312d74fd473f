"""What to do with a document that is empty or cannot be read in the middle of the data: refuse it, or pass over it."""

import logging
from typing import Literal

from phylon.spec.errors import UserError

Policy = Literal["refuse", "skip"]
"""``refuse`` ends the run with the document's name; ``skip`` names it in the log and goes on."""

_log = logging.getLogger("phylon.data")
_named: set[str] = set()


def passed_over(policy: Policy, problem: UserError) -> None:
    """Raise the problem, or say once in this process that the document it names is passed over."""
    if policy == "refuse":
        raise problem
    message = f"passed over: {problem}"
    if message not in _named:
        _named.add(message)
        _log.warning(message)
