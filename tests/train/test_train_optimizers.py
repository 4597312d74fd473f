"""Adafactor, Muon and the mean of the weights: the papers' arithmetic, states that go out and back."""

import pytest
import torch
from torch import nn
from train_toys import toy_model

from phylon.spec import UserError
from phylon.spec.registry import build, entries
from phylon.train import Adafactor, AdamW, Muon
from phylon.train.ema import Ema
from phylon.train.optim import Optimizer

SPECS = [AdamW(), Adafactor(lr=1e-2, weight_decay=0.1), Muon()]


def stepped(spec, steps, state=None, **options):
    model = toy_model(**options)
    optimizer = build(spec, model.named_parameters())
    if state is not None:
        optimizer.load_state_tensors(state[1])
        model.load_state_dict(state[0])
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.sin(p.detach().float() * 50).to(p.dtype)
        optimizer.collect()
        optimizer.step(1e-2, 0.5)
    return (
        {name: p.detach().clone() for name, p in model.state_dict().items()},
        {name: t.clone() for name, t in optimizer.state_tensors().items()},
    )


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_optimizer_goes_on_bit_for_bit_from_its_state(spec, dtype):
    if isinstance(spec, Muon) and dtype == "bfloat16":
        with pytest.raises(UserError, match="muon trains the fp32 matrices"):
            stepped(spec, 1, dtype=dtype)
        return
    whole, half = stepped(spec, 6, dtype=dtype), stepped(spec, 3, dtype=dtype)
    for left, right in zip(whole, stepped(spec, 3, half, dtype=dtype), strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)
    assert any(not torch.equal(whole[0][name], half[0][name]) for name in half[0])
    with pytest.raises(UserError, match="ghost"):
        stepped(spec, 0, (half[0], half[1] | {"exp_avg.ghost": torch.zeros(1)}), dtype=dtype)


def test_adafactor_is_algorithm_4_and_5():
    start, draw = torch.randn(5, 7), torch.Generator().manual_seed(0)
    vector = torch.randn(6)
    matrix, bias = nn.Parameter(start.clone()), nn.Parameter(vector.clone())
    spec = Adafactor(lr=0.3, weight_decay=0.1)
    optimizer = build(spec, [("m", matrix), ("b", bias)])
    x, y = start.double(), vector.double()
    r, c, v = torch.zeros(5).double(), torch.zeros(7).double(), torch.zeros(6).double()
    for t in range(1, 5):
        grads = torch.randn(5, 7, generator=draw), torch.randn(6, generator=draw)
        matrix.grad, bias.grad = grads[0] * 2, grads[1] * 2
        optimizer.step(0.3, 0.5)
        g, h = (grad.double() for grad in grads)
        beta = 1 - t**-0.8
        r = beta * r + (1 - beta) * (g**2 + 1e-30).sum(1)
        c = beta * c + (1 - beta) * (g**2 + 1e-30).sum(0)
        v = beta * v + (1 - beta) * (h**2 + 1e-30)
        for name, (grad, second) in {"x": (g, torch.outer(r, c) / r.sum()), "y": (h, v)}.items():
            u = grad / second.sqrt()
            u = u / max(1.0, float(u.square().mean().sqrt()))
            if name == "x":
                alpha = 0.3 * max(1e-3, float(x.square().mean().sqrt()))
                x = (1 - 0.3 * 0.1) * x - alpha * u
            else:
                y = y - 0.3 * max(1e-3, float(y.square().mean().sqrt())) * u
    torch.testing.assert_close(matrix.detach().double(), x, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(bias.detach().double(), y, rtol=1e-4, atol=1e-5)
    kept = sum(t.numel() for name, t in optimizer.state_tensors().items() if name.endswith(".m"))
    assert kept == 5 + 7 + 1, "a row, a column and a count"


def test_muon_takes_the_matrices_of_blocks_and_adamw_the_rest():
    model = toy_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    rest = toy_model()
    for p, q in zip(rest.parameters(), model.parameters(), strict=True):
        p.grad = q.grad.clone()
    optimizer = build(Muon(weight_decay=0.0), model.named_parameters())
    norm = optimizer.norm(2.0)
    assert norm.value == pytest.approx(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])) / 2)
    optimizer.step(1e-2, 1.0)
    build(AdamW(weight_decay=0.0), rest.named_parameters()).step(1e-2, 1.0)
    for (name, p), q in zip(model.named_parameters(), rest.parameters(), strict=True):
        if p.ndim == 2 and ".blocks." in name:
            step = (before[name] - p.detach()) / (1e-2 * 0.2 * max(p.shape) ** 0.5)
            values = torch.linalg.svdvals(step)
            assert 0.6 < float(values.min()) <= float(values.max()) < 1.3, name
        else:
            assert torch.equal(p, q), name
    bad = model.decoder.blocks[0].ffn.up_proj.weight
    bad.grad = torch.full_like(bad, torch.inf)
    assert optimizer.norm(1.0).not_finite == ("decoder.blocks.0.ffn.up_proj.weight",)


def test_the_mean_of_the_weights_lags_swaps_in_and_goes_out_and_back():
    weight = nn.Parameter(torch.zeros(3))
    ema = Ema(0.5, {"w": weight})
    expected = torch.zeros(3)
    for t in range(9):
        with torch.no_grad():
            weight += 1
        ema.update()
        keep = min(0.5, (1 + t) / (10 + t))
        expected = keep * expected + (1 - keep) * weight.detach()
    torch.testing.assert_close(ema.means["w"], expected)
    with ema.swapped():
        torch.testing.assert_close(weight.detach(), expected)
    assert torch.equal(weight.detach(), torch.full((3,), 9.0))
    other = Ema(0.5, {"w": nn.Parameter(torch.zeros(3))})
    other.load_state_tensors(ema.state_tensors())
    assert torch.equal(other.means["w"], ema.means["w"])
    assert other.updates == 9
    with pytest.raises(UserError, match="another model"):
        other.load_state_tensors({"v": torch.zeros(3), "updates": torch.tensor(1)})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Adafactor(lr=0.0), "lr"),
        (lambda: Adafactor(decay_power=0.5), "decay_power"),
        (lambda: Adafactor(weight_decay=-1.0), "weight_decay"),
        (lambda: Adafactor(clip=0.0), "clip"),
        (lambda: Muon(momentum=1.0), "momentum"),
        (lambda: Muon(lr=0.0), "lr"),
        (lambda: build(Muon(), [("w", nn.Parameter(torch.zeros(2, 2)))]), "choose adamw"),
    ],
)
def test_bad_settings_are_one_line(make, words):
    with pytest.raises(UserError, match=words):
        make()


def test_every_case_of_every_optimizer_lowers_a_loss():
    for entry in entries(Optimizer):
        for case in entry.cases():
            model = toy_model()
            optimizer = build(case, model.named_parameters())
            tokens = torch.arange(12)[None] % 13
            losses = []
            for _ in range(15):
                loss = model(tokens, targets=tokens.roll(-1)).losses["lm"]
                loss.sum.backward()
                losses.append(float(loss.mean.detach()))
                optimizer.collect()
                optimizer.step(case.lr, 1 / 12)
            assert losses[-1] < 0.9 * losses[0], case
