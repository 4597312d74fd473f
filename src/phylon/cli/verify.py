"""``phylon verify``: the law, tried on a model of the user's."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phylon.cli.common import Device, Dtype, Json, ModelName, print_json

if TYPE_CHECKING:
    from phylon.checkpoint.verify import Reference


def verify(
    model: ModelName,
    reference: Annotated[
        Path | None,
        typer.Option(help="A Python file whose reference(MODEL) runs another program (tests/parity/reference.py)."),
    ] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of the longest text.", show_default="24")] = None,
    seed: Annotated[int, typer.Option(help="Of the random texts.")] = 0,
    device: Device = "auto",
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Check that a model gives the same values however its texts are split, padded, packed or batched."""
    from phylon.checkpoint.verify import verify as run
    from phylon.hub import load

    other = None if reference is None else _from_file(reference, model)
    report = run(load(model, dtype=dtype, device=device), reference=other, length=length, seed=seed)
    if as_json:
        print_json({"model": model, **report.to_data()})
    else:
        for cell in report.cells:
            state = {True: "pass", False: "FAIL", None: "  - "}[cell.passed]
            figures = "" if cell.error is None else f"{cell.error:9.2e} of {cell.bound or 0:9.2e}"
            print(f"{state}  {cell.name:<28} {figures:<22} {cell.reason or ''}".rstrip())
        print(f"{'passed' if report.passed else 'FAILED'}: {report.dtype}, texts of up to {max(report.lengths)} tokens")
    if not report.passed:
        raise typer.Exit(1)


def _from_file(path: Path, model: str) -> "Reference":
    """``reference(model)`` of a Python file the user names: nothing of it comes from a checkpoint."""
    import runpy

    from phylon.spec.errors import UserError

    if path.suffix != ".py" or not path.is_file():
        raise UserError(f"--reference takes a Python file; there is none at '{path}'")
    if not (Path(model) / "config.json").is_file():
        raise UserError(f"--reference compares Hugging Face folders; '{model}' is none")
    try:
        made: dict[str, Any] = runpy.run_path(str(path))
    except ImportError as error:
        raise UserError(f"'{path}' needs the package '{error.name}', which is not installed") from None
    if not callable(made.get("reference")):
        raise UserError(f"'{path}' defines no function reference(folder)")
    return made["reference"](model)
