"""Figures for people, files of figures, and a comparison of the two."""

import json
import math
from pathlib import Path
from typing import Any

from phylon.bench.run import Row, words
from phylon.spec.errors import UserError, system_reason


def row_line(row: Row) -> str:
    """One side of one cell on a line."""
    name = f"{words(row['key'])}  {row['side']:<14}"
    if "refused" in row or "error" in row:
        return f"{name}  {'refused' if 'refused' in row else 'WRONG'}: {row.get('refused') or row['error']}"
    parts = [f"{row['ms']:>10.2f} ms ({row['fastest']:.2f} to {row['slowest']:.2f}, {row['rounds']} rounds)"]
    if not row["clean"]:
        parts.append("DISTURBED")
    if "speedup" in row:
        parts.append(f"{row['speedup']:.2f}x {row['base']}")
    parts += [f"{rate:,.3g} {unit}/s" for unit, rate in row["rates"].items()]
    if row["extra_mib"] is not None:
        parts.append(f"{row['extra_mib']:,.1f} MiB extra")
    return f"{name}  {'  '.join(parts)}"


def read(path: Path) -> dict[str, Any]:
    """A stored result."""
    try:
        stored = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read '{path}': {system_reason(error)}") from None
    except ValueError as error:
        raise UserError(f"{path} is no stored benchmark: {error}") from None
    if not isinstance(stored, dict) or not isinstance(stored.get("rows"), list):
        raise UserError(f"{path} is no stored benchmark: it has no rows")
    if not all(isinstance(row, dict) and {"case", "key", "side"} <= row.keys() for row in stored["rows"]):
        raise UserError(f"{path} is no stored benchmark: a row lacks its case, key or side")
    for row in stored["rows"]:
        ms = row.get("ms", 1.0)
        if isinstance(ms, bool) or not isinstance(ms, int | float) or not 0 < ms < math.inf:
            raise UserError(f"{path} is no stored benchmark: its row {_name(row)} has the time {ms!r}")
    return stored


def check_target(path: Path) -> None:
    """Refuse a file that ``store`` could not write, before anything is measured."""
    if path.is_dir():
        raise UserError(f"'{path}' is a folder; --out takes a file")
    if not path.parent.is_dir():
        raise UserError(f"the folder '{path.parent}' does not exist; make it first")
    if path.exists():
        read(path)


def store(path: Path, result: dict[str, Any]) -> None:
    """Write ``result``; rows that the file already has are replaced, others of it stay, each with its own machine.

    A row that stays loses its ``speedup`` where that refers to a row that is replaced: the two are of different runs.
    """
    rows = [row | {"machine": result["machine"]} for row in result["rows"]]
    new = {_name(row) for row in rows}
    old = [row for row in read(path)["rows"] if _name(row) not in new] if path.exists() else []
    for row in old:
        if "base" in row and _name(row | {"side": row["base"]}) in new:
            del row["base"], row["speedup"]
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps({"schema": 1, "rows": old + rows}, indent=1) + "\n")
    part.replace(path)


def compared(rows: list[Row], stored: dict[str, Any]) -> list[Row]:
    """The rows with ``stored_ms`` and ``change`` (stored over measured), where the file has the same cell and side."""
    known = {_name(row): row["ms"] for row in stored["rows"] if "ms" in row}
    return [
        row | {"stored_ms": known[_name(row)], "change": known[_name(row)] / row["ms"]}
        if "ms" in row and _name(row) in known
        else row
        for row in rows
    ]


def elsewhere(rows: list[Row], stored: dict[str, Any], machine: dict[str, Any]) -> str | None:
    """A word of warning where stored figures of these rows were measured on another machine, or nobody knows where."""
    compared_with = {_name(row) for row in rows if "change" in row}
    for row in stored["rows"]:
        there = row.get("machine")
        if _name(row) in compared_with and there != machine:
            found = there.get("processor") if isinstance(there, dict) else "an unknown machine"
            if isinstance(there, dict) and found == machine["processor"]:
                different = sorted(key for key in machine if there.get(key) != machine[key])
                found = f"a machine with other {', '.join(different)}"
            return f"stored figures are of {found}: their ratios say nothing of the code alone"
    return None


def _name(row: Row) -> str:
    return json.dumps([row["case"], row["key"], row["side"]], sort_keys=True)
