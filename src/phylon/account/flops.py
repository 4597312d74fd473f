"""FLOPs of a forward pass, from the formula that every mechanism registers."""

from phylon.model import ModelSpec
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


def _heads(spec: ModelSpec, n_keys: int, *, per_document: bool) -> int:
    chosen = [head for head in spec.heads.values() if head.per_document is per_document]
    return sum(_flops(head, spec.last_stack.d_model, n_keys) for head in chosen)  # type: ignore[arg-type]


def _flops(part: Mechanism, width: int, n_keys: int) -> int:
    entry = entry_of(part)
    if entry.flops is None:
        raise UserError(f"the mechanism '{entry.kind}' registers no FLOPs formula; add flops=… to its register()")
    return entry.flops(part, width, n_keys)
