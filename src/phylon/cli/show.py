"""``phylon show``: a model unrolled, or every tensor of one forward pass."""

from typing import Annotated

import typer

from phylon.cli.common import PresetOrModel


def show(
    name: PresetOrModel,
    shapes: Annotated[bool, typer.Option("--shapes", help="Every tensor of one forward pass.")] = False,
    batch: Annotated[int, typer.Option(metavar="B", help="Rows, for --shapes.")] = 2,
    seq_len: Annotated[
        int | None,
        typer.Option(metavar="T", help="Tokens a row, for --shapes; images have their own.", show_default="8"),
    ] = None,
) -> None:
    """Show a model on one page, without loading its weights."""
    from phylon.cli.common import labels_of, spec_of

    spec = spec_of(name)
    if shapes:
        from phylon.cli.walk import walk_page

        print(walk_page(name, spec, batch=batch, seq_len=seq_len))
    else:
        from phylon.cli.page import model_page

        print(model_page(name, spec, labels_of(name)))
