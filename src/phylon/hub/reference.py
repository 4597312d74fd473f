"""`transformers` as a second opinion on a Hugging Face folder, for ``phylon verify``.

The library itself never needs it: it is imported here by name, when somebody asks for the comparison. Nothing of a
family is known here either. Where a value of ours is found in the reference follows from the layout of the checkpoint:
the map that ends a mixer or a feed-forward network is a module of theirs that holds the same stored tensor, and the
outermost list that this module stands in is the list of blocks.
"""

import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phylon.checkpoint import Rename, Transpose, open_safetensors
from phylon.checkpoint.compare import Reference
from phylon.hub.describe import Description, describe, read_json
from phylon.hub.load import stored_tensors
from phylon.model import Stack, build_meta
from phylon.spec.errors import UserError

PACKAGE = "transformers"
_LAST_MAPS = ("o_proj", "down_proj", "out_proj")
_OWN_OUTPUTS = {"mlm": "prediction_logits", "nsp": "seq_relationship_logits", "pooled": "pooler_output"}
"""Where the reference's output holds a head's values when it is not its ``logits``."""


def transformers_reference(path: str | Path) -> Reference:
    """What the class named by a folder's architecture computes in fp32, by the names of ``phylon.record``.

    The values: ``<stack>.embed.out``, ``<block>.<op>.out`` and ``<block>.resid_post`` of every block, ``<stack>.out``,
    ``heads.<name>.logits``; what the reference does not show is left out.

    Raises:
        UserError: the package is not installed, the path is no Hugging Face folder, or the reference cannot read it.
    """
    found = describe(path)
    if found.format != "hf":
        raise UserError(f"{PACKAGE} reads Hugging Face folders, and '{path}' is none")
    assert found.family is not None
    assert found.family.hf is not None
    departs = found.family.hf.departs(found.spec)
    if departs is not None:
        raise UserError(f"{PACKAGE} does not compute what '{path}' says: {departs}")
    model = _load(found)
    points = list(_points(found, model))

    @torch.no_grad()
    def reference(**inputs: Tensor) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}
        handles = [point.attach(seen) for point in points]
        try:
            out = model(**_their_inputs(found, inputs))
        except Exception as error:  # whatever a foreign program raises
            raise UserError(f"{PACKAGE} cannot run '{path}': {_line(error)}") from None
        finally:
            for handle in handles:
                handle.remove()
        return seen | dict(_heads(found, out))

    # Its attention has several codes, which need not agree: eager Falcon adds ALiBi twice.
    reference.about = f"{type(model).__name__} of {PACKAGE}, attention '{model.config._attn_implementation}'"  # type: ignore[attr-defined]
    return reference


def is_installed() -> bool:
    """Whether `transformers` can be imported, without importing it."""
    return find_spec(PACKAGE) is not None


def _load(found: Description) -> nn.Module:
    if not is_installed():
        raise UserError(
            f"the package {PACKAGE} is not installed; it comes with the test extra: pip install phylon[test]"
        )
    library: Any = importlib.import_module(PACKAGE)
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    name = _architecture(found)
    cls = getattr(library, name, None)
    if cls is None:
        raise UserError(f"{PACKAGE} {library.__version__} has no {name}")
    given: dict[str, Any] = {
        "attn_implementation": "sdpa" if cls._supports_sdpa else "eager",
        "dtype": torch.float32,
        "local_files_only": True,
    }
    given["config"] = library.AutoConfig.from_pretrained(found.path, local_files_only=True)
    if "add_pooling_layer" in inspect.signature(cls.__init__).parameters:
        given["add_pooling_layer"] = "pooled" in found.spec.heads
    try:
        model, info = cls.from_pretrained(found.path, output_loading_info=True, **given)
    except Exception as error:  # whatever a foreign program raises
        raise UserError(f"{PACKAGE} cannot read '{found.path}': {_line(error)}") from None
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(f"{PACKAGE} does not find {missing[0]} in '{found.path}', and would draw it at random")
    return model.eval()


def _architecture(found: Description) -> str:
    """The class that the family would name for this spec; what the file says where no file can say the spec."""
    assert found.family is not None
    assert found.family.hf is not None
    try:
        return str(found.family.hf.write(found.spec)["architectures"][0])
    except UserError:
        return str((read_json(found.path / "config.json").get("architectures") or [""])[0])


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no reason given'}"


def _their_inputs(found: Description, ours: Mapping[str, Tensor]) -> dict[str, Any]:
    ours = {name: value.cpu() for name, value in ours.items()}
    if "images" in ours:
        return {"pixel_values": ours["images"].float(), **_stretched(found, ours["images"])}
    given: dict[str, Any] = {} if found.spec.decoder is None else {"use_cache": False}
    if "source" in ours:
        return given | {"input_ids": ours["source"], "decoder_input_ids": ours["tokens"]}
    tokens = ours["tokens"]
    # A choice is one of several texts of a question.
    return given | {"input_ids": tokens[:, None] if "choice" in found.spec.heads else tokens}


