"""``phylon list``: what is registered, and the recipes."""

from typing import Annotated, Literal

import typer

from phylon.cli.common import Json, print_json


def list_(
    what: Annotated[
        Literal["families", "presets", "mechanisms", "backends", "recipes"], typer.Argument(help="Which list.")
    ],
    as_json: Json = False,
) -> None:
    """List families, presets, mechanisms, kernel backends or training recipes."""
    from phylon.cli import catalogue

    rows = getattr(catalogue, what)()
    print_json({what: rows}) if as_json else print(getattr(catalogue, f"{what}_page")(rows))
