"""Router margins: parity says nothing where a tie decides, so tests assert that no choice is near one."""

import torch
from torch import Tensor

from phylon.layers.ffn.moe import MoEModule
from phylon.model import Model

NOISE = 1e-4


@torch.no_grad()
def assert_clear(model: Model, *inputs: Tensor, **options: Tensor) -> None:
    """Noise of ``NOISE`` of the largest logit, ten times what the tolerance allows, changes no choice."""
    seen: list[tuple[MoEModule, Tensor]] = []
    mixtures = [module for module in model.modules() if isinstance(module, MoEModule)]
    assert mixtures, "the model has no experts"

    def watch(module: MoEModule):
        plain = module.router.choose

        def choose(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            seen.append((module, logits))
            return plain(logits)

        return choose

    for module in mixtures:
        module.router.choose = watch(module)
    try:
        model(*inputs, **options)
    finally:
        for module in mixtures:
            del module.router.choose
    generator = torch.Generator().manual_seed(0)
    for module, logits in seen:
        if logits.shape[-1] > 1:
            # Padding is zero before the router, so that its logits are all alike; what it chooses is not dispatched.
            logits = logits[logits.amax(-1) > logits.amin(-1)]
        wanted = module.router.choose(logits)[0].sort(-1).values
        for _ in range(5):
            noise = torch.randn(logits.shape, generator=generator).clamp(-3, 3) * NOISE * logits.abs().max()
            chosen = module.router.choose(logits + noise)[0].sort(-1).values
            assert torch.equal(wanted, chosen), f"{module.path}: a choice hangs on less than {NOISE}; draw again"
