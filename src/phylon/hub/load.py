"""Loading: the format by what is there, the spec from its configuration, every check before memory is allocated."""

import math
import re
from functools import cache, reduce
from pathlib import Path

import torch

from phylon.checkpoint import (
    Drop,
    Layout,
    LoadPlan,
    PrefixError,
    TensorSource,
    identity,
    open_safetensors,
    stored_dtypes,
)
from phylon.families import families
from phylon.hub.describe import Description, describe, named
from phylon.model import GenerationDefaults, Model, ModelSpec, build_meta, materialise, resolve_device, resolve_dtype
from phylon.spec.errors import UserError
from phylon.spec.files import there
from phylon.text import Tokenizer, load_tokenizer, tokenizer_from_gguf

UNREAD = "unread."
"""What the names of `Model.unread` begin with in a native folder."""
_COMPUTE = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "encoder.json", "spiece.model")


def load(
    path_or_name: str | Path, *, dtype: str | torch.dtype | None = None, device: str | torch.device = "auto"
) -> Model:
    """A model in eval mode from a native folder, a Hugging Face folder, a ``.gguf`` file, or a known package name.

    ``dtype`` of the parameters defaults to the narrowest that rounds no stored one (fp32 for quantised files), and
    saving gives back the tensors of a file of several dtypes as they were stored. Names,
    shapes and spans are checked before anything is allocated; peak memory is the model and one tensor. Nothing is
    unpickled or executed.

    Raises:
        UserError: the path, format, configuration or tensors do not fit; one line says what and how to mend it.
    """
    found = describe(path_or_name)
    source = found.source or open_safetensors(found.path)
    try:
        model = _shaped(found, source)
        layout = _layout(found, model)
        shapes = {name: tuple(tensor.shape) for name, tensor in stored_tensors(model).items()}
        plan = layout.plan(source.tensors, shapes, str(found.path))
    except UserError as error:
        raise _misfit(error, found, source) from None
    materialise(model, resolve_dtype(dtype, _exact_dtype(plan, model, source)), resolve_device(device))
    with named(str(found.path)):
        layout.load(plan, source, stored_tensors(model))
    if dtype is None and found.format != "gguf":
        model.stored_dtypes = stored_dtypes(plan, source, stored_tensors(model))
    model.stored_dtype = "+".join(sorted(plan.dtypes, key=lambda name: (-plan.dtypes[name], name)))
    model.tokenizer, model.generation = _tokenizer(found.path), found.generation
    model.family, model.labels = found.written_as, found.labels
    model.kept, model.kept_generation = dict(found.kept), found.kept_generation
    model.unread = _unread(found, layout, plan, source)
    if dtype is not None:
        model.unread = {k: t.to(model.dtype) if t.is_floating_point() else t for k, t in model.unread.items()}
    if found.format == "gguf":
        model.tokenizer, model.generation = _gguf_vocabulary(found.path, source)
    return model.eval()


def load_tokenizer_of(path_or_name: str | Path) -> Tokenizer | None:
    """The tokenizer that comes with a model, or ``None``; no weight is read."""
    found = describe(path_or_name)
    if found.format == "gguf":
        assert found.source is not None
        return _gguf_vocabulary(found.path, found.source)[0]
    return _tokenizer(found.path)


def stored_tensors(model: Model) -> dict[str, torch.Tensor]:
    """Every parameter and stored buffer once, by canonical name; a tied name is not stored."""
    tied = {tie.name for tie in model.spec.ties}
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in tied}


def _shaped(found: Description, source: TensorSource) -> Model:
    """The model without memory, once its sizes are known to be possible and within what the files hold."""
    spec, path = found.spec, found.path
    _check_depth(spec, source, path)
    try:
        model = build_meta(spec)
    except UserError as error:
        said = str(found.blame(error))
        where = "" if str(path) in said else f"{path}: "
        raise UserError(f"{where}{said}; such a configuration cannot be built") from None
    except (RuntimeError, OverflowError):
        raise UserError(f"the configuration of '{path}' asks for impossible sizes; correct it") from None
    held = sum(math.prod(info.shape) for info in source.tensors.values())
    for name, tensor in stored_tensors(model).items():
        if tensor.numel() > held:
            raise UserError(
                f"'{path}' does not hold what its configuration says: {name} is {tuple(tensor.shape)}, "
                f"and all its tensors together have {held} numbers"
            )
    return model


def _check_depth(spec: ModelSpec, source: TensorSource, path: Path) -> None:
    """Refuse more blocks than the files can hold, before any is built: each stores a tensor, or ties one to another."""
    n_blocks = sum(len(stack.blocks) for stack in (spec.encoder, spec.decoder) if stack is not None)
    if n_blocks > len(source.tensors) + len(spec.ties):
        raise UserError(
            f"'{path}' does not hold what its configuration says: {n_blocks} blocks, and it has "
            f"{len(source.tensors)} tensors; correct the number of layers"
        )


