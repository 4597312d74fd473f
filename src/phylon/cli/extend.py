"""``--import my_mixer.py``: a user's own mechanisms in any command."""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path


def hoisted(args: Sequence[str]) -> list[str]:
    """The arguments with every ``--import FILE`` moved to the front, where the global options stand."""
    moved: list[str] = []
    rest: list[str] = []
    left = iter(args)
    for arg in left:
        if arg == "--":
            rest += [arg, *left]
        elif arg == "--import":
            value = next(left, None)
            (rest if value is None else moved).extend([arg] if value is None else [arg, value])
        elif arg.startswith("--import="):
            moved.append(arg)
        else:
            rest.append(arg)
    return moved + rest


def import_files(names: Sequence[str]) -> None:
    """Run Python files, whose ``register`` calls bring in mechanisms, and whose ``register_family`` calls families."""
    if not names:
        return
    from phylon.spec.errors import UserError

    for name in names:
        path = Path(name)
        if path.suffix != ".py" or not path.is_file():
            raise UserError(f"--import takes a Python file; there is none at '{name}'")
        spec = importlib.util.spec_from_file_location(f"phylon_import_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        try:
            spec.loader.exec_module(module)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
        except Exception as error:
            line = _line_in(error, path)
            raise UserError(f"{name}{line} cannot be imported: {type(error).__name__}: {error}") from error


def _line_in(error: Exception, path: Path) -> str:
    """``", line n"``: the last line of the file itself that the error passed through."""
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}" if error.lineno else ""
    lines, trace = [], error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename) == path:
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return f", line {lines[-1]}" if lines else ""
