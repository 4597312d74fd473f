"""What a run holds in memory by part, from the shapes of the model alone."""

from collections.abc import Iterable

import torch

from phylon.model import Model
from phylon.model.block import BlockModule
from phylon.train.recipe import Recipe
from phylon.train.world import World


def shards(recipe: Recipe, world: World) -> int:
    """Over how many processes the weights are spread, with all that is kept of each."""
    return world.size if recipe.run.parallel == "fsdp" else 1


def state_bytes(recipe: Recipe, shape: Model, world: World) -> dict[str, float]:
    """Bytes on one process by part, optimizer state with fp32 masters, from the shapes alone."""
    parameters = dict(shape.named_parameters())
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    narrow = sum(p.numel() for p in trained.values() if p.element_size() < 4)
    numbers = sum(p.numel() for p in trained.values())
    spread = shards(recipe, world)
    return {
        "weights_bytes": _bytes(parameters.values()) / spread,
        "gradients_bytes": 4.0 * numbers / spread,
        "optimizer_bytes": (recipe.optim.state_bytes(trained) + 4.0 * narrow) / spread,
        "mean_bytes": 0.0 if recipe.run.ema is None else 4.0 * numbers / spread,
        "objective_bytes": recipe.objective.held_bytes(),
        "exchange_bytes": _gathered_bytes(shape) if spread > 1 else _bytes(trained.values()) if world.size > 1 else 0.0,
    }


def _gathered_bytes(shape: Model) -> float:
    """What is whole on a process at the peak of FSDP's backward pass, beside the shards.

    The weights outside of blocks and their gradients, and of one block weights, gradients and the copy that is being
    reduced, while the next is fetched into a buffer and taken from it; or, at the end, the copy of what is outside.
    It was within a quarter of the measured peak on 2 and 4 processes. (DDP holds the gradients once more, in buckets.)
    """
    blocks = [list(module.parameters()) for module in shape.modules() if isinstance(module, BlockModule)]
    inside = {id(p) for block in blocks for p in block}
    outside = [p for p in shape.parameters() if id(p) not in inside]
    largest = max(blocks, key=_bytes, default=[])
    root, root_gradients = _bytes(outside), _bytes(p for p in outside if p.requires_grad)
    block, block_gradients = _bytes(largest), _bytes(p for p in largest if p.requires_grad)
    return root + root_gradients + max(3 * block + 2 * block_gradients, root_gradients + block)


def formula_bytes(recipe: Recipe, shape: Model, world: World) -> float:
    """Activations of a part of a batch on one process, as if every map in a block kept its input and output in fp32,
    and the block 12 numbers of the width more. Measured steps, whose kernels keep no scores, take less than half.
    """
    tokens = _tokens(recipe, world)
    maps = [p for name, p in shape.named_parameters() if ".blocks." in f".{name}" and p.ndim > 1]
    numbers = sum(2 * p.numel() / p.shape[-1] for p in maps)
    return (
        4.0 * tokens * (numbers + sum(12 * stack.d_model * len(stack.blocks) for stack in shape.spec.stacks.values()))
    )


def rough_bytes(recipe: Recipe, shape: Model, world: World) -> float:
    """An upper bound of the activations: about 100 numbers of the width a block and token, and whole score matrices;
    of maps that are wider than the model, 3 numbers for each that comes out.

    Korthikanti et al. (arXiv:2205.05198), equation 1, has 34 bytes and 5 bytes of scores for half precision.
    """
    length = recipe.data.seq_len
    tokens = _tokens(recipe, world)
    total = 0.0
    for stack in shape.spec.stacks.values():
        total += 4.0 * tokens * len(stack.blocks) * (100 * stack.d_model + 5 * length * 32)
    for name, parameter in shape.named_parameters():
        if ".blocks." in f".{name}" and parameter.ndim > 1:
            total += 4.0 * tokens * 3 * parameter.numel() / parameter.shape[-1]
    return total


def _tokens(recipe: Recipe, world: World) -> float:
    """The most tokens of a part of a batch on one process."""
    most = recipe.objective.most_tokens(recipe) / (recipe.run.accumulate * world.size)
    return max(recipe.data.seq_len, most)


def _bytes(tensors: Iterable[torch.Tensor]) -> float:
    return float(sum(p.numel() * p.element_size() for p in tensors))
