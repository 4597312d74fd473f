"""Every op with a C++ backend over rows against its reference, both ways: odd sizes, poisoned memory, any threads."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phylon.families.decoder import llama_spec
from phylon.families.gpt2 import gpt2_spec
from phylon.layers.part import Linear
from phylon.model import build, record
from phylon.ops import feedforward, linear, norm, rotary, scores
from phylon.ops.experts import ExpertWeights, experts
from phylon.ops.experts import dispatch as experts_dispatch
from phylon.ops.linear import joined
from phylon.ops.rows import native as rows
from phylon.train.optim import AdamW, AdamWOptimizer

DISPATCHES = [norm.dispatch, linear.dispatch, feedforward.dispatch, rotary.dispatch, scores.dispatch, experts_dispatch]
SIZES = [(1, 1), (3, 7), (65, 63), (2, 100), (33, 16)]

native = pytest.mark.skipif(rows.LIBRARY.reason() is not None, reason=f"no kernels: {rows.LIBRARY.reason()}")


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small tensors go to the kernels too, and memory that nobody wrote is NaN."""
    monkeypatch.setattr(rows, "FEW", 0)
    monkeypatch.setattr(joined, "FEW_ROWS", 1)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradients(run: Callable[..., Any], *given: Tensor | None) -> list[Tensor]:
    """Outputs of ``run`` and the gradients of a fixed functional of them, all as fp32."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in given]
    made = run(*leaves)
    made = made if isinstance(made, tuple) else (made,)
    total = sum((y.float() * drawn(*y.shape, seed=9 + i)).sum() for i, y in enumerate(made))
    found = torch.autograd.grad(total, [t for t in leaves if t is not None])
    return [t.detach().float() for t in (*made, *found)]


def compare(run: Callable[[str], Callable[..., Any]], mine: str, *given: Tensor | None, low: bool = False) -> None:
    ours, theirs = gradients(run(mine), *given), gradients(run("reference"), *given)
    if not low:
        for a, b in zip(ours, theirs, strict=True):
            assert float((a - b).abs().max()) <= 2e-5 * max(1.0, float(b.abs().max()))
        return
    # bf16: at most 2 times the error of PyTorch's own against fp32, 3 times for gradients, with some room for luck.
    exact = gradients(run("reference"), *(None if t is None else t.float() for t in given))
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert float((a - c).norm()) <= 2.0 * float((b - c).norm()) + 4e-3 * float(c.norm())


@native
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm(size: tuple[int, int], centred: bool, added: bool, dtype: torch.dtype) -> None:
    x, h = drawn(*size, dtype=dtype) * 3 + 1, drawn(*size, seed=1, dtype=dtype)
    w, b = drawn(size[1], seed=2, dtype=dtype), drawn(size[1], seed=3, dtype=dtype)
    if size[1] == 1:
        pytest.skip("a norm of one number is a sign or nothing")

    def run(backend: str) -> Callable[..., Any]:
        if centred:
            return lambda x, h, w, b: norm.add_layer_norm(x, h, w, b, 1e-5, backend=backend)
        return lambda x, h, w: norm.add_rms_norm(x, h, w, 1e-5, backend=backend)

    given = (x, h if added else None, w, b) if centred else (x, h if added else None, w)
    compare(run, "native", *given, low=dtype is torch.bfloat16)


@native
def test_norm_of_a_stream_wider_than_what_is_added() -> None:
    x, h = drawn(5, 40), drawn(5, 40, seed=1, dtype=torch.bfloat16)
    total, y = norm.add_rms_norm(x, h, None, 1e-6, backend="native")
    assert torch.equal(total, x + h)
    assert y.dtype == torch.float32
    with pytest.raises(ValueError, match="wider"):
        norm.add_rms_norm(h, x, None, 1e-6, backend="native")


@native
@pytest.mark.parametrize("activation", sorted(rows.KINDS))
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_feedforward(activation: str, gated: bool, biased: bool, dtype: torch.dtype) -> None:
    d, f = 20, 37
    x = drawn(3, 11, d, dtype=dtype)
    maps = [drawn(*s, seed=i, dtype=dtype) / s[-1] ** 0.5 for i, s in enumerate([(f, d), (d, f), (f, d)])]
    biases = [drawn(s, seed=5 + i, dtype=dtype) if biased else None for i, s in enumerate([f, d, f])]

    def run(backend: str) -> Callable[..., Tensor]:
        def of(x: Tensor, up: Tensor, down: Tensor, gate: Tensor | None, ub: Any, db: Any, gb: Any) -> Tensor:
            pair = None if gate is None else (gate, gb)
            return feedforward.feedforward(x, (up, ub), (down, db), pair, activation=activation, backend=backend)

        return of

    given = (x, maps[0], maps[1], maps[2] if gated else None, biases[0], biases[1], biases[2] if gated else None)
    compare(run, "native", *given, low=dtype is torch.bfloat16)


@native
@pytest.mark.parametrize("activation", sorted(rows.KINDS))
def test_activations_at_the_ends(activation: str) -> None:
    """Far out an activation is its limit, and NaN stays NaN."""
    from phylon.ops.activation import ACTIVATIONS

    x = torch.tensor([[-1e4, -100.0, -20.0, -0.0, 1e-30, 20.0, 100.0, 1e4, float("nan")]])
    ours, theirs = rows.activation(activation, x), ACTIVATIONS[activation](x)
    assert torch.allclose(ours, theirs, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("biased", [True, False])
def test_linears(dtype: torch.dtype, biased: bool) -> None:
    x = drawn(2, 9, 12, dtype=dtype)
    maps = [drawn(n, 12, seed=n, dtype=dtype) for n in (12, 4, 7)]
    biases = [drawn(n, seed=20 + n, dtype=dtype) if biased else None for n in (12, 4, 7)]

    def run(backend: str) -> Callable[..., Any]:
        return lambda x, *rest: linear.linears(x, rest[:3], rest[3:], backend=backend)

    compare(run, "joined", x, *maps, *biases, low=dtype is torch.bfloat16)


def test_linears_gradcheck() -> None:
    x, w, v, b = (drawn(*s, seed=i).double().requires_grad_() for i, s in enumerate([(4, 3), (2, 3), (5, 3), (2,)]))
    run = lambda x, w, v, b: linear.linears(x, (w, v), (b, None), backend="joined")
    assert torch.autograd.gradcheck(run, (x, w, v, b))


@native
@pytest.mark.parametrize("width", [6, 40, 64])
@pytest.mark.parametrize("turned", [4, 6])
@pytest.mark.parametrize("batch", [1, 3])
def test_rotary(width: int, turned: int, batch: int) -> None:
    x = drawn(3, 5, 2 * width)[..., :width].unsqueeze(2).expand(3, 5, 2, width)
    angles = drawn(batch, 5, 1, turned // 2, seed=4)
    tables = (angles.cos(), angles.sin())
    compare(lambda backend: lambda x: rotary.rotate(x, tables, backend=backend), "native", x)


@native
@pytest.mark.parametrize("vocab", [1, 15, 100])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("biased", [True, False])
def test_scores(vocab: int, softcap: float | None, smoothing: float, z_loss: float, biased: bool) -> None:
    x, bias = 4 * drawn(9, vocab), drawn(vocab, seed=1) if biased else None
    targets = torch.randint(0, vocab, (9,), generator=torch.Generator().manual_seed(3))
    targets[2] = -100
    weights = drawn(9, seed=2).abs()
    found = {}
    for name in ("native", "reference"):
        call = scores.ScoresCall(
            scores=x.clone(), targets=targets, bias=bias, weights=weights, softcap=softcap, smoothing=smoothing,
            z_loss=z_loss,
        )  # fmt: skip
        found[name] = scores.dispatch.pick(call, name).run(call)
    assert torch.allclose(found["native"][0], found["reference"][0], rtol=1e-5, atol=1e-5)
    assert torch.allclose(found["native"][1], found["reference"][1], rtol=1e-4, atol=2e-6)
    assert not found["native"][1][2].any()


@native
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_score_gives_a_bad_loss(bad: float) -> None:
    x = drawn(3, 20)
    x[1, 17] = bad
    losses = rows.scores_loss(x, None, torch.tensor([0, 1, 2]), None, None, 0.0, 0.0, True)
    assert losses.isfinite().tolist() == [True, False, True]


@native
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts(gated: bool, dtype: torch.dtype) -> None:
    n, d, f, x_count, k = 23, 20, 37, 4, 2
    x, gates = drawn(n, d, dtype=dtype), drawn(n, k, seed=1).abs()
    up, down, gate = (
        drawn(x_count, *s, seed=2 + i, dtype=dtype) / s[-1] ** 0.5 for i, s in enumerate([(f, d), (d, f), (f, d)])
    )
    chosen = torch.randint(0, x_count - 1, (n, k), generator=torch.Generator().manual_seed(0))  # the last gets none
    chosen[3], chosen[7, 1] = -1, -1

    def run(backend: str) -> Callable[..., Tensor]:
        def of(x: Tensor, gates: Tensor, up: Tensor, down: Tensor, gate: Tensor | None) -> Tensor:
            weights = ExpertWeights(up=up, down=down, gate=gate)
            return experts(x, chosen, gates.float(), weights, backend=backend)

        return of

    compare(run, "native", x, gates, up, down, gate if gated else None, low=dtype is torch.bfloat16)


@native
def test_no_expert_is_sent_anything() -> None:
    weights = ExpertWeights(up=drawn(2, 6, 4), down=drawn(2, 4, 6))
    x = drawn(3, 4).requires_grad_()
    out = experts(x, torch.full((3, 1), -1), torch.ones(3, 1), weights, backend="native")
    out.sum().backward()
    assert not out.any()
    assert x.grad is not None
    assert not x.grad.any()


@native
def test_the_number_of_threads_does_not_matter() -> None:
    def run(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        made = torch.randn(70, 50, generator=torch.Generator().manual_seed(0))
        losses = rows.scores_loss(made, None, torch.arange(70) % 50, None, None, 0.1, 0.1, True)
        x, g = drawn(70, 36), drawn(70, 36, seed=1)
        total, y, statistics = rows.norm_forward(x, g, g[0], None, 1e-5, False)
        _, grad_w, _ = rows.norm_backward(g, None, total, g[0], statistics, False, False)
        act = rows.ActivationGradients("gelu", g.clone(), x, g[1], None, None, again=True)
        assert grad_w is not None
        assert act.bias is not None
        return [made, losses, y, grad_w, act.x, act.bias, rows.row_sum(g), torch.tensor(rows.square_sum(g))]

    before = torch.get_num_threads()
    try:
        for one, two in zip(run(1), run(2), strict=True):
            assert torch.equal(one, two)
    finally:
        torch.set_num_threads(before)


@native
@pytest.mark.parametrize("spec", [gpt2_spec, llama_spec])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_whole_step_is_the_references(spec: Callable[..., Any], bf16: bool) -> None:
    model = build(spec(d_model=32, n_heads=2, n_layers=2, vocab_size=60)).train()
    ids = torch.randint(0, 60, (2, 19), generator=torch.Generator().manual_seed(0))

    def run(forced: bool, low: bool) -> list[Tensor]:
        model.zero_grad()
        with contextlib.ExitStack() as stack:
            for dispatch in DISPATCHES if forced else []:
                stack.enter_context(dispatch.force("reference"))
            stack.enter_context(torch.autocast("cpu", torch.bfloat16, enabled=low))
            loss = next(iter(model(ids, targets=ids).losses.values())).mean
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    exact = run(True, False)
    for ours, plain, truth in zip(run(False, bf16), run(True, bf16), exact, strict=True):
        if bf16:
            room = 0.01 * float(torch.stack([t.norm() for t in exact]).max())
            assert float((ours - truth).norm()) <= 3 * float((plain - truth).norm()) + room
        else:
            assert torch.allclose(ours, plain, rtol=1e-3, atol=1e-6)


def test_hooks_and_taps_see_what_they_ask_for() -> None:
    model = build(llama_spec(d_model=32, n_heads=2, n_layers=1, vocab_size=60)).train()
    ids = torch.arange(40)[None] % 60
    seen: list[str] = []
    block = model.decoder.blocks[0]  # type: ignore[union-attr]
    for name in ("attn.k_proj", "ffn.gate_proj", "ffn_norm"):
        block.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    plain = model(ids).logits
    assert seen == ["attn.k_proj", "ffn_norm", "ffn.gate_proj"]
    with record(model, "decoder.blocks.0.*") as taps:
        watched = model(ids).logits
    assert torch.allclose(plain, watched, atol=1e-5)
    names = {name.removeprefix("decoder.blocks.0.") for name in taps}
    assert {"resid_pre", "resid_mid", "resid_post", "ffn.hidden", "attn.out"} <= names


def test_a_wrapped_map_is_called() -> None:
    class Doubled(Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    model = build(gpt2_spec(d_model=32, n_heads=2, n_layers=1, vocab_size=60)).train()
    ids = torch.arange(40)[None] % 60
    before = model(ids).logits
    block = model.decoder.blocks[0]  # type: ignore[union-attr]
    block.ffn.down_proj.__class__ = Doubled
    assert not torch.allclose(model(ids).logits, before, atol=1e-3)


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_is_pytorchs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, moments, the scale of the gradient and the norm, for four steps; masters where parameters are bf16."""

    def run(kernel: bool) -> tuple[list[float], dict[str, Tensor]]:
        monkeypatch.setattr(AdamWOptimizer, "_native", lambda self: kernel)
        params = {
            f"p{i}": nn.Parameter(drawn(*s, seed=i, dtype=dtype)) for i, s in enumerate([(7, 9), (70,), (130, 33)])
        }
        optimizer = AdamWOptimizer(AdamW(), params.items())
        norms = []
        for step in range(4):
            for i, p in enumerate(params.values()):
                p.grad = drawn(*p.shape, seed=10 * step + i, dtype=dtype) * 8
            optimizer.collect()
            norms.append(optimizer.norm(8.0).value)
            optimizer.step(1e-2, 1 / 8)
        return norms, {**params, **optimizer.state_tensors()}

    (ours, mine), (theirs, expected) = run(True), run(False)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert mine.keys() == expected.keys()
    for name, tensor in mine.items():
        tolerance = 1e-2 if tensor.dtype is torch.bfloat16 else 1e-6
        assert torch.allclose(tensor.float(), expected[name].float(), rtol=tolerance, atol=tolerance), name


