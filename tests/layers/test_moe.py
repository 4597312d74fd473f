"""Mixture of experts: routers, capacity, auxiliary terms, what each dispatcher promises (cases 4, 9, 24, 29, 30)."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers import assert_close, cases, draw, pre
from law import alone, batched, documents, left_padded, packed, right_padded, values
from phylon.layers.context import Context
from phylon.layers.ffn.dispatchers import Capacity, Dispatcher, Dropless
from phylon.layers.ffn.mlp import GLU, MLP
from phylon.layers.ffn.moe import MoE, MoEModule
from phylon.layers.ffn.routers import GroupedSigmoidRouter, RenormalisedRouter, Router, SoftmaxRouter
from phylon.ops.experts import dispatch
from phylon.ops.loss import Loss
from phylon.ops.rows import native as rows
from phylon.patterns import Records
from phylon.spec import UserError, build, from_json, override, to_json

D = 12
SWITCH = MoE(n_experts=2, expert=MLP(d_ff=8, activation="relu", bias=False), router=SoftmaxRouter())


def module(spec: MoE, seed: int = 0) -> MoEModule:
    made = build(spec, D)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=g))
    return made.eval()


def context(length: int, segments: Tensor | None = None) -> Context:
    return Context(records=Records(torch.arange(length)[None], segments), aligned=segments is None)


def inputs(batch: int = 2, length: int = 9, seed: int = 0) -> Tensor:
    return torch.randn(batch, length, D, generator=torch.Generator().manual_seed(seed))


def run(moe: MoEModule, x: Tensor, segments: Tensor | None = None) -> tuple[Tensor, dict[str, Loss]]:
    ctx = context(x.shape[1], segments)
    return moe(x, ctx), ctx.aux


@pytest.mark.parametrize("expert", [MLP(d_ff=7), GLU(d_ff=10, bias=True)])
@pytest.mark.parametrize("router", [SoftmaxRouter(), RenormalisedRouter(top_k=1)])
def test_one_expert_is_its_ffn_bit_for_bit(expert: MLP | GLU, router: Router) -> None:
    moe = module(MoE(n_experts=1, expert=expert, router=router))
    plain = build(expert, D)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(moe.experts.get_parameter(name)[0])
    x = inputs()
    with dispatch.force("reference"):
        assert torch.equal(run(moe, x)[0], plain(x, context(9)))


def test_softmax_gates_are_probabilities_and_renormalised_ones_sum_to_one() -> None:
    logits = torch.tensor([[[1.0, 3.0, 2.0, 0.0]]])
    p = logits.softmax(-1)[0, 0]
    switch = module(MoE(n_experts=4, expert=GLU(d_ff=4), router=SoftmaxRouter(top_k=2))).router
    chosen, gates, shares = switch.choose(logits)
    assert chosen.tolist() == [[[1, 2]]]
    assert torch.equal(gates[0, 0], p[[1, 2]])
    assert torch.equal(shares[0, 0], p)
    mixtral = module(MoE(n_experts=4, expert=GLU(d_ff=4), router=RenormalisedRouter())).router
    _, gates, _ = mixtral.choose(logits)
    assert_close(gates[0, 0], p[[1, 2]] / p[[1, 2]].sum())


def test_groups_and_bias_select_and_scores_weigh() -> None:
    """Experts in groups (0, 1), (2, 3), (4, 5): the bias opens groups and picks, the gates do not see it."""
    spec = GroupedSigmoidRouter(top_k=2, n_groups=3, top_groups=1, scale=2.5)
    router = module(MoE(n_experts=6, expert=GLU(d_ff=4), router=spec)).router
    logits = torch.tensor([[[2.0, -3.0, 1.0, 1.1, 0.0, -1.0]]])
    router.selection_bias.zero_()
    chosen, gates, _ = router.choose(logits)
    assert chosen.tolist() == [[[3, 2]]], "the group with the largest two, not that with the largest one"
    s = logits.sigmoid()[0, 0]
    assert_close(gates[0, 0], 2.5 * s[[3, 2]] / s[[3, 2]].sum())
    router.selection_bias.copy_(torch.tensor([0, 1.0, 0, 0, 0, 0]))
    chosen, gates, _ = router.choose(logits)
    assert chosen.tolist() == [[[1, 0]]]
    assert_close(gates[0, 0], 2.5 * s[[1, 0]] / s[[1, 0]].sum())


def test_the_bias_evens_out_the_load() -> None:
    spec = MoE(n_experts=4, expert=GLU(d_ff=4), router=GroupedSigmoidRouter(top_k=1))
    moe = module(spec).train()
    moe.router.selection_bias.zero_()
    x, segments = inputs(4, 50) + 0.5, torch.ones(4, 50, dtype=torch.int64)
    segments[:, 30:] = 0
    run(moe, x, segments)
    first = moe.router.load
    assert float(first.sum()) == 4 * 30, "padding is not counted"
    moe.router.update_bias(0.1)
    assert torch.equal(moe.router.selection_bias, 0.1 * torch.sign(30 - first))
    for _ in range(60):
        run(moe, x, segments)
        last = moe.router.load
        moe.router.update_bias(0.02)
    assert float(last.max() - last.min()) < 0.5 * float(first.max() - first.min())
    assert moe.router.load is None
    moe.eval()
    run(moe, x)
    assert moe.router.load is None, "evaluation does not count"
    assert "router.selection_bias" in moe.state_dict()
    assert "router.selection_bias" not in dict(moe.named_parameters())


def test_case_29_four_equal_tokens_two_experts_capacity_one() -> None:
    moe = module(SWITCH.replace(eval_dispatch=Capacity(tokens=1)))
    x = inputs(1, 1).expand(1, 4, D).contiguous()
    out, aux = run(moe, x)
    assert bool(out[0, 0].any())
    assert not out[0, 1:].any(), "the dropped ones add zero"
    assert_close(out[0, 0], run(module(SWITCH), x)[0][0, 0])
    logits = x @ moe.router.proj.weight.T
    assert_close(aux[".z_loss"].sum, torch.logsumexp(logits, -1).square().sum())
    assert int(aux[".z_loss"].count) == 4


def test_first_choices_go_first() -> None:
    chosen = torch.tensor([[[0, 1], [0, 1], [1, 0]]])
    sent = Capacity(tokens=2).dispatch(chosen, None, 3)
    assert sent.tolist() == [[[0, 1], [0, -1], [1, -1]]]


@pytest.mark.parametrize("capacity", [Capacity(tokens=1), Capacity(tokens=2), Capacity(factor=0.6)])
@pytest.mark.parametrize("left", [True, False])
def test_case_9_padding_takes_no_capacity(capacity: Capacity, left: bool) -> None:
    moe = module(SWITCH.replace(eval_dispatch=capacity, n_experts=3))
    x = inputs(1, 7)
    expected, aux = run(moe, x)
    rows = expected.abs().sum(-1) != 0
    assert rows.any()
    assert not rows.all(), "something overflows"
    pad = torch.full((1, 5, D), math.nan)
    segments = torch.tensor([[0] * 5 + [1] * 7 if left else [1] * 7 + [0] * 5])
    out, padded_aux = run(moe, torch.cat([pad, x] if left else [x, pad], 1), segments)
    assert_close(out[segments == 1], expected[0])
    assert not out[segments == 0].any()
    for name, loss in aux.items():
        assert_close(padded_aux[name].sum, loss.sum, what=name)
        assert int(padded_aux[name].count) == int(loss.count)


@pytest.mark.parametrize("route", [batched, left_padded, right_padded])
def test_what_capacity_promises_of_the_law(route) -> None:
    """Padding and the batch do not matter, although tokens are dropped."""
    moe = MoE(n_experts=4, expert=GLU(d_ff=12), router=RenormalisedRouter(), eval_dispatch=Capacity(factor=0.7))
    model = draw(pre(ffn=moe))
    docs = documents(model, (13, 13, 13) if route is batched else (13, 5, 1, 9))
    for ours, theirs in zip(route(model, docs), alone(model, docs), strict=True):
        assert_close(ours, theirs)


def test_why_capacity_is_an_exception() -> None:
    """Chunks and packing change what overflows: the declared exceptions are real, and gone when nothing overflows."""
    roomy, tight = (
        draw(pre(ffn=MoE(n_experts=4, expert=GLU(d_ff=12), router=RenormalisedRouter(), eval_dispatch=d)))
        for d in (Capacity(tokens=64), Capacity(tokens=2))
    )
    docs = documents(roomy, (13, 5, 1, 9))
    for model, obeys in ((roomy, True), (tight, False)):
        expected = alone(model, docs)
        off = max(float((a - b).abs().max()) for a, b in zip(packed(model, docs), expected, strict=True))
        state = model.new_state(1)
        parts = torch.cat([values(model, t, state=state) for t in docs[0][None].split([6, 7], 1)], 1)
        off_chunks = float((parts[0] - expected[0]).abs().max())
        assert (max(off, off_chunks) < 1e-4) == obeys
        assert (min(off, off_chunks) > 1e-2) != obeys


@st.composite
def choices(draw_: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    n_experts, batch, length = (draw_(st.integers(1, n)) for n in (5, 3, 9))
    k = draw_(st.integers(1, n_experts))
    g = torch.Generator().manual_seed(draw_(st.integers(0, 999)))
    chosen = torch.rand(batch, length, n_experts, generator=g).topk(k).indices
    return chosen, torch.rand(batch, length, generator=g) < 0.7, n_experts


@given(choices(), st.integers(1, 9))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_capacity_by_counting(given_: tuple[Tensor, Tensor, int], most: int) -> None:
    chosen, real, n_experts = given_
    sent = Capacity(tokens=most).dispatch(chosen, real, n_experts)
    wanted = torch.full_like(chosen, -1)
    for b in range(len(chosen)):
        taken = [0] * n_experts
        for j in range(chosen.shape[2]):
            for t in range(chosen.shape[1]):
                e = int(chosen[b, t, j])
                if real[b, t] and taken[e] < most:
                    taken[e], wanted[b, t, j] = taken[e] + 1, e
    assert torch.equal(sent, wanted)
    free = Dropless().dispatch(chosen, real, n_experts)
    assert torch.equal(Capacity(tokens=chosen.shape[1]).dispatch(chosen, real, n_experts), free)
    assert torch.equal(Capacity(factor=float(n_experts)).dispatch(chosen, real, n_experts), free)


def test_case_30_balance_is_one_where_routing_is_uniform() -> None:
    """Top-2 of 4 with equal probabilities, and also where the choices alone are uneven (then only f matters)."""
    moe = module(MoE(n_experts=4, expert=GLU(d_ff=4), router=RenormalisedRouter()))
    with torch.no_grad():
        moe.router.proj.weight.zero_()
    _, aux = run(moe, inputs(3, 8))
    assert_close(aux[".balance"].sum, torch.tensor(3.0))
    assert int(aux[".balance"].count) == 3
    assert_close(aux[".z_loss"].mean, torch.tensor(math.log(4.0) ** 2))


@pytest.mark.parametrize("router", [case for _, case in cases(Router)])
def test_balance_by_the_formula(router: Router) -> None:
    moe = module(MoE(n_experts=6, expert=GLU(d_ff=4), router=router))
    x, segments = inputs(3, 8), torch.ones(3, 8, dtype=torch.int64)
    segments[0, 5:], segments[1] = 0, 0
    _, aux = run(moe, x, segments)
    chosen, _, shares = moe.router.choose(moe.router.logits(x))
    total = 0.0
    for b in (0, 2):
        kept = segments[b] == 1
        f = torch.stack([(chosen[b][kept] == i).any(-1).float().mean() / router.top_k for i in range(6)])
        total = total + 6 * (f * shares[b][kept].mean(0)).sum()
    assert_close(aux[".balance"].sum, torch.as_tensor(total))
    assert int(aux[".balance"].count) == 2
    assert int(aux[".z_loss"].count) == 13


def test_aux_gradients_and_micro_batches() -> None:
    """Case 24: sums and counts of two micro-batches are those of both rows together, and so are the gradients."""
    moe = module(MoE(n_experts=4, expert=GLU(d_ff=4), router=RenormalisedRouter()))
    x, segments = inputs(2, 9), torch.ones(2, 9, dtype=torch.int64)
    segments[0, 3:] = 0

    def gradient(*batches: tuple[Tensor, Tensor | None]) -> Tensor:
        terms = [run(moe, *batch)[1] for batch in batches]
        moe.zero_grad()
        for name in (".balance", ".z_loss"):
            total = sum(t[name].sum for t in terms) / sum(t[name].count for t in terms)
            total.backward(retain_graph=True)
        assert moe.router.proj.weight.grad is not None
        return moe.router.proj.weight.grad.clone()

    assert_close(gradient((x[:1, :3], None), (x[1:], None)), gradient((x, segments)))
    assert moe.experts.up_proj.weight.grad is None


def test_rows_of_padding_alone_count_nothing() -> None:
    out, aux = run(module(SWITCH), inputs(), torch.zeros(2, 9, dtype=torch.int64))
    assert not out.any()
    for loss in aux.values():
        assert float(loss.sum.detach()) == 0
        assert int(loss.count) == 0


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize(
    "router",
    [
        SoftmaxRouter(top_k=2, jitter=0.1, bias=True),
        RenormalisedRouter(),
        GroupedSigmoidRouter(top_k=2, n_groups=2, top_groups=1),
    ],
)
@pytest.mark.parametrize("route", [Dropless(), Capacity(factor=0.5)])
def test_padding_that_is_no_number_counts_nowhere(
    router: Router, route: Dispatcher, backend: str, garbage: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output, auxiliary terms, load and every gradient are those of other padding, to the last bit."""
    monkeypatch.setattr(rows, "FEW", 0)
    if reason := dispatch.backends[backend].available():
        pytest.skip(reason)
    spec = MoE(n_experts=4, expert=GLU(d_ff=8), router=router, dispatch=route, shared=GLU(d_ff=8))
    segments = torch.ones(3, 9, dtype=torch.int64)
    segments[0, 5:], segments[1, :2], segments[2] = 0, 0, 0
    pull = torch.randn(3, 9, D, generator=torch.Generator().manual_seed(1)) * (segments != 0)[..., None]
    found = []
    for padding in (garbage, 0.5):
        moe = module(spec).train()
        x = inputs(3).masked_fill((segments == 0)[..., None], padding).requires_grad_()
        torch.manual_seed(0)
        with dispatch.force(backend):
            out, aux = run(moe, x, segments)
            ((out * pull)[segments != 0].sum() + sum(loss.sum for loss in aux.values())).backward()
        numbers = [out[segments != 0], x.grad, *(tensor for loss in aux.values() for tensor in loss)]
        numbers += [getattr(moe.router, "load", None), *(parameter.grad for parameter in moe.parameters())]
        found.append([number.detach() for number in numbers if number is not None])
    assert len(found[0]) == len(found[1])
    for ours, wanted in zip(*found, strict=True):
        assert bool(wanted.isfinite().all())
        assert torch.equal(ours, wanted)
    assert bool(found[0][1].any()), "real tokens have gradients"
    assert not found[0][1][segments == 0].any()


