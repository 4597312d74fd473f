"""The registry: every mechanism enters it once; tests, docs, accounting and the converter iterate over it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from phylon.spec.base import Mechanism, Slot
from phylon.spec.errors import UserError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One registered mechanism.

    ``cases`` yields small valid specs for the contract tests. ``flops(spec, width, n_keys)`` is the matrix-product
    FLOPs of one token's forward pass (a multiply-add counts two; all ``n_keys`` keys are counted). ``exceptions`` maps
    a cell of the law ("chunks", "padding", …) to the reason why the mechanism cannot obey it.
    """

    kind: str
    spec: type[Mechanism]
    slot: type[Slot]
    module: Callable[..., Any] | None
    paper: str
    cases: Callable[[], Iterable[Slot]]
    flops: Callable[[Any, int, int], int] | None
    exceptions: Mapping[str, str] = field(default_factory=dict)


_entries: dict[str, Entry] = {}


def slot_of(spec: type) -> type[Slot]:
    """The slot a mechanism class fills: the first plain slot class among its bases."""
    for base in spec.__mro__:
        if issubclass(base, Slot) and not issubclass(base, Mechanism):
            return base
    raise AssertionError(f"{spec.__name__} fills no slot")


def register(
    spec: type[Mechanism],
    *,
    module: Callable[..., Any] | None = None,
    paper: str,
    cases: Callable[[], Iterable[Slot]],
    flops: Callable[[Any, int, int], int] | None = None,
    exceptions: Mapping[str, str] | None = None,
) -> None:
    """Enter a mechanism: its spec class, the ``nn.Module`` it builds, the paper that defines it, and its test cases."""
    kind = str(spec.__struct_config__.tag)
    known = _entries.get(kind)
    if known is not None and known.spec.__module__ != spec.__module__:
        raise UserError(f"mechanism '{kind}' is already registered by {known.spec.__module__}; rename the class")
    _entries[kind] = Entry(
        kind=kind,
        spec=spec,
        slot=slot_of(spec),
        module=module,
        paper=paper,
        cases=cases,
        flops=flops,
        exceptions=exceptions or {},
    )


def entries(slot: type[Slot] = Slot) -> Iterator[Entry]:
    """Every registered mechanism that fills ``slot`` (or any slot), by kind."""
    yield from sorted((e for e in _entries.values() if issubclass(e.spec, slot)), key=lambda e: e.kind)


def entry_of(spec: Slot | Mechanism) -> Entry:
    """The entry of a mechanism."""
    assert isinstance(spec, Mechanism), f"{type(spec).__name__} is no mechanism"
    return _entries[str(spec.__struct_config__.tag)]


def find(slot: type[Slot], kind: str) -> type[Mechanism]:
    """The spec class registered as ``kind`` for ``slot``; a near-miss hint where there is none."""
    entry = _entries.get(kind)
    if entry is None or not issubclass(entry.spec, slot):
        known = [e.kind for e in entries(slot)]
        raise UserError(f"unknown {slot.__name__} '{kind}'{did_you_mean(kind, known)}")
    return entry.spec


def build(spec: Slot, *args: Any) -> Any:
    """The module a mechanism describes."""
    module = entry_of(spec).module
    assert module is not None, f"{type(spec).__name__} describes no module"
    return module(spec, *args)
