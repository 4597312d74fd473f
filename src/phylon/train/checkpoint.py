"""Complete checkpoints of a run: written beside and renamed, pruned, found again, and put back bit for bit.

``checkpoints/step-00000020/`` (``step-00000020-r1`` after one roll-back) holds ``model.safetensors``,
``optimizer.safetensors`` (moments and masters), ``random.safetensors`` (PyTorch's generators), ``ema.safetensors`` (the
mean of the weights, where one is kept) and ``state.json`` (everything else, the checksums of all files and its own);
``latest`` names the newest.
"""

import os
import re
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from phylon.checkpoint import open_safetensors, write_safetensors
from phylon.checkpoint.files import checksum
from phylon.checkpoint.source import TensorSource
from phylon.model import Model
from phylon.spec.errors import UserError, system_reason
from phylon.spec.files import read_file
from phylon.train.rng import RandomState
from phylon.train.scaling import LossScale
from phylon.train.spikes import SpikeState

FORMAT = 2
PREFIX = "step-"
UNSEALED = "00000000"
_SEAL = re.compile(rb'("seal": ")[0-9a-f]{8}"')


class Best(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The step and the value of the best evaluation so far."""

    step: int
    value: float


class RunState(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Where a run is. ``total``: planned updates; ``replan``: when to measure next; ``seconds``: time spent training.

    ``limit``: the seconds that a timed run may take in all.
    ``best``: the best evaluation, by ``run.best``; a checkpoint of that step is kept.
    ``skipped`` counts the updates left out for what was wrong with their batch, ``skipped_in_row`` those just now,
    ``idle`` all steps that changed no weight (those whose loss scale was too high as well).
    """

    step: int = 0
    total: int
    tokens: int = 0
    seconds: float = 0.0
    replan: int | None = None
    limit: float | None = None
    skipped: int = 0
    idle: int = 0
    skipped_in_row: int = 0
    best: Best | None = None
    spikes: SpikeState = msgspec.field(default_factory=SpikeState)
    loss_scale: LossScale | None = None


class Manifest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``state.json``: the run's state and what its continuation depends on.

    ``held_out``: a hash of the held-out examples; ``inputs``: hashes of what else the run reads. ``looks``: whether
    the evaluation and the samples that are due at this step come after the checkpoint. ``checksums`` are those of the
    files beside it, ``seal`` is its own.
    """

    format: int = FORMAT
    run: RunState
    recipe: dict[str, Any]
    environment: dict[str, str]
    data: dict[str, Any]
    metrics_bytes: int
    python_random: list[Any]
    numpy_random: list[Any]
    others_random: list[tuple[list[Any], list[Any]]] = []
    held_out: str = ""
    inputs: dict[str, str] = {}
    looks: bool = True
    checksums: dict[str, str] = {}
    seal: str = UNSEALED


class Checkpoint(msgspec.Struct, kw_only=True):
    """A checkpoint in memory: its manifest and its tensors. ``random`` holds ``cpu``, and ``1:cpu`` of process 1."""

    manifest: Manifest
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    random: dict[str, Tensor]
    ema: dict[str, Tensor] = {}

    def random_state(self, rank: int = 0) -> RandomState | None:
        """The generators of one process; ``None`` where there were fewer processes."""
        found = self.manifest
        if rank == 0:
            own = {name: value for name, value in self.random.items() if not name[0].isdigit()}
            return RandomState(own, found.python_random, found.numpy_random)
        if rank > len(found.others_random):
            return None
        own = {n.partition(":")[2]: value for n, value in self.random.items() if n.startswith(f"{rank}:")}
        return RandomState(own, *found.others_random[rank - 1])


PARTS = ("model", "optimizer", "random", "ema")


def model_tensors(model: Model) -> dict[str, Tensor]:
    """Every parameter once (ties under their first name) and every persistent buffer."""
    known = model.state_dict(keep_vars=True)
    kept = {id(tensor): name for name, tensor in reversed(known.items())}
    return {name: tensor.detach() for name, tensor in known.items() if kept[id(tensor)] == name}


def load_model_tensors(model: Model, tensors: dict[str, Tensor]) -> None:
    """Put the tensors of ``model_tensors`` back; names and shapes must agree exactly."""
    check_model_tensors(model, tensors)
    with torch.no_grad():
        for name, target in model_tensors(model).items():
            target.copy_(tensors[name])


def check_model_tensors(model: Model, tensors: dict[str, Tensor]) -> None:
    """Refuse tensors of another model."""
    wanted = model_tensors(model)
    odd = sorted(wanted.keys() ^ tensors.keys()) or [n for n in wanted if wanted[n].shape != tensors[n].shape]
    if odd:
        raise UserError(f"the checkpoint is of another model: they differ in '{odd[0]}'; use the run's own recipe")


def save_checkpoint(
    folder: Path, checkpoint: Checkpoint, keep: int, margin: int = 0, *, average: int = 0, every: int | None = None
) -> Path:
    """Write a checkpoint below ``folder`` (``checkpoints/``), point ``latest`` at it, and prune.

    The newest ``keep`` stay, and always the newest good one: written when no step had just been skipped, at least
    ``margin`` steps before this one; the newest ``average`` of every ``every``-th step; and the best one by this and by
    each that stays, so that a run may go back to any of them. Those of later steps, which a roll-back has given up, go.

    Raises UserError where it cannot be written; the checkpoints that exist are then untouched.
    """
    run = checkpoint.manifest.run
    target = folder / (f"{PREFIX}{run.step:08d}" + (f"-r{run.spikes.rollbacks}" if run.spikes.rollbacks else ""))
    beside = target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=folder, prefix=".writing-"))
        try:
            sums: dict[str, str] = {}
            for name in PARTS:
                if name != "ema" or checkpoint.ema:
                    (written,) = write_safetensors(beside / f"{name}.safetensors", getattr(checkpoint, name))
                    sums[written.name] = checksum(written)
            manifest = msgspec.structs.replace(checkpoint.manifest, checksums=sums)
            _write_synced(beside / "state.json", _sealed(manifest))
            _sync_folder(beside)
            if target.exists():
                # Damaged, or this very step once more: out of the way, because a folder replaces only an empty one.
                target.rename(Path(tempfile.mkdtemp(dir=folder, prefix=".replaced-")) / target.name)
            beside.rename(target)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        _sync_folder(folder)
        _point_at(folder, target.name)
        mean = scheduled(folder, every, run.step)[-average:] if average else []
        _prune(folder, target, keep, margin, mean)
    except (OSError, UserError) as error:
        last = latest_checkpoint(folder)
        safe = "there is none yet" if last is None else f"the last good one is {last}"
        reason = system_reason(error) if isinstance(error, OSError) else str(error).replace(str(beside), str(target))
        raise UserError(f"cannot save the checkpoint {target}: {reason}; {safe}") from None
    return target


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint below ``folder``: the one ``latest`` names, else the highest step."""
    found = checkpoints(folder)
    try:
        named = folder / read_file(folder / "latest").decode().strip()
    except (UserError, UnicodeDecodeError):
        named = None
    return named if named in found else found[-1] if found else None


def last_state(folder: Path) -> str:
    """What to say of where a run that ends early can go on."""
    last = latest_checkpoint(folder)
    return "there is no checkpoint yet" if last is None else f"the last good state is {last}"


def checkpoints(folder: Path) -> list[Path]:
    """Every checkpoint below ``folder``, oldest first; of one step, those after a roll-back later.

    One of whose files some are gone counts, so that whoever reads it says so; an empty folder is none.
    """
    found = (path for path in folder.glob(f"{PREFIX}*") if step_of(path) >= 0 and path.is_dir())
    return sorted((path for path in found if any(path.iterdir())), key=_order)


def step_of(path: Path) -> int:
    """The step at which a checkpoint was written, from its name."""
    return _order(path)[0]


def scheduled(folder: Path, every: int | None, last: int) -> list[Path]:
    """One checkpoint a step, oldest first: those of every ``every``-th step and of step ``last``.

    These are written however often a run is stopped and resumed. After a roll-back a step has two; the newer counts.
    """
    found = {step_of(path): path for path in checkpoints(folder)}
    return [path for step, path in found.items() if step == last or (every is not None and step % every == 0)]


def last_good(folder: Path, step: int) -> Path | None:
    """The newest checkpoint of step ``step`` or before that was written when all went well."""
    for path in reversed(checkpoints(folder)):
        if step_of(path) <= step and _is_good(path):
            return path
    return None


def _order(path: Path) -> tuple[int, int]:
    step, _, revision = path.name.removeprefix(PREFIX).partition("-r")
    return (int(step), int(revision or 0)) if step.isdigit() and (revision or "0").isdigit() else (-1, 0)


def _is_good(path: Path) -> bool:
    try:
        return _manifest(path).run.skipped_in_row == 0
    except UserError:
        return False


def _best_step(path: Path) -> int | None:
    """The step of the best evaluation before a checkpoint was written."""
    try:
        best = _manifest(path).run.best
    except UserError:
        return None
    return None if best is None else best.step


def amend_checkpoint(path: Path, best: Best | None) -> None:
    """Note in a checkpoint that has just been written that it is the best one."""
    try:
        manifest = _manifest(path)
        manifest.run.best = best
        _write_synced(path / ".state.json", _sealed(manifest))
        (path / ".state.json").replace(path / "state.json")
        _sync_folder(path)
    except OSError as error:
        raise UserError(f"cannot note the best evaluation in {path}: {system_reason(error)}") from None


def read_manifest(path: Path) -> Manifest:
    """The ``state.json`` of a checkpoint."""
    try:
        return _manifest(path)
    except UserError as error:
        raise UserError(f"{error}; {_way_on(path)}") from None


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint. A file that is missing or damaged is named, and the older checkpoint that is whole."""
    manifest = read_manifest(path)
    sources = {
        name: open_part(path, name, manifest) for name in PARTS if name != "ema" or _file(name) in manifest.checksums
    }
    parts = {part: {name: source.read(name).clone() for name in source.tensors} for part, source in sources.items()}
    return Checkpoint(manifest=manifest, **parts)


def open_part(path: Path, part: str, manifest: Manifest | None = None) -> TensorSource:
    """The tensors of one of a checkpoint's ``PARTS``, its checksum checked."""
    manifest = read_manifest(path) if manifest is None else manifest
    try:
        _check(path, _file(part), manifest)
        return open_safetensors(path / _file(part))
    except UserError as error:
        raise UserError(f"{error}; {_way_on(path)}") from None


def _file(part: str) -> str:
    return f"{part}.safetensors"


def _manifest(path: Path) -> Manifest:
    try:
        content = (path / "state.json").read_bytes()
        manifest = msgspec.json.decode(content, type=Manifest)
    except OSError as error:
        raise UserError(f"cannot read {path / 'state.json'}: {system_reason(error)}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path / 'state.json'} is damaged ({error})") from None
    if manifest.format != FORMAT:
        raise UserError(f"{path} has the format {manifest.format}, and this release reads {FORMAT}")
    if f"{_seal(content):08x}" != manifest.seal:
        raise UserError(f"{path / 'state.json'} is damaged (its content is not what its seal says)")
    return manifest


def _sealed(manifest: Manifest) -> bytes:
    """``state.json`` with the checksum of all the rest of it inside."""
    bare = msgspec.structs.replace(manifest, seal=UNSEALED)
    content = msgspec.json.format(msgspec.json.encode(bare))
    return _SEAL.sub(rb"\g<1>%08x" % zlib.crc32(content) + b'"', content)


def _seal(content: bytes) -> int:
    return zlib.crc32(_SEAL.sub(b"\\g<1>" + UNSEALED.encode() + b'"', content))


def _check(path: Path, file: str, manifest: Manifest) -> None:
    """Refuse a file whose content is not what was written."""
    try:
        found = checksum(path / file)
    except OSError as error:
        raise UserError(f"cannot read {path / file}: {system_reason(error)}") from None
    if found != manifest.checksums.get(file):
        raise UserError(f"{path / file} is damaged (its content is not what was written)")


def _is_whole(path: Path) -> bool:
    try:
        manifest = _manifest(path)
        for file in manifest.checksums:
            _check(path, file, manifest)
    except UserError:
        return False
    return True


def _way_on(damaged: Path) -> str:
    """What to do about a checkpoint that cannot be read: which older one there is to go on from."""
    gone = [damaged]
    for older in reversed(checkpoints(damaged.parent)):
        if _order(older) < _order(damaged):
            if _is_whole(older):
                return f"remove {' and '.join(map(str, gone))}, and --resume goes on from {older}, which is whole"
            gone.append(older)
    return "no older checkpoint is whole: --fresh begins again"


def save_model(model: Model, folder: Path) -> None:
    """The trained model in the native format."""
    from phylon import hub

    hub.save(model, folder, replace=True)


def _point_at(folder: Path, name: str) -> None:
    _write_synced(folder / ".latest", name.encode() + b"\n")
    (folder / ".latest").replace(folder / "latest")
    _sync_folder(folder)


def _prune(folder: Path, new: Path, keep: int, margin: int, mean: list[Path]) -> None:
    """Remove what need not be kept, and what a killed process left half-written. ``mean``: what is to be averaged."""
    found = checkpoints(folder)
    later = [path for path in found if step_of(path) > step_of(new)]
    rest = [path for path in found if path not in later]
    good = last_good(folder, step_of(new) - margin)
    kept = [path for path in rest if path == good or path in mean or path in rest[-keep:]]
    best = {_best_step(path) for path in kept}
    old = [path for path in rest if path not in kept and step_of(path) not in best]
    for path in [*later, *old, *folder.glob(".writing-*"), *folder.glob(".replaced-*")]:
        shutil.rmtree(path, ignore_errors=True)


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
