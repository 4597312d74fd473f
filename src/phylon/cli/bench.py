"""``phylon bench``: how fast, and how much memory."""

from pathlib import Path
from typing import Annotated

import typer

from phylon.cli.common import Json, note, print_json


def bench(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A case; without one, list them.")] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="SIDE|PEER|FILE", help="Compare with a side, an installed peer, or a stored result."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Keep these cells, such as n=4096; repeatable.")
    ] = None,
    side: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Keep these contenders; repeatable.")] = None,
    rounds: Annotated[int, typer.Option(metavar="N", help="Undisturbed rounds a cell.")] = 5,
    seconds: Annotated[float, typer.Option(metavar="S", help="Time a cell may take, about.")] = 30.0,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Put the figures into a JSON file.")] = None,
    as_json: Json = False,
) -> None:
    """Measure speed and memory; a side whose results are wrong has no speed."""
    from phylon.bench import all_cases, run
    from phylon.bench.machine import describe, line
    from phylon.bench.report import check_target, compared, elsewhere, read, row_line, store
    from phylon.bench.run import Row
    from phylon.spec.errors import UserError

    if name is None:
        rows = [{"name": c.name, "title": c.title, "peers": list(c.peers)} for c in all_cases().values()]
        print_json({"cases": rows}) if as_json else print("\n".join(f"{r['name']:<16}{r['title']}" for r in rows))
        return
    chosen: dict[str, list[str]] = {}
    for given in only or []:
        key, equals, value = given.partition("=")
        if not equals:
            raise UserError(f"--only takes KEY=VALUE, got '{given}'")
        chosen.setdefault(key, []).append(value)
    if out is not None:
        check_target(out)
    is_file = against is not None and (Path(against).is_file() or Path(against).suffix == ".json")
    stored = read(Path(against)) if against is not None and is_file else None
    machine, done = describe(), []
    if not as_json:
        note(line(machine))

    def progress(row: Row) -> None:
        done.append(row)
        if out is not None:  # at once: what has been measured outlives whatever ends the rest
            store(out, {"machine": machine, "rows": done})
        if not as_json:
            print(row_line(row), flush=True)

    result = run(
        name,
        only=chosen,
        sides=side,
        against=None if stored else against,
        rounds=rounds,
        seconds=seconds,
        progress=progress,
    )
    if stored is not None:
        result["rows"] = compared(result["rows"], stored)
        warning = elsewhere(result["rows"], stored, result["machine"])
        if warning:
            note(warning)
        if not any("change" in row for row in result["rows"]):
            note(f"{against} has none of these cells: nothing to compare with")
        if not as_json:
            for row in result["rows"]:
                if "change" in row:
                    print(f"{row_line(row)}  {row['change']:.2f}x the stored {row['stored_ms']:.2f} ms")
    if out is not None:
        store(out, result)
    if as_json:
        print_json({"case": name} | result)
    if any("error" in row for row in result["rows"]):
        raise UserError(f"'{name}' has sides whose results are wrong; they have no speed")
