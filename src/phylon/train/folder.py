"""The folder of a run: which files are the run's own, and nobody else's.

A run marks its folder before it writes anything there, and refuses a folder that already holds something under a name
it would write. So every one of these names in a marked folder is the run's, and may be removed with it.
"""

import shutil
from pathlib import Path

from phylon.spec.errors import UserError, system_reason
from phylon.train.report import write_text

MARKER = ".phylon-run"
NAMES = (
    "recipe.toml",
    "metrics.jsonl",
    "report.html",
    "checkpoints",
    "tokenizer",
    "model",
    "model_ema",
    "adapter",
    "tensorboard",
)
TOKENS = "data/tokens-*"  # the user's own data may lie beside them in data/


def is_run(folder: Path) -> bool:
    """Whether a run wrote (or began to write) here."""
    return (folder / MARKER).is_file()


def claim(folder: Path) -> None:
    """Make the folder and mark it as a run's; one that holds other files under a run's names is refused."""
    if is_run(folder):
        return
    check_free(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to '{folder}': {system_reason(error)}") from None
    write_text(folder / MARKER, "This folder holds a run of phylon; 'phylon train --fresh' removes the run's files.\n")


def check_free(folder: Path) -> None:
    """Refuse a folder that no run marked and that holds something under a name a run writes."""
    taken = [] if is_run(folder) else [name for name in NAMES if (folder / name).exists()]
    if taken:
        raise UserError(f"'{folder / taken[0]}' is not from a run of this folder; give another folder, or move it away")


def clear(folder: Path) -> None:
    """Remove what a run wrote below ``folder``, and the folders that are empty then; all else stays."""
    if not is_run(folder):
        return
    for path in [*(folder / name for name in NAMES), *folder.glob(TOKENS), folder / MARKER]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for path in (folder / "data", folder):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
