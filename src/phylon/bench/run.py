"""Running a case: check, time, weigh, and put the figures beside each other."""

import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from phylon.bench import clock, machine, memory
from phylon.bench.case import Case, Cell, Key, Planned, find
from phylon.ops.native import ready
from phylon.spec.errors import UserError

Row = dict[str, Any]
"""One side of one cell, ready for JSON: ``case key side ms fastest slowest rounds dropped clean extra_mib rates`` and
``speedup`` over ``base``; or ``error`` or ``refused`` in place of every figure."""


def run(
    name: str,
    *,
    only: Mapping[str, list[str]] | None = None,
    sides: list[str] | None = None,
    against: str | None = None,
    rounds: int = 5,
    seconds: float = 30.0,
    progress: Callable[[Row], None] = lambda row: None,
) -> dict[str, Any]:
    """Measure the cells of case ``name``: ``{"machine": …, "rows": [Row]}``.

    ``only`` keeps the cells whose key has one of the given values; ``sides`` keeps those contenders. ``against`` is a
    peer of the case, which then takes part and is what the others' ``speedup`` refers to; a cell that it refuses has
    none. Every side of a cell is timed
    in each of ``rounds`` rounds, or for about ``seconds`` a cell.
    """
    if rounds < 1 or not seconds > 0:
        raise UserError(f"rounds must be at least 1 and seconds above 0, got {rounds} and {seconds}")
    found = find(name)
    peers = frozenset(_peer(found, against))
    planned = _chosen(found, only or {})
    ready.wait()  # a kernel that is still being compiled would be missing from the figures
    rows: list[Row] = []
    for plan in planned:
        for row in _cell(found.name, plan, peers, sides, against, rounds, seconds):
            rows.append(row)
            progress(row)
    return {"machine": machine.describe(), "rows": rows}


def _peer(found: Case, against: str | None) -> Iterator[str]:
    if against is None or against not in found.peers:
        return
    reason = found.peers[against]()
    if reason:
        raise UserError(f"'{found.name}' cannot be measured against {against}: {reason}")
    yield against


def _chosen(found: Case, only: Mapping[str, list[str]]) -> list[Planned]:
    planned = list(found.plan())
    known = {name for plan in planned for name in plan.key}
    for name in only:
        if name not in known:
            raise UserError(f"cells of '{found.name}' have no '{name}'; they have {', '.join(sorted(known))}")
    for name, values in only.items():
        there = {str(plan.key.get(name)) for plan in planned}
        wrong = [value for value in values if value not in there]
        if wrong:
            raise UserError(f"no cell of '{found.name}' has {name}={wrong[0]}; there are {', '.join(sorted(there))}")
    chosen = [p for p in planned if all(str(p.key.get(name)) in values for name, values in only.items())]
    if not chosen:
        values = {name: sorted({str(p.key.get(name)) for p in planned}) for name in only}
        raise UserError(
            "no cell is left; there are " + "; ".join(f"{name} = {', '.join(v)}" for name, v in values.items())
        )
    return chosen


def _cell(
    name: str,
    plan: Planned,
    peers: frozenset[str],
    wanted: list[str] | None,
    against: str | None,
    rounds: int,
    seconds: float,
) -> Iterator[Row]:
    cell = plan.build(peers)
    for side, reason in cell.refused.items():
        if wanted is None or side in wanted or side == against:
            yield _row(name, plan.key, side) | {"refused": reason}
    kept = {s: call for s, call in cell.sides.items() if wanted is None or s in wanted or s == against}
    unknown = [s for s in wanted or () if s not in cell.sides and s not in cell.refused]
    if unknown:
        sides = ", ".join((*cell.sides, *cell.refused))
        raise UserError(f"'{name}' at {words(plan.key)} has no side '{unknown[0]}'; it has {sides}")
    if against is not None and against not in kept and against not in cell.refused:
        raise UserError(f"'{name}' at {words(plan.key)} has no side '{against}'; it has {', '.join(cell.sides)}")
    right: dict[str, Callable[[], Any]] = {}
    for side, call in kept.items():
        wrong = _wrong(cell, side, call)
        if wrong:
            yield _row(name, plan.key, side) | {"error": wrong}
        else:
            right[side] = call
    if not right:
        return
    measured = clock.measure(right, rounds=rounds, seconds=seconds)
    base = against if against in right else next(iter(right)) if against is None else None
    for side, call in right.items():
        timing, extra = measured.timings[side], memory.extra_bytes(call)
        row = _row(name, plan.key, side) | {
            "ms": timing.median * 1e3,
            "fastest": timing.spread[0] * 1e3,
            "slowest": timing.spread[1] * 1e3,
            "rounds": len(timing.seconds),
            "dropped": measured.dropped,
            "clean": measured.clean,
            "extra_mib": None if extra is None else extra / 2**20,
            "rates": {unit: amount / timing.median for unit, amount in cell.amounts.items()},
        }
        yield row | ({} if base is None else {"base": base, "speedup": measured.ratio(side, base)})


def _wrong(cell: Cell, side: str, call: Callable[[], Any]) -> str | None:
    """Why the side has no speed: the oracle's verdict, or the error it ended with."""
    try:
        return cell.oracle(side, call())
    except UserError as error:
        return str(error)
    except Exception as error:  # a peer may fail in any way; its row says how
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''} ({last.name})"


def _row(name: str, key: Key, side: str) -> Row:
    return {"case": name, "key": dict(key), "side": side}


def words(key: Key) -> str:
    """``n=4096 dtype=f32``."""
    return " ".join(f"{name}={value}" for name, value in key.items())
