"""Activation recomputation: keep each block's input, and compute its inside again in the backward pass.

Chen et al. (arXiv:1604.06174), section 4: memory for one block's activations and all blocks' inputs, for one more
forward pass. The gradients are bit for bit the same, dropout included: the random state is put back.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from phylon.layers.context import Context
from phylon.model.block import BlockModule
from phylon.model.model import Model

Forward = Callable[[Tensor, Context], Tensor]


def recompute_blocks(model: Model) -> int:
    """Recompute every block of the model in the backward pass; how many blocks there are.

    In evaluation, without gradients, and with a state nothing changes.
    """
    blocks = [module for module in model.modules() if isinstance(module, BlockModule)]
    for block in blocks:
        block.forward = _recomputed(block, block.forward)  # type: ignore[method-assign]
    return len(blocks)


def _recomputed(block: BlockModule, forward: Forward) -> Forward:
    def run(x: Tensor, ctx: Context) -> Tensor:
        if not (torch.is_grad_enabled() and block.training) or ctx.state is not None:
            return forward(x, ctx)
        # What earlier blocks have shared; the second time this block must do, or not do, the same work again.
        known, first = dict(ctx._memo), True

        def inner(x: Tensor) -> Tensor:
            nonlocal first
            if first:
                first = False
                return forward(x, ctx)
            return forward(x, replace(ctx, taps=None, aux={}, _memo=dict(known)))

        return checkpoint(inner, x, use_reentrant=False)

    return run
