"""FLOPs of a forward pass, from the formula that every mechanism registers."""

from collections.abc import Mapping
from typing import NamedTuple

from phylon.layers.mixers.cross import CrossAttention
from phylon.model import ModelSpec
from phylon.model.spec import Stack
from phylon.patterns import SymmetricWindow, Window
from phylon.spec.base import Mechanism
from phylon.spec.errors import UserError
from phylon.spec.registry import entry_of


def flops_per_token(spec: ModelSpec, n_keys: int) -> int:
    """Matrix-product FLOPs of one token through every stack and the heads that score tokens."""
    total = 0
    for stack in spec.stacks.values():
        ops = [branch.op for block in stack.blocks for sublayer in block.sublayers for branch in sublayer.branches]
        parts = [stack.embed, *ops, *stack.shared.values()]
        total += sum(_flops(part, stack.d_model, n_keys) for part in parts)  # type: ignore[arg-type]
    return total + _heads(spec, n_keys, per_document=False)


def flops_per_document(spec: ModelSpec) -> int:
    """Matrix-product FLOPs of the heads that read one vector a document."""
    return _heads(spec, 1, per_document=True)


class Pass(NamedTuple):
    """The shapes of a forward pass: ``rows`` of ``length`` tokens (or patches), ``source`` those of a row's source.

    ``scored``: by head, how many tokens (or, of a head that pools, documents) it is asked for.
    """

    rows: int
    length: int
    source: int = 0
    scored: Mapping[str, int] = {}


def flops_of_pass(spec: ModelSpec, shapes: Pass) -> int:
    """Matrix-product FLOPs of a pass as it is computed, padding included, with the keys that a query may see.

    A causal query is charged the mean of a row's, (T + 1) / 2, one of a window, causal or symmetric, the window's mean,
    every other (an encoder's, with global tokens or blocks too) all T, and a decoder's all S of the source as well.
    Projections of the source are charged once a source token, pixels once a patch.
    """
    total = 0
    if spec.encoder is not None:
        total += _stack(spec.encoder, shapes.source or shapes.length, 0)
    if spec.decoder is not None:
        total += _stack(spec.decoder, shapes.length, shapes.source)
    width, keys = spec.last_stack.d_model, (shapes.length + 1) // 2
    heads = sum(n * _flops(spec.heads[name], width, keys) for name, n in shapes.scored.items())  # type: ignore[arg-type]
    return shapes.rows * total + heads


def _stack(stack: Stack, length: int, source: int) -> int:
    """Of one row."""
    width = stack.d_model
    total = (length - getattr(stack.embed, "n_extra", 0)) * _flops(stack.embed, width, length)  # type: ignore[arg-type]
    for shared in stack.shared.values():
        total += length * _flops(shared, width, length)  # type: ignore[arg-type]
    for op in (branch.op for block in stack.blocks for sublayer in block.sublayers for branch in sublayer.branches):
        if isinstance(op, CrossAttention):
            maps = _flops(op, width, 0)  # half of them queries and outputs, half keys and values
            total += maps * (length + source) // 2 + length * (_flops(op, width, source) - maps)
        else:
            total += length * _flops(op, width, _keys(op, length))  # type: ignore[arg-type]
    return total


def _keys(op: object, length: int) -> int:
    """How many keys a query of a row sees on average."""
    pattern = getattr(op, "pattern", None)
    if isinstance(pattern, SymmetricWindow):
        radius = min(pattern.radius, length - 1)
        return round(1 + 2 * radius - radius * (radius + 1) / length)
    if pattern is None or not pattern.streams:
        return length
    if isinstance(pattern, Window) and pattern.size < length:
        return round(pattern.size - pattern.size * (pattern.size - 1) / (2 * length))
    return (length + 1) // 2


def _heads(spec: ModelSpec, n_keys: int, *, per_document: bool) -> int:
    chosen = [head for head in spec.heads.values() if head.per_document is per_document]
    return sum(_flops(head, spec.last_stack.d_model, n_keys) for head in chosen)  # type: ignore[arg-type]


def _flops(part: Mechanism, width: int, n_keys: int) -> int:
    entry = entry_of(part)
    if entry.flops is None:
        raise UserError(f"the mechanism '{entry.kind}' registers no FLOPs formula; add flops=… to its register()")
    return entry.flops(part, width, n_keys)
