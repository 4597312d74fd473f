"""The fused loss against PyTorch's, in both directions, and what never exists in memory."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from phylon.ops import loss as module
from phylon.ops.loss import IGNORE, Loss, Targets, cross_entropy, linear_cross_entropy
from phylon.spec.errors import UserError

N, D, V = 10, 6, 13
OPTIONS = [
    {},
    {"bias": True},
    {"softcap": 2.0},
    {"label_smoothing": 0.1},
    {"bias": True, "softcap": 3.0, "label_smoothing": 0.2},
]


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((2, 5, D), (V, D), (V,)))
    targets = torch.randint(V, (2, 5), generator=generator)
    targets[0, 1] = targets[1, 4] = IGNORE
    return *(x.to(dtype).requires_grad_() for x in (hidden, weight, bias)), targets


def written(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, softcap: float | None, smoothing: float
) -> Tensor:
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing
    )


@pytest.fixture(params=[1, 3, N])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many tokens a chunk has."""
    monkeypatch.setattr(module, "_CHUNK_BYTES", request.param * V * 8)
    monkeypatch.setattr(module, "_SHARED_BYTES", 0)
    return request.param


@pytest.mark.parametrize("options", OPTIONS)
def test_equals_pytorch(options: dict[str, object], rows: int) -> None:
    hidden, weight, bias, targets = inputs()
    given = options | {"bias": bias if options.get("bias") else None}
    ours = linear_cross_entropy(hidden, weight, targets, **given)
    smoothing = options.get("label_smoothing", 0.0)
    theirs = written(hidden, weight, targets, given["bias"], options.get("softcap"), smoothing)
    assert int(ours.count) == 8
    torch.testing.assert_close(ours.sum, theirs, rtol=1e-12, atol=1e-12)
    leaves = [hidden, weight, *([bias] if options.get("bias") else [])]
    mean = torch.autograd.grad(ours.mean * 3, leaves)
    for mine, expected in zip(mean, torch.autograd.grad(theirs / 8 * 3, leaves), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-11, atol=1e-12)
    if "softcap" not in options:
        logits = hidden @ weight.T + (bias if options.get("bias") else 0)
        readable = cross_entropy(logits, targets, label_smoothing=smoothing)
        torch.testing.assert_close(readable.sum, theirs, rtol=1e-12, atol=1e-12)
        assert int(readable.count) == 8


@pytest.mark.parametrize("options", OPTIONS)
def test_gradcheck(options: dict[str, object]) -> None:
    hidden, weight, bias, targets = inputs()
    rest = {k: v for k, v in options.items() if k != "bias"}
    call = lambda h, w, b: linear_cross_entropy(h, w, targets, bias=b if options.get("bias") else None, **rest).sum
    assert torch.autograd.gradcheck(call, (hidden, weight, bias))


def test_all_ignored_is_zero_of_zero() -> None:
    hidden, weight, _, targets = inputs()
    for loss in (
        linear_cross_entropy(hidden, weight, torch.full_like(targets, IGNORE), label_smoothing=0.1),
        cross_entropy(hidden @ weight.T, torch.full_like(targets, IGNORE)),
    ):
        assert (float(loss.sum), int(loss.count), float(loss.mean)) == (0.0, 0, 0.0)
        for grad in torch.autograd.grad(loss.mean, [hidden, weight]):
            assert not grad.any()


