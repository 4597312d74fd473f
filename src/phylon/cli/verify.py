"""``phylon verify``: the law, tried on a model of the user's."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phylon.cli.common import Device, Dtype, Json, ModelName, print_json

if TYPE_CHECKING:
    from phylon.checkpoint.verify import Reference

FAILED = 1
SCOPE = "This judges the ways of running the weights, not the values that they hold."


def verify(
    model: ModelName,
    reference: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What else runs the same weights, to name the first component that diverges: transformers, none, "
            "a Python file that defines reference(MODEL), or auto: transformers where it is installed.",
        ),
    ] = "auto",
    length: Annotated[int | None, typer.Option(help="Tokens of the longest text.", show_default="24")] = None,
    seed: Annotated[int, typer.Option(help="Of the random texts.")] = 0,
    device: Device = "auto",
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Check that the same tokens or images give the same logits, whichever way.

    It judges the ways of running the weights, not the values that they hold. Against a reference, the values too: one
    that does not run these weights is named, and why.
    """
    from phylon.checkpoint.verify import Cell
    from phylon.checkpoint.verify import verify as run
    from phylon.hub import load

    loaded = load(model, dtype=dtype, device=device)
    other, reason = _reference(reference, model)
    report = run(loaded, reference=other, length=length, seed=seed)
    if reason is not None:
        report.cells.append(Cell(name="reference", passed=None, reason=reason))
    about = getattr(other, "about", None)
    data = {"model": model} | report.to_data() | ({} if about is None else {"reference": about})
    print_json(data) if as_json else print(page(data))
    if not report.passed:
        raise typer.Exit(FAILED)


def page(data: dict[str, Any]) -> str:
    """A line a cell, and the verdict."""
    width = max(30, *(len(cell["name"]) + 2 for cell in data["cells"]))
    lengths = sorted(set(data["lengths"]), key=data["lengths"].index)
    what = data["inputs"] if len(data["lengths"]) > 1 else data["inputs"].removesuffix("s")
    each = " each" if len(data["lengths"]) > len(lengths) == 1 else ""
    count = f"{len(data['lengths'])} {what} of {', '.join(map(str, lengths))} tokens{each}"
    lines = [f"{data['model']}: {data['dtype']}, {count}", ""]
    for cell in data["cells"]:
        mark = {True: "ok", False: "FAILED", None: "-"}[cell["passed"]]
        figures = "" if cell["error"] is None else f"error {cell['error']:.1e}"
        figures += "" if cell["bound"] is None else f", at most {cell['bound']:.1e}"
        lines.append(
            f"  {cell['name']:<{width}}{mark:<8}{figures}{'  ' * bool(figures)}{cell['reason'] or ''}".rstrip()
        )
    lines += ["", f"Reference: {data['reference']}"] if "reference" in data else []
    failed = [cell["name"] for cell in data["cells"] if cell["passed"] is False]
    verdict = f"fails: {', '.join(failed)}" if failed else "holds" if data["passed"] else "nothing applied"
    return "\n".join([*lines, "", SCOPE, verdict])


def _reference(choice: str, model: str) -> tuple["Reference | None", str | None]:
    """The other program, or ``None`` and the reason where there is one to be said.

    Only what the user asked for by name is an error where it cannot run.
    """
    from phylon.hub.reference import PACKAGE, transformers_reference
    from phylon.spec.errors import UserError

    if choice == "none":
        return None, None
    if choice not in ("auto", PACKAGE):
        return _from_file(Path(choice), model), None
    # What it does not find here it would look for on the net, kernels (code) among it.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        return transformers_reference(model), None
    except UserError as error:
        if choice == PACKAGE:
            raise
        return None, str(error)


def _from_file(path: Path, model: str) -> "Reference":
    """``reference(model)`` of a Python file the user names: nothing of it comes from a checkpoint."""
    import runpy

    from phylon.spec.errors import UserError

    if path.suffix != ".py" or not path.is_file():
        raise UserError(f"--reference takes auto, transformers, none or a Python file; there is none at '{path}'")
    try:
        made: dict[str, Any] = runpy.run_path(str(path))
        if not callable(made.get("reference")):
            raise UserError(f"'{path}' defines no function reference(folder)")
        found = made["reference"](model)
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"'{path}' needs the package '{error.name}', which is not installed") from None
    except (Exception, SystemExit) as error:
        raise UserError(f"'{path}' fails: {type(error).__name__}: {' '.join(str(error).split()):.200}") from None
    if not callable(found):
        raise UserError(f"'{path}': reference(folder) must give a function, it gave {type(found).__name__}")
    return found
