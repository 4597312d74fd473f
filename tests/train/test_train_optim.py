"""AdamW: decay by role, fp32 masters, norms, named state."""

import math

import pytest
import torch
from torch import nn
from train_toys import toy_model

from phylon.spec import UserError
from phylon.spec.registry import build
from phylon.train import AdamW


def optimizer_of(named, **options):
    return build(AdamW(**options), named)


def test_bf16_weight_reaches_its_target_through_the_master():
    """Case 26: 100 unit gradients at 1e-3 move 1.0 to 0.9; rounding every step to bf16 would leave it at 1.0."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = optimizer_of([("w", weight)], lr=1e-3, weight_decay=0.0)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.collect()
        optimizer.step(1e-3, 1.0)
    assert float(optimizer.masters["w"].detach()) == pytest.approx(0.9, abs=1e-4)
    assert float(weight.detach()) == float(torch.tensor(0.9).bfloat16())


def test_masters_collect_micro_batches_in_fp32():
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = optimizer_of([("w", weight)])
    for value in (256.0, 1.0, 1.0):  # 256 + 1 is 256 in bf16
        weight.grad = torch.full_like(weight, value)
        optimizer.collect()
    assert optimizer.norm(1).value == 258.0


def test_matrices_and_embeddings_decay_and_norms_and_biases_do_not():
    model = toy_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = optimizer_of(model.named_parameters(), weight_decay=0.5)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step(0.1, 1.0)
    for name, p in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if p.ndim >= 2 else 1.0
        torch.testing.assert_close(p.detach(), before[name] * factor)
    assert {p.ndim for p in model.parameters()} == {1, 2}


def test_what_is_named_does_not_decay():
    a, b = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = optimizer_of([("mixer.A_log", a), ("embed.weight", b)], weight_decay=0.5)
    for p in (a, b):
        p.grad = torch.zeros_like(p)
    optimizer.step(0.1, 1.0)
    assert (float(a.detach().mean()), float(b.detach().mean())) == (1.0, pytest.approx(0.95))
    only = optimizer_of([("embed.weight", b)], undecayed=("*embed*",), weight_decay=0.5)
    b.grad = torch.zeros_like(b)
    before = b.detach().clone()
    only.step(0.1, 1.0)
    assert torch.equal(b.detach(), before)


def test_one_step_is_the_papers_algorithm():
    start, gradient = torch.randn(3, 4), torch.randn(3, 4)
    weight = nn.Parameter(start.clone())
    spec = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = optimizer_of([("w", weight)], **spec)
    expected, m, v = start.double(), torch.zeros(3, 4).double(), torch.zeros(3, 4).double()
    for t in range(1, 6):
        scaled = (gradient * t).double()
        m, v = 0.9 * m + 0.1 * scaled, 0.95 * v + 0.05 * scaled**2
        expected = expected - 0.01 * 0.1 * expected
        expected -= 0.01 * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
        weight.grad = gradient * t * 4
        optimizer.step(0.01, 0.25)
    torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-5, atol=1e-6)


def test_the_norm_is_global_and_names_what_is_not_finite():
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, 2))
    optimizer = optimizer_of([("a", a), ("b", b)])
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.full((2, 2), 2.0)
    assert optimizer.norm(2).value == pytest.approx(2.5)
    for bad in (math.nan, math.inf):
        b.grad[0, 0] = bad
        assert optimizer.norm(2).not_finite == ("b",)


def test_state_goes_out_and_back_bit_for_bit():
    def trained(steps, state=None):
        model = toy_model(dtype="bfloat16")
        optimizer = optimizer_of(model.named_parameters())
        if state is not None:
            optimizer.load_state_tensors(state[1])
            model.load_state_dict(state[0])
        for _ in range(steps):
            for p in model.parameters():
                p.grad = torch.sin(p.detach().float() * 50).to(p.dtype)
            optimizer.collect()
            optimizer.step(1e-2, 1.0)
        clone = lambda tensors: {name: t.clone() for name, t in tensors.items()}
        return clone(model.state_dict()), clone(optimizer.state_tensors())

    whole, half = trained(6), trained(3)
    for left, right in zip(whole, trained(3, half), strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)
    assert any(not torch.equal(whole[1][name], half[1][name]) for name in half[1])


def test_a_foreign_state_is_refused():
    model = toy_model()
    optimizer = optimizer_of(model.named_parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step(1e-3, 1.0)
    state = optimizer.state_tensors()
    with pytest.raises(UserError, match=r"exp_avg.ghost"):
        optimizer.load_state_tensors(state | {"exp_avg.ghost": torch.zeros(1)})
    name = next(name for name in state if name.startswith("exp_avg."))
    with pytest.raises(UserError, match="shape"):
        optimizer.load_state_tensors(state | {name: torch.zeros(1)})


@pytest.mark.parametrize("bad", [{"lr": 0.0}, {"betas": (0.9, 1.0)}, {"eps": 0.0}, {"clip": 0.0}, {"weight_decay": -1}])
def test_impossible_settings_are_refused(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        AdamW(**bad)


def test_a_setting_is_refused_alone():
    with pytest.raises(UserError, match=r"^weight_decay must be at least 0, got -1\.0$"):
        AdamW(weight_decay=-1.0)


def test_a_frozen_model_is_refused():
    with pytest.raises(UserError, match="unfreeze"):
        optimizer_of([("w", nn.Parameter(torch.zeros(1), requires_grad=False))])
