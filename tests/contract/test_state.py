"""What a state promises: rows, forks, insertion, cropping, failed passes, limits; always against the text alone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from helpers import assert_close, drawn, small_models
from law import alone, documents, padded, split, streams, values
from phylon.layers.state import State
from phylon.model import Model
from phylon.spec import UserError

NAMES = [name for name in sorted(small_models()) if streams(drawn(name))]
# Full, rolling, grouped, learned positions, and the two wired differently; the law itself runs on every model.
FEW = [
    n for n in NAMES if n.startswith(("attention-", "window-", "alternating", "learned", "parallel", "and-", "post"))
]
PREFIX, NEXT = (6, 2, 4), 3


def fresh(model: Model, lengths: tuple[int, ...] = PREFIX) -> tuple[State, list[Tensor]]:
    """A state with ragged rows, sent left-padded, and the texts in it."""
    docs = documents(model, lengths)
    tokens, segments = padded(docs, "left")
    state = model.new_state(len(docs))
    values(model, tokens, segments=segments, state=state)
    return state, docs


def goes_on(model: Model, state: State, texts: list[Tensor], seed: int = 9) -> None:
    """The state behaves like the one after ``texts``, token by token and in a chunk."""
    more = torch.stack(documents(model, (NEXT,) * len(texts), seed=seed))
    pieces = [values(model, more[:, :1], state=state), values(model, more[:, 1:], state=state)]
    expected = alone(model, [torch.cat(pair) for pair in zip(texts, more, strict=True)])
    for ours, whole in zip(torch.cat(pieces, 1), expected, strict=True):
        assert_close(ours, whole[-NEXT:])


@pytest.mark.parametrize("name", FEW)
def test_reorder_fork_rows(name: str) -> None:
    model = drawn(name)
    state, docs = fresh(model)
    goes_on(model, state.rows([2, 0]), [docs[2], docs[0]])
    goes_on(model, state.fork(2), [docs[0], docs[0], docs[1], docs[1], docs[2], docs[2]])
    goes_on(model, state.rows(torch.tensor([1])), [docs[1]], seed=3)
    state.reorder([1, 1, 2])
    goes_on(model, state, [docs[1], docs[1], docs[2]])


@pytest.mark.parametrize("lengths", [PREFIX, (4, 4, 4)])
@pytest.mark.parametrize("name", FEW)
def test_a_row_of_another_state_takes_a_place(name: str, lengths: tuple[int, ...]) -> None:
    model = drawn(name)
    state, docs = fresh(model, lengths)
    other, others = fresh(model, (9, 1))
    state.insert([2, 0], other)
    goes_on(model, state, [others[1], docs[1], others[0]])
    goes_on(model, other, others)
    with pytest.raises(UserError, match="1 rows to overwrite"):
        state.insert([0], other)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("lengths", [PREFIX, (4, 4, 4)])
@pytest.mark.parametrize("wanted", [[2, 2, 2], [6, 1, 3], 0])
def test_crop(name: str, wanted: int | list[int], lengths: tuple[int, ...]) -> None:
    model = drawn(name)
    state, docs = fresh(model, lengths)
    if any(part.can_crop(state) for part in state.parts.values()):
        with pytest.raises(UserError, match=r"cannot crop the state of decoder.blocks"):
            state.crop(wanted)
        assert state.lengths == list(lengths)
        goes_on(model, state, docs)
        return
    state.crop(wanted)
    kept = [wanted] * 3 if isinstance(wanted, int) else wanted
    assert state.lengths == [min(n, len(doc)) for n, doc in zip(kept, docs, strict=True)]
    goes_on(model, state, [doc[:n] for n, doc in zip(kept, docs, strict=True)])


@pytest.mark.parametrize("name", FEW)
def test_cropped_tokens_are_gone(name: str) -> None:
    """A forgotten token of document 2 is no neighbour of the next document 2, at whatever position it stood."""
    model = drawn(name)
    tokens, state = torch.stack(documents(model, (4, 4))), model.new_state(2)
    values(model, tokens, segments=torch.tensor([[1, 1, 1, 1], [0, 1, 1, 2]]), state=state)
    if any(part.can_crop(state) for part in state.parts.values()):
        pytest.skip("the window has wrapped")
    state.crop([4, 1])
    assert (state.lengths, state.last_segment, state.next_position) == ([4, 1], [1, 1], [4, 1])
    values(model, tokens[:, :1], segments=torch.tensor([[1], [2]]), state=state)
    goes_on(model, state, [torch.cat([tokens[0], tokens[0, :1]]), tokens[1, :1]])


@pytest.mark.parametrize("name", ["causal-0", "attention-0", "learned_positions-0"])
def test_rows_of_equal_length_need_not_be_aligned(name: str) -> None:
    """Two documents in a row of the common length, inserted or left by a crop, are still two documents."""
    model = drawn(name)
    state, docs = fresh(model, (4, 4))
    other, tokens = model.new_state(1), documents(model, (6,))[0]
    values(model, tokens[None], segments=torch.tensor([[1, 2, 2, 2, 2, 2]]), state=other)
    other.crop(4)
    goes_on(model, other.rows([0]), [tokens[1:4]])
    state.insert([1], other)
    goes_on(model, state, [docs[0], tokens[1:4]])


def test_crop_refuses_nonsense() -> None:
    state, _ = fresh(drawn("causal-0"))
    with pytest.raises(UserError, match="to -1 tokens"):
        state.crop(-1)
    with pytest.raises(UserError, match="2 lengths to crop to, but the state has 3 rows"):
        state.crop([1, 2])


class Stop(Exception):
    pass


def failing(model: Model) -> Callable[[], None]:
    """The last op of the last block raises, after every mixer has appended; call the result to repair it."""
    assert model.decoder is not None

    def stop(module: nn.Module, args: object) -> None:
        raise Stop

    ops = list(model.decoder.blocks)[-1].children()
    return list(ops)[-1].register_forward_pre_hook(stop).remove


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("lengths", [(4, 4, 4), PREFIX, (5, 5, 5)])
def test_a_failed_pass_leaves_the_state(name: str, length: int, lengths: tuple[int, ...]) -> None:
    model = drawn(name)
    state, docs = fresh(model, lengths)
    wrong = torch.stack(documents(model, (length,) * 3, seed=77))
    repair = failing(model)
    for _ in range(2):
        with pytest.raises(Stop):
            values(model, wrong, state=state)
    repair()
    assert state.lengths == list(lengths)
    goes_on(model, state.fork(1), docs)
    shorter = state.rows([0, 1, 2])
    try:
        shorter.crop(3)
    except UserError:
        pass
    else:
        goes_on(model, shorter, [doc[:3] for doc in docs])
    goes_on(model, state, docs)


def test_wrong_targets_do_not_advance_the_state() -> None:
    model = drawn("causal-0")
    state, docs = fresh(model)
    with pytest.raises(UserError, match="target id 99"):
        model(torch.ones(3, 2, dtype=torch.int64), state=state, targets=torch.full((3, 2), 99))
    assert state.lengths == list(PREFIX)
    goes_on(model, state, docs)


@pytest.mark.parametrize("name", FEW)
def test_a_row_of_padding_is_untouched(name: str) -> None:
    model = drawn(name)
    state, docs = fresh(model)
    kept = {path: (part.k[1, :2].clone(), part.v[1, :2].clone()) for path, part in state.parts.items()}
    tokens = torch.stack(documents(model, (2, 2, 2), seed=4))
    values(model, tokens, segments=torch.tensor([[1, 1], [0, 0], [0, 1]]), state=state)
    assert state.lengths == [8, 2, 5]
    assert (state.last_segment[1], state.next_position[1]) == (1, 2)
    for path, part in state.parts.items():
        assert torch.equal(part.k[1, :2], kept[path][0])
        assert torch.equal(part.v[1, :2], kept[path][1])
    texts = [torch.cat([docs[0], tokens[0]]), docs[1], torch.cat([docs[2], tokens[2, 1:]])]
    goes_on(model, state, texts)


@pytest.mark.parametrize("name", FEW)
def test_a_new_segment_starts_afresh(name: str) -> None:
    model = drawn(name)
    state, docs = fresh(model)
    tokens = torch.stack(documents(model, (2, 2, 2), seed=4))
    values(model, tokens, segments=torch.tensor([[2, 2], [1, 1], [1, 8]]), state=state)
    goes_on(model, state, [tokens[0], torch.cat([docs[1], tokens[1]]), tokens[2, 1:]])


def test_max_len() -> None:
    model = drawn("causal-0")
    state = model.new_state(2, max_len=5)
    size = state.n_bytes
    tokens, segments = padded(documents(model, (4, 2)), "left")
    values(model, tokens, segments=segments, state=state)
    with pytest.raises(UserError, match="6 tokens exceed the state's max_len of 5"):
        values(model, tokens[:, :2], state=state)
    assert state.lengths == [4, 2]
    values(model, tokens[:, :2], segments=torch.tensor([[0, 1], [1, 1]]), state=state)
    assert (state.lengths, state.n_bytes) == ([5, 4], size), "nothing grows under a max_len"


def test_rolling_state_stays_small() -> None:
    model = drawn("window-1")
    state = model.new_state(1)
    size = state.n_bytes
    for tokens in documents(model, (5, 1, 9, 1, 1, 30)):
        values(model, tokens[None], state=state)
    assert state.n_bytes == size == 2 * 2 * 4 * (2 * 8) * 4  # blocks x (k, v) x window x (heads x width) x fp32


@pytest.mark.parametrize(("batch", "max_len"), [(0, None), (1, 0)])
def test_empty_states_are_refused(batch: int, max_len: int | None) -> None:
    with pytest.raises(UserError, match="at least one row and one token"):
        drawn("causal-0").new_state(batch, max_len)


def test_state_is_inference_only() -> None:
    model = drawn("window-1")
    state = model.new_state(1)
    for length in (3, 1):
        out = model(torch.ones(1, length, dtype=torch.int64), state=state)
        assert not out.hidden.requires_grad
    assert not any(part.k.requires_grad for part in state.parts.values())


def test_marks_are_not_lost_silently() -> None:
    model = drawn("causal-0")
    tokens = torch.ones(1, 2, dtype=torch.int64)
    with pytest.raises(UserError, match="marks"):
        model(tokens, marks=tokens, state=model.new_state(1))


@pytest.mark.parametrize("positions", [[0, 0, 1, 2], [3, 2, 4, 5], [0, 1, 2, 2]])
def test_positions_that_do_not_rise_are_not_taken_silently(positions: list[int]) -> None:
    """On a whole text tokens see each other by position; a state would give other numbers."""
    model = drawn("causal-0")
    tokens, state = torch.zeros(1, 4, dtype=torch.int64), model.new_state(1)
    with torch.no_grad(), pytest.raises(UserError, match="does not rise within its document"):
        model(tokens, positions=torch.tensor([positions]), state=state)
    with torch.no_grad():
        model(tokens, positions=torch.tensor([[0, 2, 3, 7]]), state=state)
        with pytest.raises(UserError, match="position 7 does not rise within its document"):
            model(tokens[:, :1], positions=torch.tensor([[7]]), state=state)
        model(tokens[:, :2], positions=torch.tensor([[8, 0]]), segments=torch.tensor([[1, 2]]), state=state)


def test_autocast_and_state() -> None:
    """Keys of a bf16 pass in an fp32 buffer: one dtype per attention call."""
    model = drawn("attention-4")
    tokens = torch.stack(documents(model, (9,)))
    with torch.autocast("cpu", torch.bfloat16):
        whole = values(model, tokens)
        state = model.new_state(1)
        parts = torch.cat([values(model, piece, state=state) for piece in tokens.split([4, 1, 4], 1)], 1)
    assert_close(parts, whole, tolerance=0.05)


def test_rows_of_the_split_helper() -> None:
    """The helper itself: padding is dropped, the order of rows kept."""
    tokens, segments = padded([torch.tensor([1, 2]), torch.tensor([4])], "left")
    assert [row.tolist() for row in split(tokens, segments)] == [[1, 2], [4]]
