"""``phylon``: the commands, the global options, and the one place where an error becomes a line and an exit code."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import phylon
from phylon.cli.account import account
from phylon.cli.bench import bench
from phylon.cli.chat import chat
from phylon.cli.convert import convert
from phylon.cli.encode import encode
from phylon.cli.errors import Carried, reported
from phylon.cli.extend import hoisted, import_files
from phylon.cli.generate import generate
from phylon.cli.list import list_
from phylon.cli.score import score
from phylon.cli.show import show
from phylon.cli.train import train
from phylon.cli.verify import verify

COMMANDS = {
    "train": train,
    "generate": generate,
    "chat": chat,
    "score": score,
    "encode": encode,
    "show": show,
    "list": list_,
    "account": account,
    "convert": convert,
    "verify": verify,
    "bench": bench,
}


class Commands(TyperGroup):
    """Commands in the order in which one meets them; interrupts and system errors come through to ``reported``."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, OSError) as error:
            raise Carried(error) from error


app = typer.Typer(
    name="phylon",
    cls=Commands,
    help="One block, every Transformer: train, load, run and look inside.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for _name, _function in COMMANDS.items():
    app.command(_name)(_function)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"phylon {phylon.__version__}")
        raise typer.Exit


@app.callback()
def options(
    imports: Annotated[
        list[str] | None,
        typer.Option("--import", metavar="FILE.py", help="Register the mechanisms of a Python file first; repeatable."),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """One block, every Transformer: train, load, run and look inside."""
    import_files(imports or [])


def main(args: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code. ``--import`` may stand before or after the command."""
    # OpenMP's threads spin while they wait, by default for long: on a machine that does anything else as well, every
    # barrier then costs a time slice, and decoding runs at a tenth of its speed. PyTorch is not imported yet.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    given = list(sys.argv[1:] if args is None else args)
    given = hoisted(given) or ["--help"]
    return reported(lambda: app(given, prog_name="phylon", standalone_mode=False))
