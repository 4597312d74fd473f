"""One dispatch for every op: backends say what they support and why not, and the first that supports a call runs it."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from phylon.ops.checks import transformed
from phylon.spec.errors import UserError, did_you_mean

C = TypeVar("C", contravariant=True)


class Backend(Protocol[C]):
    """One implementation of an op."""

    name: str

    def available(self) -> str | None:
        """``None``, or why this machine cannot run the backend."""

    def supports(self, call: C) -> str | None:
        """``None``, or why the backend refuses this call."""

    def run(self, call: C) -> Any:
        """The result: a tensor, or a tuple of them where the op says so."""


@runtime_checkable
class Noted(Protocol):
    """A backend that computes in more than one way."""

    def note(self) -> str:
        """Which way it is on this machine, and why."""


@dataclass(frozen=True)
class Reason:
    """One line of ``explain``: the backend, whether it was chosen, why not if it cannot run, how it computes here."""

    backend: str
    chosen: bool
    reason: str | None
    note: str | None = None


class Dispatch(Generic[C]):
    """The backends of one op, in measured order, fastest first; the reference comes last and supports everything.

    ``first`` may name a backend that is asked before all others about this call, where one order does not fit all.
    """

    def __init__(self, op: str, backends: list[Backend[C]], first: Callable[[C], str | None] | None = None) -> None:
        self.op, self.first = op, first
        self.backends = {backend.name: backend for backend in backends}
        self.forced: str | None = None

    def pick(self, call: C, name: str | None = None) -> Backend[C]:
        """The backend that runs ``call``; a forced one that refuses raises with its reason."""
        name = name or self.forced
        if name is not None:
            backend = self._named(name)
            reason = self._refusal(name, call)
            if reason:
                raise UserError(f"{self.op} backend '{name}' cannot run this call: {reason}")
            return backend
        first = None if self.first is None else self.first(call)
        if first is not None and not self._refusal(first, call):
            return self.backends[first]
        for name, backend in self.backends.items():
            if self._refusal(name, call) is None:
                return backend
        raise AssertionError(f"no backend of {self.op} supports the call, not even the reference")

    def explain(self, call: C, backend: str | None = None) -> list[Reason]:
        """Every backend with the reason why it would not run ``call``; ``backend`` as in ``pick``."""
        named = backend or self.forced
        if named is not None:
            self._named(named)
        reasons = {name: self._refusal(name, call) for name in self.backends}
        chosen = named or self.pick(call).name
        return [
            Reason(name, name == chosen and reason is None, reason, note_of(self.backends[name]))
            for name, reason in reasons.items()
        ]

    @contextmanager
    def force(self, name: str) -> Generator[None]:
        """Run every call inside the block on one backend."""
        self._named(name)
        before, self.forced = self.forced, name
        try:
            yield
        finally:
            self.forced = before

    def _refusal(self, name: str, call: C) -> str | None:
        backend = self.backends[name]
        if name != "reference" and transformed():
            return "torch.func and forward-mode differentiation see into the reference alone"
        return backend.available() or backend.supports(call)

    def _named(self, name: str) -> Backend[C]:
        if name not in self.backends:
            raise UserError(f"unknown {self.op} backend '{name}'{did_you_mean(name, self.backends)}")
        return self.backends[name]


def note_of(backend: object) -> str | None:
    """What a backend says of how it computes on this machine, if it has a choice."""
    return backend.note() if isinstance(backend, Noted) else None
