"""Complete checkpoints of a run: written beside and renamed, pruned, found again, and put back bit for bit.

``checkpoints/step-00000020/`` holds ``model.safetensors``, ``optimizer.safetensors`` (moments and masters),
``random.safetensors`` (PyTorch's generators) and ``state.json`` (everything else); ``latest`` names the newest.
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from phylon.checkpoint import open_safetensors, write_safetensors
from phylon.model import Model
from phylon.spec.errors import UserError, system_reason
from phylon.train.rng import RandomState

FORMAT = 1
PREFIX = "step-"


class Best(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The step and the value of the best evaluation so far."""

    step: int
    value: float


class RunState(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Where a run is. ``total``: planned updates; ``replan``: when to measure next; ``seconds``: time spent training.

    ``limit``: the seconds that a timed run may take in all. ``best``: the best evaluation, by ``run.best``; a
    checkpoint of that step is kept.
    ``skipped`` counts the updates left out for a gradient that was not finite, ``skipped_in_row`` those just now.
    """

    step: int = 0
    total: int
    tokens: int = 0
    seconds: float = 0.0
    replan: int | None = None
    limit: float | None = None
    skipped: int = 0
    skipped_in_row: int = 0
    best: Best | None = None


class Manifest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``state.json``: the run's state and what its continuation depends on."""

    format: int = FORMAT
    run: RunState
    recipe: dict[str, Any]
    environment: dict[str, str]
    data: dict[str, Any]
    metrics_bytes: int
    python_random: list[Any]
    numpy_random: list[Any]


class Checkpoint(msgspec.Struct, kw_only=True):
    """A checkpoint in memory: its manifest and its tensors."""

    manifest: Manifest
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    random: dict[str, Tensor]

    @property
    def random_state(self) -> RandomState:
        return RandomState(self.random, self.manifest.python_random, self.manifest.numpy_random)


def model_tensors(model: Model) -> dict[str, Tensor]:
    """Every parameter once (ties under their first name) and every persistent buffer."""
    known = model.state_dict(keep_vars=True)
    kept = {id(tensor): name for name, tensor in reversed(known.items())}
    return {name: tensor.detach() for name, tensor in known.items() if kept[id(tensor)] == name}


def load_model_tensors(model: Model, tensors: dict[str, Tensor]) -> None:
    """Put the tensors of ``model_tensors`` back; names and shapes must agree exactly."""
    wanted = model_tensors(model)
    odd = sorted(wanted.keys() ^ tensors.keys()) or [n for n in wanted if wanted[n].shape != tensors[n].shape]
    if odd:
        raise UserError(f"the checkpoint is of another model: they differ in '{odd[0]}'; use the run's own recipe")
    with torch.no_grad():
        for name, target in wanted.items():
            target.copy_(tensors[name])


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write a checkpoint below ``folder`` (``checkpoints/``), point ``latest`` at it, and prune to the newest ``keep``
    and the best.

    Raises UserError where it cannot be written; the checkpoints that exist are then untouched.
    """
    target = folder / f"{PREFIX}{checkpoint.manifest.run.step:08d}"
    beside = target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=folder, prefix=".writing-"))
        try:
            for name in ("model", "optimizer", "random"):
                write_safetensors(beside / f"{name}.safetensors", getattr(checkpoint, name))
            _write_synced(beside / "state.json", msgspec.json.format(msgspec.json.encode(checkpoint.manifest)))
            _sync_folder(beside)
            if target.exists():
                # Damaged, or this very step once more: out of the way, because a folder replaces only an empty one.
                target.rename(Path(tempfile.mkdtemp(dir=folder, prefix=".replaced-")) / target.name)
            beside.rename(target)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        _sync_folder(folder)
        _point_at(folder, target.name)
        _prune(folder, keep, checkpoint.manifest.run.best)
    except (OSError, UserError) as error:
        last = latest_checkpoint(folder)
        safe = "there is none yet" if last is None else f"the last good one is {last}"
        reason = system_reason(error) if isinstance(error, OSError) else str(error).replace(str(beside), str(target))
        raise UserError(f"cannot save the checkpoint {target}: {reason}; {safe}") from None
    return target


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint below ``folder``: the one ``latest`` names, else the highest step."""
    found = checkpoints(folder)
    try:
        named = folder / (folder / "latest").read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        named = None
    return named if named in found else found[-1] if found else None


def checkpoints(folder: Path) -> list[Path]:
    """Every checkpoint below ``folder``, oldest first."""
    return sorted(path for path in folder.glob(f"{PREFIX}*") if (path / "state.json").is_file())


def step_of(path: Path) -> int:
    """The step at which a checkpoint was written, from its name."""
    return int(path.name.removeprefix(PREFIX))


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint; a file that is missing or damaged is named."""
    try:
        manifest = msgspec.json.decode((path / "state.json").read_bytes(), type=Manifest)
    except OSError as error:
        raise UserError(f"cannot read the checkpoint {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise UserError(f"{path / 'state.json'} is damaged ({error}); remove {path} to use an older one") from None
    if manifest.format != FORMAT:
        raise UserError(f"{path} has the format {manifest.format}; this release reads {FORMAT}")
    parts: dict[str, dict[str, Tensor]] = {}
    for name in ("model", "optimizer", "random"):
        source = open_safetensors(path / f"{name}.safetensors")
        parts[name] = {key: source.read(key).clone() for key in source.tensors}
    return Checkpoint(manifest=manifest, **parts)


def save_model(model: Model, folder: Path) -> None:
    """The trained model in the native format."""
    from phylon import hub

    hub.save(model, folder, replace=True)


def _point_at(folder: Path, name: str) -> None:
    _write_synced(folder / ".latest", name.encode() + b"\n")
    (folder / ".latest").replace(folder / "latest")
    _sync_folder(folder)


def _prune(folder: Path, keep: int, best: Best | None) -> None:
    """Remove all but the newest ``keep`` and the best, and what a killed process left half-written."""
    spare = [path for path in checkpoints(folder)[:-keep] if best is None or step_of(path) != best.step]
    for old in [*spare, *folder.glob(".writing-*"), *folder.glob(".replaced-*")]:
        shutil.rmtree(old, ignore_errors=True)


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
