"""Schedules against the numbers of their papers, and what every schedule promises."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phylon.spec import UserError, entries, from_data, to_data
from phylon.train.schedule import WSD, Constant, InverseSqrt, Linear, Schedule, WarmupCosine


def test_cosine_rises_to_one_halves_in_the_middle_and_ends_at_its_minimum():
    schedule = WarmupCosine(warmup=10, min_ratio=0.1)
    assert schedule.ratio(0, 110) == pytest.approx(1 / 11)
    assert schedule.ratio(9, 110) == pytest.approx(10 / 11)
    assert schedule.ratio(10, 110) == 1
    assert schedule.ratio(60, 110) == pytest.approx(0.55)
    assert schedule.ratio(110, 110) == pytest.approx(0.1)


def test_inverse_sqrt_times_the_papers_peak_is_equation_3():
    width, warmup = 512, 4000
    schedule = InverseSqrt(warmup=warmup)
    peak = width**-0.5 * warmup**-0.5
    for n in (1, 100, 4000, 4001, 100_000):
        paper = width**-0.5 * min(n**-0.5, n * warmup**-1.5)
        assert peak * schedule.ratio(n - 1, 1) == pytest.approx(paper, rel=1e-12)


def test_linear_is_a_straight_line_to_zero():
    ratios = [Linear(warmup=4).ratio(step, 24) for step in range(4, 25)]
    assert ratios == pytest.approx([1 - i / 20 for i in range(21)])


def test_wsd_is_stable_and_then_decays_exponentially():
    schedule = WSD(warmup=10, decay=0.2, min_ratio=0.01)
    assert {schedule.ratio(step, 100) for step in range(10, 80)} == {1.0}
    assert schedule.ratio(90, 100) == pytest.approx(0.1)
    assert schedule.ratio(100, 100) == pytest.approx(0.01)


def test_constant_stays():
    assert [Constant().ratio(step, 5) for step in (0, 4, 9)] == [1, 1, 1]


@pytest.mark.parametrize("entry", list(entries(Schedule)), ids=lambda entry: entry.kind)
@given(total=st.integers(1, 300), more=st.integers(0, 50))
def test_every_schedule_rises_then_never_rises_again(entry, total, more):
    for schedule in entry.cases():
        ratios = [schedule.ratio(step, total) for step in range(total + more)]
        assert all(0 <= ratio <= 1 for ratio in ratios)
        peak = ratios.index(max(ratios))
        assert ratios[:peak] == sorted(ratios[:peak])
        assert ratios[peak:] == sorted(ratios[peak:], reverse=True)
        assert from_data(Schedule, to_data(schedule)) == schedule


@pytest.mark.parametrize(
    ("table", "word"),
    [
        ({"kind": "warmup_cosine", "warmup": -1}, "warmup"),
        ({"kind": "linear", "min_ratio": 1.5}, "min_ratio"),
        ({"kind": "wsd", "decay": 0.0}, "decay"),
        ({"kind": "inverse_sqrt", "warmup": 0}, "warmup"),
        ({"kind": "warmup_cosin"}, "did you mean 'warmup_cosine'"),
        ({"kind": "linear", "warmpu": 3}, "did you mean 'warmup'"),
    ],
)
def test_bad_schedules_are_named(table, word):
    with pytest.raises(UserError, match=word):
        from_data(Schedule, table)
