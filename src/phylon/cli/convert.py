"""``phylon convert``: from any format that can be read to any that can be written."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from phylon.cli.common import Dtype, ModelName, note


def convert(
    source: ModelName,
    target: Annotated[Path, typer.Argument(metavar="DST", help="A folder that does not exist yet, or a .gguf file.")],
    to: Annotated[Literal["native", "hf", "gguf"], typer.Option(help="Format to write.")],
    quant: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="For gguf: F32, F16, BF16, Q8_0, Q4_0 or Q4_1.", show_default="as --dtype says"
        ),
    ] = None,
    dtype: Dtype = None,
) -> None:
    """Rewrite a model as a native, Hugging Face or GGUF one."""
    from phylon.hub import load, save, save_gguf
    from phylon.spec.errors import UserError

    if quant is not None and to != "gguf":
        raise UserError(f"--quant is for --to gguf; {to} folders are not quantised, choose their numbers by --dtype")
    if to == "gguf" and target.suffix != ".gguf":
        raise UserError(f"'{target}' must end in .gguf")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"'{target}' exists; choose another name or remove it")
    model = load(source, dtype=dtype, device="cpu")
    if to == "gguf":
        save_gguf(model, target, quant=quant.upper() if quant else None)
    else:
        save(model, target, format=to)
    note(f"wrote {target} ({to}, {sum(p.numel() for p in model.parameters()):,} parameters)")
