"""The sampling functions against their definitions, one row at a time."""

import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phylon.generate import sampling
from phylon.generate.sampling import Sampling, Settings, draw_key, gumbel, sample, shaped
from phylon.spec import UserError


def kept(logits: list[float], **options) -> list[int]:
    row = torch.tensor([logits])
    made = Settings.of([Sampling(**options)], row.shape[-1], row.device)
    return shaped(row, made).isfinite()[0].nonzero()[:, 0].tolist()


def chosen(logits: torch.Tensor, rows: list[Sampling], step: int = 0, seen: torch.Tensor | None = None) -> list[int]:
    keys = [draw_key(row.seed, 0, step) for row in rows]
    return sample(logits, Settings.of(rows, logits.shape[-1], logits.device), keys, seen).tolist()


def test_case_22_temperature_zero_is_argmax_with_the_lowest_id_on_ties():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert chosen(logits, [Sampling(temperature=0)] * 2) == [1, 0]
    # Beside a row that samples, a greedy row is the same; filters do not matter to it.
    mixed = [Sampling(temperature=0, top_p=0.1, top_k=3), Sampling(temperature=9.0)]
    assert all(chosen(logits, mixed, step)[0] == 1 for step in range(20))


def test_case_22_top_k_clamps_and_breaks_ties_by_the_lower_id():
    assert kept([0.0, 1.0, 2.0], top_k=100) == [0, 1, 2]
    assert kept([1.0, 2.0, 2.0, 2.0, 0.0], top_k=2) == [1, 2]
    assert kept([2.0, 1.0, 1.0, 1.0, 1.0], top_k=3) == [0, 1, 2]
    assert kept([0.0] * 5, top_k=1) == [0]


def test_top_p_keeps_the_fewest_that_reach_p():
    logits = [math.log(p) for p in (0.15, 0.5, 0.05, 0.3)]
    assert kept(logits, top_p=0.49) == [1]
    assert kept(logits, top_p=0.51) == [1, 3]
    assert kept(logits, top_p=0.81) == [0, 1, 3]
    assert kept(logits, top_p=1.0) == [0, 1, 2, 3]
    assert kept(logits, top_p=1e-9) == [1]
    assert kept([0.0] * 4, top_p=0.5) == [0, 1]


def test_min_p_is_relative_to_the_best():
    logits = [math.log(p) for p in (0.5, 0.26, 0.2, 0.04)]
    assert kept(logits, min_p=0.5) == [0, 1]
    assert kept(logits, min_p=0.1) == [0, 1, 2]
    assert kept(logits, min_p=1.0) == [0]
    assert kept(logits, min_p=0.0) == [0, 1, 2, 3]


def test_the_order_is_temperature_then_top_k_then_top_p():
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    # A high temperature flattens first, so that p reaches further; top-k renormalises before top-p.
    assert kept(logits, top_p=0.6) == [0, 1]
    assert kept(logits, top_p=0.6, temperature=50.0) == [0, 1, 2]
    assert kept(logits, top_p=0.56, top_k=2) == [0]


def test_repetition_penalty_divides_positive_and_multiplies_negative_scores():
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    made = Settings.of([Sampling(repetition_penalty=4.0, temperature=0)], 4, logits.device)
    seen = torch.tensor([[True, True, False, False]])
    assert shaped(logits, made, seen).tolist() == [[0.5, -8.0, 2.0, -2.0]]


def test_tiny_temperatures_do_not_overflow():
    logits = torch.tensor([[1.0, 300.0, 299.0]])
    assert chosen(logits, [Sampling(temperature=1e-30)]) == [1]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": math.nan},
        {"repetition_penalty": 0.0},
    ],
)
def test_impossible_values_are_refused_by_name(options):
    with pytest.raises(UserError, match=next(iter(options))):
        Sampling(**options)


def test_draws_follow_the_probabilities():
    probs = torch.tensor([0.5, 0.25, 0.15, 0.1])
    n = 4000
    logits = probs.log().expand(n, -1)
    rows = [Sampling(seed=seed) for seed in range(n)]
    share = torch.bincount(torch.tensor(chosen(logits, rows)), minlength=4) / n
    assert (share - probs).abs().max() < 4 * math.sqrt(0.25 / n)
    one_seed = torch.tensor([chosen(logits[:1], [Sampling(seed=1)], step)[0] for step in range(n)])
    assert (torch.bincount(one_seed, minlength=4) / n - probs).abs().max() < 4 * math.sqrt(0.25 / n)


def test_noise_is_gumbel_and_a_function_of_its_key_alone():
    noise = gumbel([draw_key(0, 0, 0)], torch.arange(200_000)[None])[0].double()
    assert abs(noise.mean() - 0.5772) < 0.02
    assert abs(noise.var() - math.pi**2 / 6) < 0.04
    both = gumbel([draw_key(0, 0, 1), draw_key(0, 0, 0)], torch.tensor([[7, 3, 9]]))
    assert torch.equal(both[1], noise[[7, 3, 9]].float())
    assert not torch.equal(both[0], both[1])
    assert len({draw_key(s, r, t) for s in range(-3, 3) for r in range(4) for t in range(4)}) == 96


def reference(row: torch.Tensor, options: Sampling) -> list[int]:
    """What stays, by sorting in plain Python."""
    scaled = [x / options.temperature for x in row.tolist()]
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    order = order[: options.top_k]
    if options.top_p is not None and options.top_p < 1:
        total = math.fsum(math.exp(scaled[i] - scaled[order[0]]) for i in order)
        cut, mass = [], 0.0
        for i in order:
            if mass >= options.top_p:
                break
            cut.append(i)
            mass += math.exp(scaled[i] - scaled[order[0]]) / total
        order = cut
    if options.min_p:
        order = [i for i in order if scaled[i] >= scaled[order[0]] + math.log(options.min_p)]
    return sorted(order)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_filters_equal_their_definition_and_rows_are_independent(data):
    n_rows, vocab = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    # Few distinct values, exactly representable: ties are frequent and temperature keeps them.
    logits = torch.randint(-4, 5, (n_rows, vocab), generator=generator) / 2.0
    option = st.none() | st.integers(1, 15)
    rows = [
        Sampling(
            temperature=data.draw(st.sampled_from([0.5, 1.0, 2.0])),
            top_k=data.draw(option),
            top_p=data.draw(st.none() | st.sampled_from([0.137, 0.613, 0.911, 1.0])),
            min_p=data.draw(st.none() | st.sampled_from([0.0, 0.0531, 0.317])),
            seed=data.draw(st.integers(-5, 5)),
        )
        for _ in range(n_rows)
    ]
    with mock.patch.object(sampling, "_FEW", data.draw(st.integers(1, 12))):
        together = shaped(logits, Settings.of(rows, vocab, logits.device))
    picks = chosen(logits, rows)
    for i, row in enumerate(rows):
        assert together[i].isfinite().nonzero()[:, 0].tolist() == reference(logits[i], row)
        assert chosen(logits[i : i + 1], [row]) == [picks[i]]


def test_splitmix64_is_the_published_generator():
    # The first outputs for seed 1234567, as published with the reference code.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    uniform = [((x >> 11) + 0.5) * 2.0**-53 for x in published]
    expected = [-math.log(-math.log1p(-u)) for u in uniform]
    assert gumbel([1234567], torch.arange(4)[None])[0].tolist() == pytest.approx(expected, rel=1e-5)