def _stretched(found: Description, images: Tensor) -> dict[str, Any]:
    """What tells them that images are not of the model's own size."""
    embed: Any = found.spec.last_stack.embed
    if images.shape[1:] == embed.image_shape:
        return {}
    if embed.grid[0] != embed.grid[1]:
        raise UserError(f"{PACKAGE} takes every grid of positions for a square one and cannot stretch {embed.grid}")
    return {"interpolate_pos_encoding": True}


def _heads(found: Description, out: Any) -> Iterator[tuple[str, Tensor]]:
    for k, name in enumerate(found.spec.heads):
        value = getattr(out, _OWN_OUTPUTS.get(name, ""), None)
        if value is None and k == 0:
            value = getattr(out, "logits", None)
        if value is None and getattr(out, "start_logits", None) is not None:
            value = torch.stack([out.start_logits, out.end_logits], dim=-1)
        if value is not None:
            yield f"heads.{name}.logits", value


@dataclass(frozen=True)
class _Point:
    """One value of ours, and the module of theirs that takes it in or gives it out."""

    name: str
    module: nn.Module
    is_input: bool = False

    def attach(self, seen: dict[str, Tensor]) -> Any:
        def keep(value: Any) -> None:
            first = value
            while isinstance(first, tuple | list):
                first = first[0]
            if isinstance(first, Tensor):
                seen[self.name] = first.detach().clone()  # Falcon's goes on adding in place

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            keep(args or kwargs.get("hidden_states"))

        def after(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            keep(out)

        if self.is_input:
            return self.module.register_forward_pre_hook(before, with_kwargs=True)
        return self.module.register_forward_hook(after)


def _points(found: Description, model: nn.Module) -> Iterator[_Point]:
    owner = _owners(found, model)
    for stack_name, stack in found.spec.stacks.items():
        blocks: list[nn.Module] = []
        for i, block in enumerate(stack.blocks):
            outer: nn.Module | None = None
            for op in block.ops():
                path = f"{stack_name}.blocks.{i}.{op}."
                module = _op_module(path, owner, model)
                if module is not None:
                    yield _Point(f"{path}out", module)
                    outer = outer or _block_of(module, model)
            if outer is not None:
                blocks.append(outer)
                yield _Point(f"{stack_name}.blocks.{i}.resid_post", outer)
        yield from _ends(stack_name, stack, blocks, owner)


def _ends(name: str, stack: Stack, blocks: list[nn.Module], owner: "_Owner") -> Iterator[_Point]:
    if len(blocks) == len(stack.blocks):
        yield _Point(f"{name}.embed.out", blocks[0], is_input=True)
    last = blocks[-1:] if stack.norm_final is None else [owner(f"{name}.norm_final.weight")]
    yield from (_Point(f"{name}.out", module) for module in last if module is not None)


_Owner = Callable[[str], nn.Module | None]


def _owners(found: Description, model: nn.Module) -> _Owner:
    """By a name of ours: the module of theirs that holds the same stored tensor, whatever it is called there."""
    assert found.family is not None
    assert found.family.hf is not None
    source = open_safetensors(found.path)
    ours = {name: tuple(t.shape) for name, t in stored_tensors(build_meta(found.spec)).items()}
    plan = found.family.hf.layout(found.spec).plan(source.tensors, ours, str(found.path))
    stored = {move.ours[0]: names[0] for move, names in plan.moves if isinstance(move.rule, Rename | Transpose)}
    theirs = dict(model.named_parameters())
    prefix = str(getattr(model, "base_model_prefix", "")) + "."

    def owner(name: str) -> nn.Module | None:
        wanted = stored.get(name)
        if wanted is None:
            return None
        hits = [n for n in (wanted, prefix + wanted, wanted.removeprefix(prefix)) if n in theirs]
        if not hits:
            value = source.read(wanted).float()
            hits = [n for n, p in theirs.items() if p.shape == value.shape and torch.equal(p.data, value)]
        return model.get_submodule(hits[0].rpartition(".")[0]) if hits else None

    return owner


def _op_module(path: str, owner: _Owner, model: nn.Module) -> nn.Module | None:
    """The module whose output is that of an op: its last map, or what holds both its router and its experts."""
    for last in _LAST_MAPS:
        module = owner(f"{path}{last}.weight")
        if module is not None:
            return module
    module = owner(f"{path}router.proj.weight")
    if module is None:
        return None
    own = sum(1 for _ in module.parameters())
    return next((m for m in _ancestors(module, model) if sum(1 for _ in m.parameters()) > own), None)


def _block_of(module: nn.Module, model: nn.Module) -> nn.Module | None:
    """The element of the outermost list that holds a module."""
    line = [module, *_ancestors(module, model)]
    inside = [a for a, b in itertools.pairwise(line) if isinstance(b, nn.ModuleList)]
    return inside[-1] if inside else None


def _ancestors(module: nn.Module, model: nn.Module) -> list[nn.Module]:
    """From the parent up to the model itself."""
    name = next(name for name, m in model.named_modules() if m is module)
    parts = name.split(".")
    return [model.get_submodule(".".join(parts[:k])) for k in range(len(parts) - 1, -1, -1)]
