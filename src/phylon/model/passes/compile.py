"""``torch.compile`` of every block, given up with a reason where it does not work."""

from collections.abc import Callable

import torch

from phylon.model.block import BlockModule
from phylon.model.model import Model


def compile_blocks(model: Model, trial: Callable[[], object]) -> str | None:
    """Compile every block in place; ``None``, or why the model stays as it was.

    ``trial`` runs the model as it will be run (forward and backward), so that a compiler that is missing or fails shows
    here and not in the middle of a run; equal blocks share what is compiled. Parameter names do not change.
    """
    blocks = [module for module in model.modules() if isinstance(module, BlockModule)]
    before = [block.__dict__.get("forward") for block in blocks]
    try:
        for block in blocks:
            block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
        # Blocks of several kinds each need a version; the default limit is 8, and passing it is silent.
        with torch._dynamo.config.patch(recompile_limit=8 * len(blocks)):
            trial()
    except Exception as error:
        for block, forward in zip(blocks, before, strict=True):
            del block.forward
            if forward is not None:
                block.forward = forward  # type: ignore[method-assign]
        torch._dynamo.reset()
        return _reason(error)
    return None


def _reason(error: Exception) -> str:
    """The first telling line of a compiler's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
