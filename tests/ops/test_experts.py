"""The experts op: against the formula token by token, gradients, empty experts, what is not dispatched, refusals."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from phylon.ops.experts import ExpertCall, ExpertWeights, dispatch, experts, explain
from phylon.ops.experts.grouped import Grouped
from phylon.spec.errors import UserError

SIZES = [(1, 1, 1), (7, 3, 2), (13, 5, 4), (63, 4, 1)]


def weights(
    n_experts: int, d: int, f: int, *, gated: bool, bias: bool = False, dtype: torch.dtype = torch.float64
) -> ExpertWeights:
    g = torch.Generator().manual_seed(n_experts)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()

    return ExpertWeights(
        up=made(n_experts, f, d),
        down=made(n_experts, d, f),
        gate=made(n_experts, f, d) if gated else None,
        up_bias=made(n_experts, f) if bias else None,
        down_bias=made(n_experts, d) if bias else None,
        gate_bias=made(n_experts, f) if bias and gated else None,
    )


def call(n: int, n_experts: int, k: int, d: int = 8, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(n)
    x = torch.randn(n, d, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    chosen = torch.rand(n, n_experts, generator=g).topk(k).indices
    chosen = chosen.masked_fill(torch.rand(n, k, generator=g) < 0.2, -1)
    return x, chosen, torch.rand(n, k, generator=g, dtype=torch.float64).requires_grad_()


def by_formula(x: Tensor, chosen: Tensor, gates: Tensor, w: ExpertWeights) -> Tensor:
    rows = []
    for n in range(len(x)):
        row = torch.zeros_like(x[n])
        for j, e in enumerate(chosen[n].tolist()):
            if e < 0:
                continue
            up = w.up[e] @ x[n] + (0 if w.up_bias is None else w.up_bias[e])
            if w.gate is None:
                hidden = torch.relu(up)
            else:
                hidden = torch.relu(w.gate[e] @ x[n] + (0 if w.gate_bias is None else w.gate_bias[e])) * up
            row = row + gates[n, j] * (w.down[e] @ hidden + (0 if w.down_bias is None else w.down_bias[e]))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("n", "n_experts", "k"), SIZES)
def test_formula_and_gradients(n: int, n_experts: int, k: int, gated: bool, bias: bool) -> None:
    x, chosen, gates = call(n, n_experts, k)
    w = weights(n_experts, 8, 5, gated=gated, bias=bias)
    leaves = [x, gates, *(t for t in (w.up, w.down, w.gate, *w.biases) if t is not None)]
    ours, theirs = experts(x, chosen, gates, w, activation="relu"), by_formula(x, chosen, gates, w)
    torch.testing.assert_close(ours, theirs)
    pull = torch.randn_like(ours)
    for mine, wanted in zip(_grads(ours, leaves, pull), _grads(theirs, leaves, pull), strict=True):
        torch.testing.assert_close(mine, wanted)


def _grads(out: Tensor, leaves: list[Tensor], pull: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(out, leaves, pull, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]


def test_gradcheck() -> None:
    x, chosen, gates = call(5, 3, 2, d=3)
    w = weights(3, 3, 2, gated=True)

    def run(x: Tensor, gates: Tensor, up: Tensor, down: Tensor, gate: Tensor) -> Tensor:
        return experts(x, chosen, gates, ExpertWeights(up=up, down=down, gate=gate))

    assert torch.autograd.gradcheck(run, (x, gates, w.up, w.down, w.gate))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_expert_is_its_ffn_bit_for_bit(dtype: torch.dtype) -> None:
    x = torch.randn(37, 8, dtype=dtype)
    w = weights(1, 8, 5, gated=True, dtype=dtype)
    assert w.gate is not None
    ours = experts(x, torch.zeros(37, 1, dtype=torch.int64), torch.ones(37, 1), w, backend="reference")
    plain = F.linear(F.silu(F.linear(x, w.gate[0])) * F.linear(x, w.up[0]), w.down[0])
    assert torch.equal(ours, plain)


def test_nothing_dispatched_is_zero_and_what_is_not_may_be_nan() -> None:
    x, chosen, gates = call(6, 4, 2)
    w = weights(4, 8, 5, gated=True)
    none = experts(x, torch.full_like(chosen, -1), gates, w)
    assert none.shape == x.shape
    assert not none.any()
    none.sum().backward()
    poisoned = x.detach().clone()
    chosen[2] = -1
    poisoned[2] = float("nan")
    out = experts(poisoned, chosen, gates, w)
    assert not out[2].any()
    assert torch.equal(out, experts(x, chosen, gates, w))


def test_an_expert_without_tokens_gets_no_gradient() -> None:
    x, _, gates = call(6, 4, 1)
    w = weights(4, 8, 5, gated=True)
    chosen = torch.tensor([[0], [2], [2], [0], [2], [0]])
    experts(x, chosen, gates, w).sum().backward()
    assert w.up.grad is not None
    assert [bool(g.any()) for g in w.up.grad] == [True, False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "n_experts", "k"), [(7, 3, 2), (63, 8, 1)])
@pytest.mark.parametrize("gated", [False, True])
def test_grouped(n: int, n_experts: int, k: int, gated: bool, dtype: torch.dtype) -> None:
    """The grouped backend, run where it would not be chosen: forward and backward, also with an idle expert."""
    x, chosen, gates = call(n, n_experts, k, d=16, dtype=dtype)
    gates = gates.detach().float().requires_grad_()
    chosen = chosen.masked_fill(chosen == n_experts - 1, -1)
    w = weights(n_experts, 16, 24, gated=gated, dtype=dtype)
    leaves = [t for t in (x, gates, w.up, w.down, w.gate) if t is not None]
    given = ExpertCall(x=x, chosen=chosen, gates=gates, weights=w)
    ours, theirs = Grouped().run(given), experts(x, chosen, gates, w, backend="reference")
    tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 1.0}
    torch.testing.assert_close(ours, theirs, **tolerance)
    pull = torch.randn_like(ours)
    for mine, wanted in zip(_grads(ours, leaves, pull), _grads(theirs, leaves, pull), strict=True):
        torch.testing.assert_close(mine, wanted, **tolerance)


def test_backends_say_why_not() -> None:
    x, chosen, gates = call(7, 3, 2)
    w = weights(3, 8, 5, gated=True)
    reasons = {r.backend: r for r in explain(x, chosen, gates, w)}
    assert reasons["reference"].chosen
    assert "no faster than the reference" in str(reasons["grouped"].reason)
    with pytest.raises(UserError, match="'grouped' cannot run this call"):
        experts(x, chosen, gates, w, backend="grouped")
    with dispatch.force("reference"):
        experts(x, chosen, gates, w)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(7, 9)}, "expert weights do not fit"),
        ({"x": torch.zeros(6, 8)}, "experts take x"),
        ({"gates": torch.zeros(7, 1)}, "experts take x"),
        ({"chosen": torch.zeros(7, 2)}, "chosen must be int64"),
        ({"activation": "rleu"}, "did you mean 'relu'"),
    ],
)
def test_what_does_not_fit(change: dict, words: str) -> None:
    x, chosen, gates = call(7, 3, 2)
    given = {"x": x, "chosen": chosen, "gates": gates, "weights": weights(3, 8, 5, gated=True)} | change
    with pytest.raises(UserError, match=words) as caught:
        experts(**given)
    assert "\n" not in str(caught.value)


def test_shapes_on_the_meta_device() -> None:
    x, chosen, gates = (t.to("meta") for t in call(7, 3, 2))
    w = weights(3, 8, 5, gated=True)
    w = ExpertWeights(up=w.up.to("meta"), down=w.down.to("meta"))
    assert experts(x, chosen, gates, w).shape == (7, 8)
