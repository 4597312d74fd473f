"""Looking parameters and children up where they lie gives what the search by attribute gives, whoever replaced them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from helpers import decoder, pre
from phylon.layers.mixers.mamba import CausalConv, Mamba
from phylon.layers.norms import RMSNorm
from phylon.layers.part import Linear
from phylon.model import Block, Model, ModelSpec, build, pre_norm

TOKENS = torch.randint(11, (1, 5), generator=torch.Generator().manual_seed(0))
SPECS = {
    "attention": pre(),
    "mamba": decoder(Block(sublayers=(pre_norm(Mamba(dt_rank=2), RMSNorm()),)), norm_final=RMSNorm()),
}


class Half(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    return SPECS[request.param]


def made(spec: ModelSpec) -> Model:
    return build(spec, seed=1, device="cpu").eval()


@torch.no_grad()
def stepped(model: Model) -> torch.Tensor:
    """The logits of the last token, which comes as a step of decoding."""
    state = model.new_state(1)
    model(TOKENS[:, :-1], state=state)
    return model(TOKENS[:, -1:], state=state).logits


def weights(model: Model) -> dict[str, nn.Module]:
    """Every module of a block that owns a weight."""
    owners = (Linear, CausalConv, RMSNorm)
    block = dict(model.decoder.blocks[0].named_modules())
    return {n: m for n, m in block.items() if isinstance(m, owners) or type(m).__name__ == "RMSNormModule"}


def test_a_hook_is_asked_at_every_step(spec: ModelSpec) -> None:
    model, seen = made(spec), []
    for name, module in weights(model).items():
        module.register_forward_hook(lambda *_, name=name: seen.append(name))
    stepped(model)
    assert sorted(seen) == sorted([*weights(model)] * 2), "once for the first tokens, once for the step"


def test_weights_that_others_compute(spec: ModelSpec) -> None:
    for name in weights(made(spec)):
        halved, parametrized, pruned = made(spec), made(spec), made(spec)
        with torch.no_grad():
            weights(halved)[name].weight.mul_(0.5)
        parametrize.register_parametrization(weights(parametrized)[name], "weight", Half())
        torch.testing.assert_close(stepped(parametrized), stepped(halved), msg=name)
        mask = torch.zeros_like(weights(pruned)[name].weight)
        prune.custom_from_mask(weights(pruned)[name], "weight", mask)
        with torch.no_grad():
            weights(halved)[name].weight.zero_()
        torch.testing.assert_close(stepped(pruned), stepped(halved), msg=name)


def test_a_replaced_child_a_copy_and_weights_from_outside(spec: ModelSpec) -> None:
    model = made(spec)
    before = stepped(model)
    twin = copy.deepcopy(model)
    for name in [n for n, _ in model.decoder.blocks[0].named_children()]:
        with torch.no_grad():
            changed = copy.deepcopy(model)
            old = getattr(changed.decoder.blocks[0], name)
            setattr(changed.decoder.blocks[0], name, copy.deepcopy(old))
            for parameter in getattr(changed.decoder.blocks[0], name).parameters():
                parameter.mul_(0.5)
            other = stepped(changed)
            named = {
                n: p.detach() * 0.5 for n, p in model.named_parameters() if n.startswith(f"decoder.blocks.0.{name}.")
            }
            whole = torch.func.functional_call(model, named, (TOKENS,)).logits
            assert torch.equal(whole, changed(TOKENS).logits)
        assert not torch.equal(other, before), name
    assert torch.equal(stepped(twin), before)
    assert torch.equal(stepped(model), before)


def test_torch_compile_sees_through(spec: ModelSpec) -> None:
    for module in weights(made(spec)).values():
        if isinstance(module, CausalConv):
            continue
        x = torch.randn(2, 3, module.weight.shape[-1])
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        assert torch.allclose(compiled(x), module(x), atol=1e-6)