@native
def test_adamw_names_a_gradient_that_is_not_finite() -> None:
    params = {name: nn.Parameter(torch.ones(40)) for name in ("a", "b")}
    optimizer = AdamWOptimizer(AdamW(), params.items())
    params["a"].grad, params["b"].grad = torch.ones(40), torch.full((40,), float("nan"))
    assert optimizer.norm(1.0).not_finite == ("b",)


@native
def test_kernels_refuse_with_a_reason() -> None:
    x = drawn(4, 8)
    assert "float64" in (rows.refusal(x.double()) or "")
    assert "DTensor" in (rows.refusal(x.as_subclass(type("DTensor", (Tensor,), {}))) or "")
    with pytest.raises(ValueError, match="float16"):
        norm.rms_norm(x.half(), None, 1e-5, backend="native")


@native
@pytest.mark.slow
def test_compiled_blocks_leave_the_kernels_alone() -> None:
    model = build(gpt2_spec(d_model=32, n_heads=2, n_layers=1, vocab_size=60)).train()
    ids = torch.arange(40)[None] % 60
    expected = model(ids).logits
    assert torch.allclose(torch.compile(model)(ids).logits, expected, atol=1e-4)


@native
@pytest.mark.parametrize("gated", [True, False])
def test_frozen_maps_get_no_gradient(gated: bool) -> None:
    x, up, down, gate = (drawn(*s, seed=i) for i, s in enumerate([(9, 8), (12, 8), (8, 12), (12, 8)]))
    x.requires_grad_()
    weights = ExpertWeights(up=up[None], down=down[None], gate=gate[None] if gated else None)
    chosen = torch.zeros(9, 1, dtype=torch.int64)
    pair = (gate, None) if gated else None
    y = feedforward.feedforward(x, (up, None), (down, None), pair, activation="silu", backend="native")
    z = experts(x, chosen, torch.ones(9, 1), weights, backend="native")
    for made in (y, z):
        (grad,) = torch.autograd.grad(made.sum(), x)
        assert grad.any()
    assert torch.allclose(y, z, atol=1e-5)
