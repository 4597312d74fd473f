"""Training mixtures of experts: weighed terms, exact under accumulation; the selection bias that no gradient moves."""

import torch
from train_toys import LENGTH, VOCAB, ToyLoader, toy_recipe

from phylon.families.decoder import llama_spec
from phylon.layers.ffn.mlp import GLU
from phylon.layers.ffn.moe import MoE
from phylon.layers.ffn.routers import GroupedSigmoidRouter, RenormalisedRouter
from phylon.layers.inits import FanInInit
from phylon.model import Model, build
from phylon.spec import override
from phylon.train import AdamW, Trainer
from phylon.train.objectives import NextToken

SGD_LIKE = AdamW(lr=1e-2, eps=1.0, betas=(0.0, 0.0), weight_decay=0.0)


def trained(folder, router, objective: NextToken, accumulate: int = 1, steps: int = 2) -> Model:
    spec = llama_spec(d_model=16, n_layers=2, n_heads=2, vocab_size=VOCAB, max_seq_len=LENGTH, init=FanInInit(gain=2.0))
    spec = override(spec, {"decoder.blocks.*.ffn": MoE(n_experts=4, expert=GLU(d_ff=12), router=router)})
    model = build(spec, seed=1, device="cpu")
    recipe = toy_recipe(steps=steps, optim=SGD_LIKE, accumulate=accumulate).replace(objective=objective)
    Trainer(model, ToyLoader(), recipe, folder).run()
    return model


def test_terms_are_those_of_the_whole_batch(tmp_path) -> None:
    """Case 30: added whenever the coefficient is not 0; case 24: whatever the number of parts."""
    router, weighed = RenormalisedRouter(top_k=2), NextToken(balance=5.0, z_loss=0.5)
    whole = trained(tmp_path / "whole", router, weighed)
    parts = trained(tmp_path / "parts", router, weighed, accumulate=4)
    plain = trained(tmp_path / "plain", router, NextToken())
    moved = 0.0
    for (name, mine), theirs, without in zip(
        whole.named_parameters(), parts.parameters(), plain.parameters(), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6, msg=name)
        moved = max(moved, float((mine - without).detach().abs().max())) if "router" in name else moved
    assert moved > 1e-4


def test_the_selection_bias_follows_the_load(tmp_path) -> None:
    router = GroupedSigmoidRouter(top_k=2, n_groups=2, top_groups=1)
    model = trained(tmp_path / "moved", router, NextToken(bias_rate=0.01), steps=1)
    still = trained(tmp_path / "still", router, NextToken())
    biases = [b for name, b in model.named_buffers() if name.endswith("selection_bias")]
    assert len(biases) == 2
    for bias in biases:
        steps = bias / 0.01
        assert torch.equal(steps, steps.round()) or torch.allclose(steps, steps.round(), atol=1e-4)
        assert 0 < float(bias.abs().max()) <= 0.01 + 1e-6
    assert all(not b.any() for name, b in still.named_buffers() if name.endswith("selection_bias"))
