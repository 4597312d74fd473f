"""LoRA adapters alone: a folder with ``adapter.json`` (what they are) and ``adapter.safetensors`` (their matrices)."""

from pathlib import Path

import msgspec
import torch

from phylon.checkpoint import open_safetensors, write_safetensors
from phylon.hub.save import new_folder
from phylon.model import Model
from phylon.model.passes import Lora, add_lora, lora_tensors
from phylon.spec.errors import UserError
from phylon.spec.files import read_file
from phylon.spec.serial import from_json, to_json

CONFIG, TENSORS = "adapter.json", "adapter.safetensors"


def save_adapter(model: Model, folder: str | Path, *, replace: bool = False) -> Path:
    """Write the adapters of a model into ``folder``; its frozen weights are not written.

    Raises:
        UserError: the model has no adapters, or the folder exists (unless ``replace``).
    """
    tensors = lora_tensors(model)
    if not tensors:
        raise UserError("this model has no LoRA adapters to save")
    lora: Lora = model.get_submodule(next(iter(tensors)).rpartition(".")[0]).lora  # type: ignore[assignment]
    # The very maps, so that a later change of what a glob matches cannot move them.
    paths = tuple(dict.fromkeys(name.rpartition(".")[0] for name in tensors))
    with new_folder(Path(folder), replace) as beside:
        (beside / CONFIG).write_text(to_json(lora.replace(paths=paths), name="lora") + "\n", encoding="utf-8")
        write_safetensors(beside / TENSORS, tensors)
    return Path(folder)


def load_adapter(model: Model, folder: str | Path) -> list[str]:
    """Add the adapters of ``folder`` to the model they were trained on; the paths of their linear maps.

    Merge them with ``merge_lora`` for the speed of the plain model. Nothing changes if they do not fit.
    """
    path = Path(folder)
    try:
        text = read_file(path / CONFIG).decode()
    except UnicodeDecodeError:
        raise UserError(f"'{path}' is no adapter: {CONFIG}: not UTF-8 text") from None
    except UserError as error:
        raise UserError(f"'{path}' is no adapter: {error}") from None
    try:
        lora = from_json(Lora, text, name="lora")
    except (UserError, msgspec.MsgspecError) as error:
        raise UserError(f"{path / CONFIG}: {error}") from None
    source = open_safetensors(path / TENSORS)
    _check(model, lora, {name: info.shape for name, info in source.tensors.items()}, path)
    made = add_lora(model, lora)
    with torch.no_grad():
        for name in lora_tensors(model):
            model.get_parameter(name).copy_(source.read(name))
    return made


def _check(model: Model, lora: Lora, shapes: dict[str, tuple[int, ...]], path: Path) -> None:
    modules = dict(model.named_modules())
    wanted = {}
    for name in lora.paths:
        weight = getattr(modules.get(name), "weight", None)
        if weight is None:
            raise UserError(f"the adapter '{path}' is for another model: this one has no '{name}'")
        *lead, n_out, n_in = weight.shape
        wanted |= {f"{name}.lora_A": (*lead, lora.rank, n_in), f"{name}.lora_B": (*lead, n_out, lora.rank)}
    odd = sorted(wanted.keys() ^ shapes.keys()) or [name for name in wanted if wanted[name] != tuple(shapes[name])]
    if odd:
        raise UserError(f"the adapter '{path}' is for another model: it does not fit at '{odd[0]}'")