def test_names_of_the_auxiliary_terms_and_of_the_parameters() -> None:
    model = draw(pre(ffn=dict(cases(MoE))["moe-2"]))
    out = model(torch.ones(2, 5, dtype=torch.int64))
    assert {f"decoder.blocks.{i}.ffn.{n}" for i in (0, 1) for n in ("balance", "z_loss")} == set(out.aux)
    assert all(isinstance(term, Loss) for term in out.aux.values())
    names = {n.removeprefix("decoder.blocks.0.ffn.") for n in model.state_dict() if "blocks.0.ffn." in n}
    maps = ("gate_proj", "up_proj", "down_proj")
    assert names == {
        "router.proj.weight",
        "router.selection_bias",
        *(f"experts.{m}.{p}" for m in maps for p in ("weight", "bias")),
        *(f"shared.{m}.weight" for m in maps),
    }
    assert not model(torch.ones(1, 5, dtype=torch.int64), state=model.new_state(1)).aux


def test_jitter_is_of_training_and_of_the_router_alone() -> None:
    moe = module(MoE(n_experts=1, expert=GLU(d_ff=4), router=SoftmaxRouter(jitter=0.5)))
    x = inputs()
    plain, aux = run(moe, x)
    moe.train()
    noisy, noisy_aux = run(moe, x)
    assert torch.equal(plain, noisy), "one expert: its input is not jittered, its gate is 1"
    assert not torch.equal(aux[".z_loss"].sum, noisy_aux[".z_loss"].sum)


