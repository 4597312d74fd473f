"""FLOPs of a forward pass, from the formula that every mechanism registers."""

from phylon.model import ModelSpec
from phylon.spec.base import Mechanism
from phylon.spec.errors import UserError
from phylon.spec.registry import entry_of


def flops_per_token(spec: ModelSpec, n_keys: int) -> int:
    """Matrix-product FLOPs of one token through every stack and head; a multiply-add counts two.

    A head that pools a row is charged once a row of ``n_keys`` tokens, and each token its share, rounded.
    """
    total = 0
    for stack in spec.stacks.values():
        ops = [branch.op for block in stack.blocks for sublayer in block.sublayers for branch in sublayer.branches]
        parts = [stack.embed, *ops, *stack.shared.values()]
        total += sum(_flops(part, stack.d_model, n_keys) for part in parts)  # type: ignore[arg-type]
    for head in spec.heads.values():
        flops = _flops(head, spec.last_stack.d_model, n_keys)  # type: ignore[arg-type]
        total += flops if getattr(head, "pool", None) is None else round(flops / n_keys)
    return total


def _flops(part: Mechanism, width: int, n_keys: int) -> int:
    entry = entry_of(part)
    if entry.flops is None:
        raise UserError(f"the mechanism '{entry.kind}' registers no FLOPs formula; add flops=… to its register()")
    return entry.flops(part, width, n_keys)
