"""``phylon verify``: the law, tried on a model of the user's."""

from typing import Any

import typer

from phylon.cli.common import Device, Dtype, Json, ModelName, print_json

FAILED = 1


def verify(model: ModelName, device: Device = "auto", dtype: Dtype = None, as_json: Json = False) -> None:
    """Check that the same tokens give the same logits, whichever way."""
    from phylon.checkpoint.verify import verify as run
    from phylon.hub import load

    report = run(load(model, dtype=dtype, device=device))
    data = {"model": model} | report.to_data()
    print_json(data) if as_json else print(page(data))
    if not report.passed:
        raise typer.Exit(FAILED)


def page(data: dict[str, Any]) -> str:
    """A line a cell, and the verdict."""
    lines = [f"{data['model']}: {data['dtype']}, documents of {', '.join(map(str, data['lengths']))} tokens", ""]
    for cell in data["cells"]:
        mark = {True: "ok", False: "FAILED", None: "-"}[cell["passed"]]
        figures = "" if cell["error"] is None else f"error {cell['error']:.1e}"
        figures += "" if cell["bound"] is None else f", at most {cell['bound']:.1e}"
        lines.append(f"  {cell['name']:<30}{mark:<8}{figures}{'  ' * bool(figures)}{cell['reason'] or ''}".rstrip())
    failed = [cell["name"] for cell in data["cells"] if cell["passed"] is False]
    return "\n".join(
        [*lines, "", f"fails: {', '.join(failed)}" if failed else "holds" if data["passed"] else "nothing applied"]
    )