def test_capacity_is_of_training_where_it_is_said_for_training() -> None:
    moe = module(SWITCH.replace(dispatch=Capacity(tokens=1)))
    x = inputs(1, 8)
    kept = [int((run(moe.train(mode), x)[0].abs().sum(-1) != 0).sum()) for mode in (False, True)]
    assert kept[0] == 8 > kept[1]


def test_low_precision_routes_in_fp32() -> None:
    moe = module(MoE(n_experts=4, expert=GLU(d_ff=4), router=RenormalisedRouter())).bfloat16()
    x = inputs().bfloat16()
    assert moe.router.logits(x).dtype == torch.float32
    assert_close(moe.router.logits(x), x.float() @ moe.router.proj.weight.float().T)
    assert run(moe, x)[0].dtype == torch.bfloat16
    moe.float()
    with torch.autocast("cpu", torch.bfloat16):
        out, aux = run(moe, x.float())
        under = moe.router.logits(x.float())
    assert torch.equal(under, moe.router.logits(x.float())), "autocast does not reach the router"
    assert aux[".z_loss"].sum.dtype == torch.float32
    assert_close(out.float(), run(moe, x.float())[0], 0.03)


def test_round_trip_and_override() -> None:
    for _, case in cases(MoE):
        spec = pre(ffn=case)
        assert from_json(type(spec), to_json(spec)) == spec
    changed = override(pre(ffn=SWITCH), {"decoder.blocks.*.ffn.dispatch": {"kind": "capacity", "factor": 1.5}})
    assert changed.decoder is not None
    assert changed.decoder.blocks[1].op("ffn").dispatch == Capacity(factor=1.5)
    changed = override(changed, {"decoder.blocks.*.ffn.expert.d_ff": 9})
    assert changed.decoder is not None
    assert changed.decoder.blocks[1].op("ffn").expert.d_ff == 9