def _layout(found: Description, model: Model) -> Layout:
    if found.family is None:
        return identity(stored_tensors(model), Drop(UNREAD + "*", "goes back to the format it came from"))
    fmt = found.family.hf if found.format == "hf" else found.family.gguf
    assert fmt is not None
    return fmt.layout(found.spec)


def _unread(found: Description, layout: Layout, plan: LoadPlan, source: TensorSource) -> dict[str, torch.Tensor]:
    if found.family is None:
        return {name.removeprefix(UNREAD): source.read(name).clone() for name, _ in plan.dropped}
    return layout.unread(plan, source) if found.format == "hf" else {}


def _misfit(error: UserError, found: Description, source: TensorSource) -> UserError:
    """A refusal of the layout; that the tensors are another family's comes first, and no other fix beside it."""
    other, sure = _of_another_family(found, source)
    if not other:
        return error
    if not sure:
        return UserError(f"{error}; {other}")
    return UserError(other if isinstance(error, PrefixError) else f"{other}; {error}")


def _of_another_family(found: Description, source: TensorSource) -> tuple[str, bool]:
    """What to say, and whether it is sure, where another family's tensor names fit the file better than its own do.

    Better is: a tenth more of the names have a place; or not fewer names do, not fewer of the rules are used, and one
    of the two is more. Where the file's names fit both alike (GPT-2 and StarCoder differ in shapes alone, BERT and
    RoBERTa without heads too), both are named.
    """
    if found.format != "hf" or found.family is None:
        return "", False
    fits = {name: _fit(layouts, source) for name, layouts in _case_layouts().items()}
    own = fits.pop(found.family.name)
    better = [f for f in fits.values() if f[0] >= 0.9 and (f[0] > own[0] + 0.1 or (f[0] >= own[0] and f[1] >= own[1]))]
    best = max(better, default=(0.0, 0.0))
    nearest = " or ".join(f"'{name}'" for name, fit in fits.items() if fit == best)
    if best > own:
        said = f"its tensors are those of family {nearest}"
    elif best == own and own[0] == 1.0:
        said = f"its tensors' names are also those of family {nearest}"
    else:
        return "", False
    said = (
        f"the configuration of '{found.path}' is of family '{found.family.name}', but {said}: "
        "put the right config.json beside them"
    )
    return said, best > own


@cache
def _case_layouts() -> dict[str, list[Layout]]:
    """The layouts of every family's cases and of their stacks alone, those with the same names once."""
    made: dict[str, list[Layout]] = {}
    for family in families():
        if family.hf is not None:
            cases = family.cases()
            alone = [family.hf.layout(_without_heads(case)).without_heads(lambda name: name) for case in cases]
            layouts = [family.hf.layout(case) for case in cases] + alone
            made[family.name] = list({tuple(r.their_names for r in x.rules): x for x in layouts}.values())
    return made


def _without_heads(spec: ModelSpec) -> ModelSpec:
    return spec.replace(heads={}, ties=tuple(tie for tie in spec.ties if not tie.name.startswith("heads.")))


def _fit(layouts: list[Layout], source: TensorSource) -> tuple[float, float]:
    """The best fit of any; of names that differ in numbers alone a few say enough."""
    alike: dict[str, list[str]] = {}
    for name in source.tensors:
        alike.setdefault(re.sub(r"[0-9]+", "#", name), []).append(name)
    names = [name for some in alike.values() for name in some[:2]]
    return max(layout.fit(names) for layout in layouts)


def _exact_dtype(plan: LoadPlan, model: Model, source: TensorSource) -> torch.dtype:
    """The narrowest dtype that holds every stored parameter without rounding; fp32 where anything is quantised."""
    learned = {name for name, tensor in stored_tensors(model).items() if isinstance(tensor, torch.nn.Parameter)}
    stored = {source.tensors[name].dtype for move, names in plan.moves if learned & set(move.ours) for name in names}
    if not stored <= set(_COMPUTE):
        return torch.float32
    dtypes = [_COMPUTE[name] for name in sorted(stored)]
    return reduce(torch.promote_types, dtypes) if dtypes else torch.float32


def _gguf_vocabulary(path: Path, source: TensorSource) -> tuple[Tokenizer | None, GenerationDefaults]:
    if "tokenizer.ggml.model" not in source.metadata:
        return None, GenerationDefaults()
    with named(str(path)):
        made = tokenizer_from_gguf(source.metadata)
    return made, GenerationDefaults(bos_id=made.bos_id, eos_ids=made.eos_ids, pad_id=made.pad_id)


def _tokenizer(path: Path) -> Tokenizer | None:
    return load_tokenizer(path) if path.is_dir() and any(there(path / name) for name in _TOKENIZER_FILES) else None
