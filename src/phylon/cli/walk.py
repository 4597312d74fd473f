"""Every tensor of one forward pass, station by station, measured by running it on the meta device."""

from typing import Any

import torch

from phylon.account.account import check_sizes
from phylon.cli.page import in_short, kinds_of_block
from phylon.model import Model, ModelSpec, record
from phylon.model.build import build
from phylon.spec.errors import UserError, check_size

SEQ_LEN = 8
LETTERS = "B batch, T queries, S keys, D d_model, H heads, K key heads, E head_dim, F d_ff"
WORDS = {
    "tokens": "(B, T) token ids",
    "source": "(B, T) token ids of the source",
    "images": "(B, C, H, W) pixels",
    "embed.out": "(B, T, D) a vector a token",
    "resid_pre": "(B, T, D) the residual stream",
    "q": "(B, T, H, E) queries",
    "k": "(B, S, K, E) keys",
    "v": "(B, S, K, E) values",
    "scores": "(B, H, T, S) scaled products",
    "weights": "(B, H, T, S) softmax over the keys",
    "z": "(B, T, H, E) weighted values",
    "hidden": "(B, T, F) after the activation",
    "out": "(B, T, D) the increment",
    "resid_mid": "(B, T, D) the stream, increment added",
    "resid_post": "(B, T, D) the stream, increment added",
    "logits": "a score for every outcome",
}
END = "(B, T, D) what the heads read"
Stations = list[tuple[str, tuple[int, ...]]]


def walk_page(name: str, spec: ModelSpec, *, batch: int, seq_len: int | None = None) -> str:
    """The shapes of one pass over ``batch`` rows of ``seq_len`` tokens (8), or of images; alike blocks once."""
    image = _image_shape(spec)
    if image is not None and seq_len is not None:
        raise UserError(f"--seq-len is of tokens, and {name} reads images of its own size; leave it out")
    if image is None:
        seq_len = SEQ_LEN if seq_len is None else seq_len
        check_sizes(spec, batch, seq_len)
    check_size("batch", batch)
    stations = walk(spec, batch, seq_len)
    size = f"seq_len {seq_len}" if image is None else f"images {' x '.join(map(str, image))}"
    lines = [f"{name}: one forward pass, batch {batch}, {size}", LETTERS, ""]
    for path, shape in stations:
        if "." not in path:
            lines.append(_row(0, path, shape, WORDS.get(path, "")))
    for stack_name, stack in spec.stacks.items():
        own = [(p.removeprefix(f"{stack_name}."), s) for p, s in stations if p.startswith(f"{stack_name}.")]
        lines += ["", stack_name]
        lines += [_row(1, p, s, _words(p)) for p, s in own if p.startswith("embed")]
        for _, places in kinds_of_block(stack):
            lines += _block(own, places)
        lines += [_row(1, p, s, _end_words(p)) for p, s in own if not p.startswith(("embed", "blocks"))]
    lines += [
        "",
        "heads",
        *(_row(1, p.removeprefix("heads."), s, _words(p)) for p, s in stations if p.startswith("heads.")),
    ]
    return "\n".join(lines)


def walk(spec: ModelSpec, batch: int, seq_len: int | None) -> Stations:
    """Path and shape of every recorded tensor and every norm's output, in the order of the pass."""
    image = _image_shape(spec)
    if image is None and any(not hasattr(stack.embed, "vocab_size") for stack in spec.stacks.values()):
        raise UserError("--shapes feeds token ids or images, and this model takes other inputs")
    inputs: dict[str, Any] = {}
    if image is not None:
        inputs["images"] = torch.zeros(batch, *image)
    else:
        assert seq_len is not None
        names = ["source", "tokens"] if spec.encoder is not None and spec.decoder is not None else ["tokens"]
        inputs |= dict.fromkeys(names, torch.zeros(batch, seq_len, dtype=torch.int64))
    try:
        return _pass(build(spec, device="meta").eval(), inputs)
    except RuntimeError:
        # Routers look at their values, which the meta device has not.
        return _pass(_hollow(spec).eval(), inputs)


def _image_shape(spec: ModelSpec) -> tuple[int, int, int] | None:
    """(C, H, W) of the images that the model was made for, ``None`` for one that reads no images."""
    return getattr(spec.last_stack.embed, "image_shape", None)


def _pass(model: Model, inputs: dict[str, torch.Tensor]) -> Stations:
    with torch.inference_mode(), record(model, "*") as taps:
        hooks = [_recorded(module, path, taps) for path, module in model.named_modules() if _is_norm(model, path)]
        model(**{name: value.to(model.device) for name, value in inputs.items()})
        for hook in hooks:
            hook.remove()
    given = [(name, tuple(value.shape)) for name, value in inputs.items()]
    return given + [(path, tuple(value.shape)) for path, value in taps.items()]


def _hollow(spec: ModelSpec) -> Model:
    """A model on the CPU whose every weight is one zero, seen as the whole tensor: any size, and no memory."""
    model = build(spec, device="meta")
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            zero = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
            module._parameters[name] = torch.nn.Parameter(zero, requires_grad=False)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    return model


def _recorded(module: torch.nn.Module, path: str, taps: dict[str, torch.Tensor]) -> Any:
    def keep(_module: object, _inputs: object, output: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> None:
        # A norm that also adds an increment gives the sum before what is normalised.
        taps[path] = output if isinstance(output, torch.Tensor) else output[-1]

    return module.register_forward_hook(keep)


def _is_norm(model: Model, path: str) -> bool:
    return "norm" in path.rpartition(".")[2].split("_")


def _block(stations: Stations, places: list[int]) -> list[str]:
    """One kind of block; that all of its blocks have the same shapes is looked at, not assumed."""
    walks = [_below(stations, f"blocks.{i}.") for i in places]
    assert all(walk == walks[0] for walk in walks), "blocks of one spec differ in their shapes"
    times = f"{len(places)} times" if len(places) > 1 else ""
    head = f"{f'  blocks {in_short(places)}':<22}{times}".rstrip()
    return [head, *(_row(2, path, shape, _words(path)) for path, shape in walks[0])]


def _below(stations: Stations, prefix: str) -> Stations:
    return [(path.removeprefix(prefix), shape) for path, shape in stations if path.startswith(prefix)]


def _words(path: str) -> str:
    if "norm" in path.rpartition(".")[2].split("_"):
        return "normalised"
    last = path.rpartition(".")[2]
    return WORDS.get(path) or WORDS.get(last) or (WORDS["resid_mid"] if last.startswith("resid_mid") else "")


def _end_words(path: str) -> str:
    return END if path == "out" else _words(path)


def _row(depth: int, name: str, shape: tuple[int, ...], words: str) -> str:
    return f"{'  ' * depth + name:<22}{list(shape)!s:<21}{words}".rstrip()