@pytest.mark.parametrize("kind", [Router, Dispatcher])
def test_slots_have_cases(kind: type) -> None:
    assert list(cases(kind))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MoE(n_experts=0, expert=GLU(d_ff=4), router=SoftmaxRouter()), "n_experts must be at least 1"),
        (lambda: MoE(n_experts=2, expert=GLU(d_ff=4), router=SoftmaxRouter(top_k=3)), "top_k must be from 1"),
        (lambda: SWITCH.replace(n_experts=5, router=GroupedSigmoidRouter(top_k=1, n_groups=2)), "n_groups 2 times"),
        (lambda: SWITCH.replace(n_experts=4, router=GroupedSigmoidRouter(top_k=3, n_groups=2)), "the 2 experts"),
        (lambda: GroupedSigmoidRouter(top_groups=2), "top_groups must be from 1 to n_groups 1"),
        (lambda: GroupedSigmoidRouter(scale=0.0), "scale must be above 0"),
        (lambda: SoftmaxRouter(jitter=1.0), "jitter"),
        (lambda: Capacity(), "either 'factor' or 'tokens'"),
        (lambda: Capacity(factor=1.0, tokens=2), "either 'factor' or 'tokens'"),
        (lambda: Capacity(tokens=0), "above 0"),
        (lambda: Capacity(factor=math.inf), "finite"),
    ],
)
def test_mistakes_are_named(make, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_wrong_expert_is_named() -> None:
    with pytest.raises(UserError, match=r"'capacity'|invalid value"):
        override(pre(ffn=SWITCH), {"decoder.blocks.*.ffn.expert": {"kind": "capacity", "tokens": 1}})