def test_accumulation_is_the_mean_over_tokens() -> None:
    """Case 24: rows of 3 and 9 tokens as two micro-batches give the big batch's gradient."""
    hidden, weight, _, _ = inputs()
    flat, targets = hidden.flatten(0, 1)[:9], torch.arange(9) % V
    parts = [linear_cross_entropy(flat[a:b], weight, targets[a:b], label_smoothing=0.1) for a, b in ((0, 3), (3, 9))]
    whole = linear_cross_entropy(flat, weight, targets, label_smoothing=0.1)
    total = sum(int(p.count) for p in parts)
    ours = torch.autograd.grad(sum(p.sum for p in parts) / total, weight)[0]
    torch.testing.assert_close(ours, torch.autograd.grad(whole.mean, weight)[0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("scale", [1.0, 1 / 3, 1e-4])
def test_bf16_is_as_good_as_plain(scale: float) -> None:
    """Error to fp64 at most twice plain bf16's, three times for gradients; the factor is not rounded to bf16."""
    hidden, weight, _, targets = inputs(torch.bfloat16)
    exact_leaves = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = torch.autograd.grad(written(*exact_leaves, targets, None, None, 0.0) * scale, exact_leaves)
    plain = torch.autograd.grad(written(hidden, weight, targets, None, None, 0.0) * scale, [hidden, weight])
    ours_loss = linear_cross_entropy(hidden, weight, targets)
    assert ours_loss.sum.dtype == torch.float32
    ours = torch.autograd.grad(ours_loss.sum * scale, [hidden, weight])
    for mine, theirs, truth in zip(ours, plain, exact, strict=True):
        assert mine.dtype == torch.bfloat16
        assert float((mine - truth).norm()) <= 3 * float((theirs - truth).norm())
    ratio = float((ours[1].double() * exact[1]).sum() / exact[1].square().sum())
    assert abs(ratio - 1) < 2e-3, "no common factor on all gradients"


def test_under_autocast() -> None:
    """The product in bf16, the loss and the gradient of fp32 weights in fp32."""
    hidden, weight, _, targets = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets)
    expected = written(hidden, weight, targets, None, None, 0.0)
    grads = torch.autograd.grad(loss.sum, [hidden, weight])
    assert [loss.sum.dtype, *(g.dtype for g in grads)] == [torch.float32] * 3
    assert float((loss.sum - expected).abs()) < 0.02 * float(expected)
    assert float(loss.sum) != float(expected), "control: autocast took part"
    for mine, theirs in zip(grads, torch.autograd.grad(expected, [hidden, weight]), strict=True):
        assert float((mine - theirs).norm()) < 0.02 * float(theirs.norm())


def test_weight_shared_with_the_embedding() -> None:
    """Both uses of a tied table reach its one gradient."""
    _, weight, _, targets = inputs()
    ids = torch.arange(10).view(2, 5) % V
    ours = linear_cross_entropy(F.embedding(ids, weight).tanh(), weight, targets).sum
    theirs = written(F.embedding(ids, weight).tanh(), weight, targets, None, None, 0.0)
    grads = [torch.autograd.grad(loss, weight)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-12)


def test_frozen_weight_and_frozen_hidden() -> None:
    hidden, weight, _, targets = inputs()
    frozen = linear_cross_entropy(hidden, weight.detach(), targets).sum
    expected = torch.autograd.grad(written(hidden, weight, targets, None, None, 0.0), [hidden, weight])
    torch.testing.assert_close(torch.autograd.grad(frozen, hidden)[0], expected[0])
    head_only = linear_cross_entropy(hidden.detach(), weight, targets).sum
    torch.testing.assert_close(torch.autograd.grad(head_only, weight)[0], expected[1])


class Largest(TorchDispatchMode):
    """The largest tensor any operation makes, and how many products run."""

    def __init__(self) -> None:
        super().__init__()
        self.numel, self.products = 0, 0

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        out = func(*args, **(kwargs or {}))  # type: ignore[operator]
        self.products += str(func).startswith("aten.mm")
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_the_logits_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    n, d, v = 64, 4, 50
    monkeypatch.setattr(module, "_CHUNK_BYTES", 4 * v * 4)
    monkeypatch.setattr(module, "_SHARED_BYTES", 0)
    hidden, weight = torch.randn(n, d, requires_grad=True), torch.randn(v, d, requires_grad=True)
    targets = torch.arange(n) % v
    with Largest() as seen:
        linear_cross_entropy(hidden, weight, targets).mean.backward()
    assert seen.numel <= max(4 * v, n * d, v * d)
    with Largest() as control:
        written(hidden[None], weight, targets[None], None, None, 0.0)
    assert control.numel >= n * v
    with Largest() as evaluating, torch.no_grad():
        linear_cross_entropy(hidden, weight, targets)
    assert evaluating.products == n // 4, "no gradient is formed where none is wanted"


def test_mean_of_a_loss() -> None:
    assert float(Loss(torch.tensor(6.0), torch.tensor(3)).mean) == 2.0


def test_the_mean_is_over_weights_whatever_they_sum_to() -> None:
    found = cross_entropy(torch.zeros(2, 10), torch.tensor([1, 2]), weights=torch.tensor([0.1, 0.2]))
    assert float(found.mean) == pytest.approx(math.log(10))
    none = cross_entropy(torch.zeros(2, 10), torch.tensor([1, 2]), weights=torch.zeros(2))
    assert float(none.mean) == 0


@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_what_is_ignored_can_hold_anything(junk: float) -> None:
    hidden, weight = torch.randn(6, 4), torch.randn(5, 4)
    targets = torch.tensor([1, -100, 2, 3, -100, 0])
    grads = []
    for filled in (0.0, junk):
        given = [hidden.masked_fill((targets == -100)[:, None], filled), weight]
        inputs = [x.clone().requires_grad_() for x in given]
        grads.append(torch.autograd.grad(linear_cross_entropy(*inputs, targets).sum, inputs))
    for clean, dirty in zip(*grads, strict=True):
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weights_weigh_each_token_and_are_counted(smoothing: float) -> None:
    """The weighted sum over the sum of the weights, by hand; an ignored target's weight does not count."""
    hidden, weight, bias, targets = inputs()
    weights = torch.rand(2, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits = hidden @ weight.T + bias
    alone = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none", label_smoothing=smoothing
    )
    wanted, counted = (alone * weights.flatten()).sum(), weights[targets != IGNORE].sum()
    expected = torch.autograd.grad(wanted, (hidden, weight, bias))
    found = linear_cross_entropy(hidden, weight, targets, bias=bias, label_smoothing=smoothing, weights=weights)
    readable = cross_entropy(hidden @ weight.T + bias, targets, label_smoothing=smoothing, weights=weights)
    for loss in (found, readable):
        torch.testing.assert_close(loss.sum, wanted)
        torch.testing.assert_close(loss.count, counted)
    for mine, theirs in zip(torch.autograd.grad(found.sum, (hidden, weight, bias)), expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    ones = linear_cross_entropy(hidden, weight, targets, bias=bias, weights=torch.ones(2, 5))
    torch.testing.assert_close(ones.sum, linear_cross_entropy(hidden, weight, targets, bias=bias).sum)


def test_targets_that_do_not_fit_are_refused() -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(UserError, match=r"weights are \(2, 2\), targets \(2, 3\)"):
        Targets.of(Targets(ids, torch.ones(2, 2)))
    with pytest.raises(UserError, match="label_smoothing must be"):
        Targets.of(Targets(ids, label_smoothing=1.0))
    assert Targets.of(ids) == Targets(ids)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_z_loss_and_weights(softcap: float | None, rows: int) -> None:
    """``z_loss`` times the squared log of the softmax's sum, per token, weighed like the rest. PaLM, section 5."""
    hidden, weight, bias, targets = inputs()
    weights = torch.rand(2, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours = linear_cross_entropy(
        hidden, weight, targets, bias=bias, softcap=softcap, label_smoothing=0.1, weights=weights, z_loss=0.3
    )
    logits = hidden @ weight.T + bias
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", label_smoothing=0.1)
    z = torch.logsumexp(logits, -1).square().flatten() * (targets != IGNORE).flatten()
    theirs = ((plain + 0.3 * z) * weights.flatten()).sum()
    torch.testing.assert_close(ours.sum, theirs, rtol=1e-12, atol=1e-12)
    other = cross_entropy(logits, targets, label_smoothing=0.1, weights=weights, z_loss=0.3)
    torch.testing.assert_close(other.sum, theirs, rtol=1e-12, atol=1e-12)
    leaves = (hidden, weight, bias)
    for mine, expected in zip(torch.autograd.grad(ours.sum, leaves), torch.autograd.grad(theirs, leaves), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-11, atol=1e-12)


def test_a_kept_graph_gives_the_same_gradient_again() -> None:
    hidden, weight, _, targets = inputs()
    total = linear_cross_entropy(hidden, weight, targets).sum * 2
    first = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    kept = [grad.clone() for grad in first]
    first[1].zero_()
    for mine, expected in zip(torch.autograd.grad(total, (hidden, weight)), kept, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=0)


def test_a_chunk_is_small_and_one_at_least() -> None:
    head = torch.Size([50257, 768])
    assert module._chunk_rows(1024, torch.Size([4096, 128]), 4, False) == 512
    assert module._chunk_rows(100, head, 4, False) == 100, "no more than there are"
    for tokens in (500, 1024, 2048, 4096, 65536):
        rows = module._chunk_rows(tokens, head, 4, False)
        share = max(module._CHUNK_BYTES, min(tokens * 50257, module._SHARED_BYTES))
        assert share * 0.7 <= rows * 50257 * 4 <= share, "an eighth of the plain form's scores and log-probabilities"
        assert tokens % rows == 0 or tokens % rows > 0.7 * rows, "chunks of like sizes"
    assert module._chunk_rows(1024, torch.Size([10**8, 8]), 4, True) == 1
    assert module._chunk_rows(0, head, 4, False) == 1
