"""The run's log as TensorBoard events, for those who look at several runs at once."""

from pathlib import Path
from typing import Any

from phylon.spec.errors import UserError
from phylon.train.callbacks import Callback
from phylon.train.checkpoint import RunState
from phylon.train.metrics import Record

LEFT_OUT = {"kind", "step", "tokens", "seconds", "texts", "tensors"}


class TensorBoard(Callback):
    """Writes every number of the log into ``folder``: ``step/loss``, ``eval/loss``, ``watch/update_ratio/…``."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("TensorBoard is not installed; get it with: pip install 'phylon[tensorboard]'") from None
        self.folder, self._make = Path(folder), SummaryWriter
        self._writer: Any = None

    def started(self, run: RunState) -> None:
        # Steps that a resumed run takes again replace those that were lost.
        self._writer = self._make(str(self.folder), purge_step=run.step)

    def record(self, record: Record, run: RunState) -> None:
        for name, value in _numbers(record):
            self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])
        if record["kind"] == "samples":
            self._writer.add_text("samples", "\n\n---\n\n".join(record["texts"]), record["step"])

    def ended(self, run: RunState) -> None:
        if self._writer is not None:
            self._writer.close()


def _numbers(record: Record, path: str = "") -> list[tuple[str, float]]:
    """Every number of a record with its path."""
    found: list[tuple[str, float]] = []
    for name, value in record.items():
        if not path and name in LEFT_OUT:
            continue
        here = f"{path}/{name}" if path else name
        if isinstance(value, dict):
            found += _numbers(value, here)
        elif isinstance(value, int | float):
            found.append((here, float(value)))
    return found
