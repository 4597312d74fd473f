"""Batches by token count: nothing lost, nothing too large, the same for ever, and padded by segments."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phylon.data.buckets import WINDOW, BucketLoader, LengthOrder, TokenBatches, padded
from phylon.spec import UserError


def examples(lengths, seed=0):
    draw = np.random.default_rng(seed)
    made = []
    for n, m in lengths:
        source, target = draw.integers(1, 50, n), draw.integers(1, 50, m)
        made.append({"source": source, "tokens": target, "segments": np.ones(m, np.int64), "targets": target})
    return made


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=60),
    st.integers(40, 200),
    st.integers(0, 3),
)
def test_an_epoch_holds_every_example_once_and_no_batch_is_too_large(lengths, max_tokens, seed):
    order = TokenBatches(np.array(lengths), max_tokens, seed)
    longest = np.array(lengths).max(1)
    for epoch in (0, 1):
        batches = [order.rows(epoch * len(order) + i) for i in range(len(order))]
        assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
        assert max(len(rows) * longest[rows].max() for rows in batches) <= max_tokens
    again = TokenBatches(np.array(lengths), max_tokens, seed)  # from anywhere, without walking there
    assert again.rows(len(order)).tolist() == batches[0].tolist()


def test_batches_are_of_about_one_length_and_the_epochs_differ():
    lengths = np.random.default_rng(0).integers(1, 100, 2000)
    order = TokenBatches(lengths, 1000, 7)
    epochs = [[order.rows(e * len(order) + i) for i in range(len(order))] for e in (0, 1)]
    padding = [1 - lengths[rows].sum() / (len(rows) * lengths[rows].max()) for rows in epochs[0]]
    assert np.mean(padding) < 0.1
    sizes = [float(lengths[rows].mean()) for rows in epochs[0]]
    assert abs(np.corrcoef(sizes, np.arange(len(sizes)))[0, 1]) < 0.3  # not from short to long
    assert [set(rows.tolist()) for rows in epochs[0]] != [set(rows.tolist()) for rows in epochs[1]]
    other = TokenBatches(lengths, 1000, 8)
    assert other.rows(0).tolist() != order.rows(0).tolist()


def test_an_example_that_no_batch_takes_is_refused():
    with pytest.raises(UserError, match="an example has 41 tokens, more than the 40 of a batch"):
        TokenBatches(np.array([[3, 41], [5, 5]]), 40, 0)
    assert len(TokenBatches(np.array([[3, 40], [5, 5]]), 40, 0)) == 2  # 40 fits, although its bucket says 40


@settings(deadline=None)
@given(st.integers(1, 90), st.integers(1, 12), st.integers(0, 3))
def test_rows_by_length_come_once_an_epoch_from_any_step(n_rows, size, seed):
    lengths = np.random.default_rng(seed).integers(1, 50, n_rows)
    order = LengthOrder(n_rows, size, seed, lengths)
    steps = [order.rows(step).tolist() for step in range(-(-3 * n_rows // size))]
    stream = np.concatenate(steps)
    for epoch in range(3):
        assert sorted(stream[epoch * n_rows : (epoch + 1) * n_rows].tolist()) == list(range(n_rows))
    again = LengthOrder(n_rows, size, seed, lengths)
    assert [again.rows(step).tolist() for step in reversed(range(len(steps)))] == steps[::-1]


def test_rows_of_about_one_length_share_a_batch_in_every_epoch_and_the_order_is_not_by_length():
    lengths = np.random.default_rng(0).integers(5, 50, 1003)
    order = LengthOrder(1003, 16, 1, lengths)
    for epoch in (0, 3):
        first = epoch * 1003 // 16 + 1
        found = [lengths[order.rows(first + i)] for i in range(60)]
        computed, real = sum(len(one) * one.max() for one in found), sum(one.sum() for one in found)
        assert computed < 1.12 * real, (epoch, computed / real)
        longest = [one.max() for one in found[:WINDOW]]
        assert longest != sorted(longest)
    assert order.rows(3).tolist() != LengthOrder(1003, 16, 2, lengths).rows(3).tolist()


def test_padding_is_told_by_segments_and_has_no_target():
    one, two = examples([(2, 3), (4, 1)])
    batch = padded([one, two])
    assert {name: tuple(t.shape) for name, t in batch.items()} == {
        "source": (2, 4), "tokens": (2, 3), "segments": (2, 3), "targets": (2, 3)
    }  # fmt: skip
    assert batch["source"][0].tolist() == [*one["source"].tolist(), 0, 0]
    assert batch["segments"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["targets"][1].tolist() == [int(two["targets"][0]), -100, -100]
    classes = padded([{"x": np.arange(2), "targets": np.array(3)}, {"x": np.arange(3), "targets": np.array(1)}])
    assert classes["targets"].tolist() == [3, 1]


def test_a_loader_goes_on_where_it_was_and_refuses_other_data():
    made = examples([(int(n), int(m)) for n, m in np.random.default_rng(1).integers(1, 20, (50, 2))])
    loader = BucketLoader(made, 60, 3)
    loader.step = len(loader.order) + 2
    state = loader.state_dict()
    assert (state["epoch"], state["index"]) == (1, 2)
    again = BucketLoader(made, 60, 3)
    again.load_state_dict(state)
    assert again.step == loader.step
    for name, value in loader.batch(loader.step).items():
        assert torch.equal(value, again.batch(again.step)[name])
    with pytest.raises(UserError, match=r"max_tokens was 60 and is now 61"):
        BucketLoader(made, 61, 3).load_state_dict(state)
    made[7] = made[8]
    with pytest.raises(UserError, match=r"data was "):
        BucketLoader(made, 60, 3).load_state_dict(state)
