"""``torch.compile`` of every block, given up with a reason where it does not work."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phylon.model.block import BlockModule
from phylon.model.model import Model


def compile_blocks(model: Model, trial: Callable[[], object]) -> str | None:
    """Compile every block in place; ``None``, or why the model stays as it was.

    ``trial`` runs the model as it will be run (forward and backward), so that a compiler that is missing or fails shows
    here and not in the middle of a run; equal blocks share what is compiled. Parameter names do not change. Without
    gradients blocks run as they were: evaluations and samples, of many lengths, would be compiled for each.
    """
    blocks = [module for module in model.modules() if isinstance(module, BlockModule)]
    before = [block.__dict__.get("forward") for block in blocks]
    try:
        for block in blocks:
            block.forward = _compiled(block.forward)  # type: ignore[method-assign]
        # Blocks of several kinds each need a version, later in the run as well.
        limit = torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = max(limit, 8 * len(blocks))
        trial()
    except Exception as error:
        for block, forward in zip(blocks, before, strict=True):
            del block.forward
            if forward is not None:
                block.forward = forward  # type: ignore[method-assign]
        torch._dynamo.reset()
        return _reason(error)
    return None


def _compiled(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    compiled = torch.compile(plain)

    def run(*given: Any) -> Tensor:
        return (compiled if torch.is_grad_enabled() else plain)(*given)

    return run


def _reason(error: Exception) -> str:
    """The first telling line of a compiler's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
