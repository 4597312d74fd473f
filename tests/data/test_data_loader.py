import json

import numpy as np
import pytest
import torch
from data_toys import store_of
from hypothesis import given
from hypothesis import strategies as st

from phylon.data import (
    IGNORE,
    BatchOrder,
    Loader,
    PackedRows,
    Row,
    epoch_permutation,
    evaluation_batches,
    next_token_targets,
    pack_documents,
)
from phylon.spec.errors import UserError

ROWS = PackedRows(store_of([5, 9, 4, 7, 12, 3, 8, 2, 6, 5]), 4)  # 15 rows and a remainder of 1
SEEDS = st.integers(0, 2**64 - 1)


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@given(st.integers(1, 300), SEEDS, st.integers(0, 2**40))
def test_each_epoch_is_a_bijection(n_rows, seed, epoch):
    order = epoch_permutation(n_rows, seed, epoch)
    assert sorted(order.tolist()) == list(range(n_rows))
    epoch_permutation.cache_clear()
    assert epoch_permutation(n_rows, seed, epoch).tolist() == order.tolist()


def test_orders_differ_by_seed_and_epoch_and_are_pinned():
    orders = {tuple(epoch_permutation(50, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    assert epoch_permutation(10, 0, 0).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    firsts = np.bincount([epoch_permutation(4, 7, epoch)[0] for epoch in range(2000)], minlength=4)
    assert firsts.min() > 430, firsts


@given(st.integers(1, 30), st.integers(1, 40), SEEDS)
def test_batches_give_every_row_once_an_epoch(n_rows, batch_size, seed):
    order = BatchOrder(n_rows, batch_size, seed)
    steps = -(-3 * n_rows // batch_size)
    stream = np.concatenate([order.rows(step) for step in range(steps)])
    for epoch in range(3):
        assert sorted(stream[epoch * n_rows : (epoch + 1) * n_rows].tolist()) == list(range(n_rows))
    for step in range(steps):
        epoch, index = order.place(step)
        assert epoch_permutation(n_rows, seed, epoch)[index] == order.rows(step)[0]


@given(st.integers(1, 7), SEEDS, st.integers(0, 60), st.lists(st.integers(0, 60), max_size=5))
def test_resumed_anywhere_the_batches_are_the_same_whatever_was_asked_before(batch_size, seed, stop, others):
    whole = Loader(ROWS, batch_size, seed)
    batches = [next(whole) for _ in range(stop + 3)]
    first = Loader(ROWS, batch_size, seed)
    for _ in range(stop):
        next(first)
    state = json.loads(json.dumps(first.state_dict()))
    resumed = Loader(ROWS, batch_size, seed)
    for step in others:
        resumed.batch(step)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert state["epoch"] * len(ROWS) + state["index"] == stop * batch_size
    assert all(equal(next(resumed), batch) for batch in batches[stop:])


def test_a_batch_holds_rows_as_int64_tensors_and_parts_make_it_whole():
    loader = Loader(ROWS, 6, 3)
    batch = next(iter(loader))
    assert list(batch) == ["tokens", "segments", "targets"]
    assert {(part.dtype, part.shape) for part in batch.values()} == {(torch.int64, (6, 4))}
    for place, index in enumerate(loader.order.rows(0)):
        for name, part in ROWS.row(int(index))._asdict().items():
            assert batch[name][place].tolist() == part.tolist()
    for of in (1, 2, 3, 6):
        parts = [loader.batch(0, part=part, of=of) for part in range(of)]
        assert equal({name: torch.cat([part[name] for part in parts]) for name in batch}, batch)
    with pytest.raises(UserError, match="batch_size 6 cannot be shared equally by 4"):
        loader.batch(0, of=4)


def test_resuming_with_something_else_names_every_difference():
    state = Loader(ROWS, 4, 0).state_dict()
    other = Loader(PackedRows(store_of([5, 9, 40]), 5), 3, 1)
    with pytest.raises(UserError) as caught:
        other.load_state_dict(state)
    for words in (
        "seed was 0 and is now 1",
        "batch_size was 4 and is now 3",
        "n_rows was 15",
        "shapes was 'tokens (4,), segments (4,), targets (4,)' and is now 'tokens (5,)",
        "data was",
    ):
        assert words in str(caught.value)
    same_sizes = Loader(PackedRows(store_of([9, 5, 4, 7, 12, 3, 8, 2, 6, 5]), 4), 4, 0)
    with pytest.raises(UserError, match=r"resumed: data was '[0-9a-f]+' and is now '[0-9a-f]+'$"):
        same_sizes.load_state_dict(state)
    assert same_sizes.step == 0
    for batch_size, seed, words in ((0, 0, "batch_size is 0"), (1, -1, "seed is -1"), (1, 1 << 64, "seed is")):
        with pytest.raises(UserError, match=words):
            Loader(ROWS, batch_size, seed)


@pytest.mark.parametrize("batch_size", [1, 4, 15, 16])
def test_evaluation_sees_every_row_once_in_order(batch_size):
    batches = list(evaluation_batches(ROWS, batch_size, Row.padding(4)._asdict()))
    assert {tuple(part.shape) for batch in batches for part in batch.values()} == {(batch_size, 4)}
    tokens, segments, targets = (torch.cat([batch[name] for batch in batches]) for name in batches[0])
    real = len(ROWS)
    assert tokens[:real].tolist() == [ROWS.row(index).tokens.tolist() for index in range(real)]
    assert targets[:real].tolist() == [ROWS.row(index).targets.tolist() for index in range(real)]
    assert (segments[:real] > 0).all()
    assert len(tokens) - real < batch_size
    assert not segments[real:].any()
    assert (targets[real:] == IGNORE).all()
    with pytest.raises(UserError, match="batch_size is 0"):
        next(evaluation_batches(ROWS, 0))


@st.composite
def padded_rows(draw):
    """Rows with documents and padding on either side, drawn so that ids repeat and 0 is a real token too."""
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        left, right = draw(st.integers(0, 3)), draw(st.integers(0, 3))
        inside = [segment + 1 for segment in range(3) for _ in range(draw(st.integers(1, 3)))]
        rows.append(([0] * left + inside + [0] * right + [0] * 15)[:15])
    tokens = draw(
        st.lists(st.lists(st.integers(0, 2), min_size=15, max_size=15), min_size=len(rows), max_size=len(rows))
    )
    return torch.tensor(tokens), torch.tensor(rows)


@given(padded_rows())
def test_next_token_targets_equal_their_definition(case):
    tokens, segments = case
    targets = next_token_targets(tokens, segments)
    for row in range(len(tokens)):
        for at in range(15):
            last = at == 14 or segments[row, at] == 0 or segments[row, at] != segments[row, at + 1]
            assert targets[row, at] == (IGNORE if last else tokens[row, at + 1])


def test_packed_label_dropped_and_real_end_token_kept():
    # Case 4: [5,6,7] and [8,9,10,11] in one row. Case 8: padding has the id of the end token, 2.
    targets = next_token_targets(
        torch.tensor([[5, 6, 7, 8, 9, 10, 11], [2, 2, 5, 6, 2, 2, 2]]),
        torch.tensor([[1, 1, 1, 2, 2, 2, 2], [0, 0, 1, 1, 1, 0, 0]]),
    )
    no = IGNORE
    assert targets.tolist() == [[6, 7, no, 9, 10, 11, no], [no, no, 6, 2, no, no, no]]
    with pytest.raises(AssertionError):
        next_token_targets(torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 3, dtype=torch.int64))


def test_the_rows_that_both_ways_of_packing_give_agree_with_the_torch_rule():
    packed = pack_documents([[1, 2, 3], [4], [5, 6, 7, 8, 9]], 7)
    batch = Loader(packed, 5, 0).batch(0)
    assert torch.equal(next_token_targets(batch["tokens"], batch["segments"]), batch["targets"])
    batch = Loader(ROWS, 20, 0).batch(0)
    alone = next_token_targets(batch["tokens"], batch["segments"])
    # Cut from a stream, the last token of a row knows its next one where the document goes on.
    assert torch.equal(alone[:, :-1], batch["targets"][:, :-1])
    assert (batch["targets"][:, -1] != IGNORE).any()
