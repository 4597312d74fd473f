"""Mamba and Mamba-2 blocks under the law: the same tokens give the same logits, however they come."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import phylon
from phylon import Model, ModelSpec, UserError
from phylon.layers.embeddings.tokens import TokenEmbed
from phylon.layers.heads.lm import LMHead
from phylon.layers.inits import FanInInit
from phylon.layers.mixers.attention import Attention
from phylon.layers.mixers.mamba import Mamba
from phylon.layers.mixers.mamba2 import Mamba2
from phylon.layers.norms import RMSNorm
from phylon.layers.positions.rotary import Rotary
from phylon.model.spec import Block, Stack, pre_norm
from phylon.ops import native, scan
from phylon.patterns import Window
from phylon.spec.registry import entry_of

VOCAB, WIDTH = 37, 24


def model_of(*ops: Any, seed: int = 1, **options: Any) -> Model:
    blocks = tuple(Block(sublayers=(pre_norm(op, RMSNorm()),)) for op in ops)
    stack = Stack(d_model=WIDTH, embed=TokenEmbed(vocab_size=VOCAB), blocks=blocks, norm_final=RMSNorm())
    spec = ModelSpec(decoder=stack, heads={"lm": LMHead(vocab_size=VOCAB)}, init=FanInInit(gain=2.0))
    return phylon.build(spec, seed=seed, device="cpu", **options).eval()


MIXERS = [*entry_of(Mamba(dt_rank=1)).cases(), *entry_of(Mamba2(n_heads=1)).cases()]
ATTENTION = Attention(n_heads=3, n_kv_heads=1, head_dim=8, rotary=Rotary(), pattern=Window(size=4))
MODELS = {f"{type(op).__name__}-{i}": model_of(op, op) for i, op in enumerate(MIXERS)}
MODELS["hybrid"] = model_of(MIXERS[0], ATTENTION)


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]


def tokens(batch: int, length: int, seed: int = 3) -> Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def assert_near(got: Tensor, wanted: Tensor) -> None:
    assert got.shape == wanted.shape
    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def in_chunks(model: Model, ids: Tensor, cuts: list[int], **options: Any) -> Tensor:
    state = model.new_state(len(ids))
    return torch.cat([model(chunk, state=state, **options).logits for chunk in ids.split(cuts, 1)], 1)


@torch.no_grad()
@pytest.mark.parametrize("cuts", [[4, 6], [3, 3, 4], [1] * 10, [9, 1]])
def test_chunks_and_steps(model: Model, cuts: list[int]) -> None:
    ids = tokens(2, 10)
    whole = model(ids).logits
    assert_near(in_chunks(model, ids, cuts), whole)
    changed = torch.cat([(ids[:, :1] + 1) % VOCAB, ids[:, 1:]], 1)
    before = model(changed).logits[:, 1] - whole[:, 1]
    assert before.abs().max() > 1e-3 * whole.abs().max()  # a changed history changes the logits


@torch.no_grad()
def test_every_backend(model: Model) -> None:
    ids, segments = tokens(2, 10), torch.tensor([[0, 1, 1, 1, 2, 0, 2, 2, 3, 3], [1] * 10])
    whole = model(ids, segments=segments).logits
    with ExitStack() as stack:
        for dispatch in (scan.dispatch, scan.ssd_dispatch, scan.conv_dispatch):
            stack.enter_context(dispatch.force("reference"))
        assert_near(model(ids, segments=segments).logits[segments != 0], whole[segments != 0])
        assert_near(in_chunks(model, ids, [4, 1, 5]), model(ids).logits)


@torch.no_grad()
def test_no_later_token_moves_an_earlier_output(model: Model) -> None:
    ids = tokens(1, 16)
    changed = torch.cat([ids[:, :-1], (ids[:, -1:] + 1) % VOCAB], 1)
    a, b = model(ids).logits, model(changed).logits
    assert torch.equal(a[:, :-1], b[:, :-1])
    assert not torch.equal(a[:, -1], b[:, -1])


@torch.no_grad()
@pytest.mark.parametrize("places", [[3, 4, 5, 6], [0, 1, 2, 3], [1, 2, 5, 6], [0, 3, 4, 6]])
@pytest.mark.parametrize("cut", [None, 1, 4])
def test_padding_left_right_and_between(model: Model, places: list[int], cut: int | None) -> None:
    alone, other = tokens(1, 4), tokens(1, 7, seed=8)
    row = tokens(1, 7, seed=9)
    row[0, places] = alone[0]
    ids, segments = torch.cat([row, other]), torch.ones(2, 7, dtype=torch.long)
    segments[0] = 0
    segments[0, places] = 1
    if cut is None:
        logits = model(ids, segments=segments).logits
    else:
        state = model.new_state(2)
        pieces = zip(ids.split([cut, 7 - cut], 1), segments.split([cut, 7 - cut], 1), strict=True)
        logits = torch.cat([model(i, segments=s, state=state).logits for i, s in pieces], 1)
        assert state.lengths == [4, 7]
    assert_near(logits[:1, places], model(alone).logits)
    assert_near(logits[1:], model(other).logits)


@torch.no_grad()
def test_packed_documents(model: Model) -> None:
    a, b = torch.tensor([[5, 6, 7]]), torch.tensor([[8, 9, 10, 11]])
    ids, segments = torch.cat([a, b], 1), torch.tensor([[1, 1, 1, 2, 2, 2, 2]])
    packed = model(ids, segments=segments).logits
    assert_near(packed, torch.cat([model(a).logits, model(b).logits], 1))
    state = model.new_state(1)
    pieces = zip(ids.split([2, 3, 2], 1), segments.split([2, 3, 2], 1), strict=True)
    assert_near(torch.cat([model(i, segments=s, state=state).logits for i, s in pieces], 1), packed)
    assert (model(ids).logits[:, 3] - packed[:, 3]).abs().max() > 1e-3 * packed.abs().max()


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    gaps=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    cut=st.integers(1, 20),
    which=st.sampled_from(sorted(MODELS)),
)
@torch.no_grad()
def test_documents_with_gaps_in_any_chunks(lengths: list[int], gaps: list[int], cut: int, which: str) -> None:
    model = MODELS[which]
    ids: list[int] = []
    segments: list[int] = []
    for i, length in enumerate(lengths):
        ids += [0] * gaps[i] + tokens(1, length, seed=i)[0].tolist()
        segments += [0] * gaps[i] + [i + 1] * length
    ids, segments = [*ids, *[0] * gaps[3]], [*segments, *[0] * gaps[3]]
    row, segment_row = torch.tensor([ids]), torch.tensor([segments])
    state = model.new_state(1)
    pieces = zip(row.split(cut, 1), segment_row.split(cut, 1), strict=True)
    logits = torch.cat([model(i, segments=s, state=state).logits for i, s in pieces], 1)
    for i, length in enumerate(lengths):
        assert_near(logits[:, segment_row[0] == i + 1], model(tokens(1, length, seed=i)).logits)


@torch.no_grad()
def test_rows_fork_reorder_and_insert(model: Model) -> None:
    ids, more = tokens(2, 5), tokens(2, 3, seed=4)
    wanted = model(torch.cat([ids, more], 1)).logits[:, 5:]
    state = model.new_state(2)
    model(ids, state=state)
    forked = state.fork(2)
    assert_near(model(more.repeat_interleave(2, 0), state=forked).logits, wanted.repeat_interleave(2, 0))
    state.reorder([1, 0])
    free = model.new_state(3)
    model(tokens(3, 5, seed=6), state=free)
    free.insert([2, 0], state)
    assert_near(model(torch.stack([more[0], more[0], more[1]]), state=free).logits[[2, 0]], wanted.flip(0)[[0, 1]])
    assert_near(model(more.flip(0), state=state).logits, wanted.flip(0))  # the copies had no part in it


@torch.no_grad()
def test_a_pass_that_fails_leaves_the_state_as_it_was(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tokens(1, 8)
    whole = model(ids).logits
    state = model.new_state(1)
    model(ids[:, :5], state=state)
    with monkeypatch.context() as patch:
        patch.setattr(model.decoder.blocks[-1], "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("stop")))
        with pytest.raises(RuntimeError, match="stop"):
            model(tokens(1, 3, seed=7), state=state)
    assert state.lengths == [5]
    assert_near(model(ids[:, 5:], state=state).logits, whole[:, 5:])


@torch.no_grad()
def test_a_row_of_padding_is_untouched_bit_for_bit(model: Model) -> None:
    state = model.new_state(2)
    model(tokens(2, 5), state=state)
    before = [t.clone() for part in state.parts.values() for t in vars(part).get("tensors", ())]
    model(tokens(2, 3), segments=torch.tensor([[0, 0, 0], [1, 1, 1]]), state=state)
    after = [t for part in state.parts.values() for t in vars(part).get("tensors", ())]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(before, after, strict=True))
    assert not all(torch.equal(a[1], b[1]) for a, b in zip(before, after, strict=True))


def test_a_recurrent_state_cannot_be_cropped() -> None:
    model = MODELS["Mamba-0"]
    state = model.new_state(1)
    model(tokens(1, 4), state=state)
    state.crop(4)
    with pytest.raises(UserError, match=r"cannot crop the state of decoder.blocks.0.mixer: a recurrent state"):
        state.crop(3)
    assert state.lengths == [4]


@torch.no_grad()
@pytest.mark.parametrize("index", range(len(MIXERS)))
def test_state_bytes_are_fixed(index: int) -> None:
    model = model_of(MIXERS[index])
    short, long = model.new_state(3, max_len=4), model.new_state(3, max_len=4096)
    op = MIXERS[index]
    if isinstance(op, Mamba):
        inner = op.expand * WIDTH
        numbers = inner * (op.d_state + op.d_conv - 1)
    else:
        numbers = op.inner * op.d_state + sum(op.widths) * (op.d_conv - 1)
    assert short.n_bytes == long.n_bytes == 3 * 4 * numbers
    for _ in range(3):
        model(tokens(3, 9), state=long)
    assert (long.n_bytes, long.index_bytes) == (short.n_bytes, 0)


@torch.no_grad()
@pytest.mark.parametrize("index", [0, 3])
def test_fp32_inside_a_bf16_model(index: int) -> None:
    model = model_of(MIXERS[index], MIXERS[index], dtype="bfloat16")
    state = model.new_state(1)
    part = state.parts["decoder.blocks.0.mixer"]
    assert [t.dtype for t in vars(part)["tensors"]] == [torch.bfloat16, torch.float32]
    ids = tokens(1, 40)
    with phylon.record(model, "*.mixer.dt") as taps:
        logits = torch.cat([model(chunk, state=state).logits for chunk in ids.split(1, 1)], 1)
    assert logits.dtype == torch.bfloat16
    assert {t.dtype for t in taps.values()} == {torch.float32}
    whole = model(ids).logits.float()
    assert (logits.float() - whole).abs().max() < 0.1 * whole.abs().max()


def test_autocast_keeps_the_scan_in_fp32() -> None:
    model = model_of(MIXERS[0])
    with torch.autocast("cpu", dtype=torch.bfloat16), phylon.record(model, "*.mixer.dt") as taps:
        model(tokens(1, 9), targets=tokens(1, 9)).losses["lm"].mean.backward()
    assert {t.dtype for t in taps.values()} == {torch.float32}
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())


def test_initialisation_is_the_papers() -> None:
    mixer = model_of(Mamba(dt_rank=2, d_state=4, d_conv=4)).decoder.blocks[0].mixer
    assert torch.equal(mixer.A_log, torch.arange(1.0, 5.0).log().expand(48, 4))
    assert torch.equal(mixer.D, torch.ones(48))
    sizes = F.softplus(mixer.dt_bias)
    assert sizes.min() >= 0.99e-3
    assert sizes.max() <= 1.01e-1
    assert sizes.log().std() > 1  # log-uniform over two decades: 1.33
    assert mixer.dt_proj.weight.abs().max() <= 2**-0.5
    assert mixer.conv.weight.abs().max() <= 0.5
    mixer = model_of(Mamba2(n_heads=40, head_dim=2, d_state=4)).decoder.blocks[0].mixer
    assert 1 <= mixer.A_log.exp().min() < 6 < 11 < mixer.A_log.exp().max() <= 16
    assert torch.equal(mixer.norm.weight, torch.ones(80))


def test_names_are_the_canonical_ones() -> None:
    model = model_of(Mamba(dt_rank=2, inner_norm=RMSNorm(), bias=True))
    names = {n.removeprefix("decoder.blocks.0.") for n, _ in model.named_parameters() if ".blocks.0." in n}
    assert names == {
        "mixer_norm.weight",
        *(f"mixer.{name}" for name in ("A_log", "D", "dt_bias", "conv.weight", "conv.bias")),
        *(f"mixer.{name}.weight" for name in ("in_proj", "gate_proj", "x_proj", "dt_proj", "out_proj")),
        *(f"mixer.{name}.bias" for name in ("in_proj", "gate_proj", "out_proj")),
        *(f"mixer.{name}.weight" for name in ("dt_norm", "b_norm", "c_norm")),
    }


@torch.no_grad()
@pytest.mark.parametrize("index", range(len(MIXERS)))
@pytest.mark.parametrize("length", [48, 128])
def test_flops_are_those_of_the_matrix_products(index: int, length: int) -> None:
    op = MIXERS[index]
    model = model_of(op)
    with FlopCounterMode(display=False) as counter, native.without():
        model(tokens(1, length), logits="none")
    flops = entry_of(op).flops
    assert flops is not None
    assert counter.get_total_flops() == length * flops(op, WIDTH, length)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Mamba(dt_rank=0), "dt_rank must be at least 1, got 0"),
        (lambda: Mamba(dt_rank=1, d_conv=0), "d_conv must be at least 1"),
        (lambda: Mamba(dt_rank=1, activation="sillu"), "did you mean 'silu'"),
        (lambda: Mamba(dt_rank=1, dt_min=0.2), "0 < dt_min <= dt_max"),
        (lambda: Mamba2(n_heads=3, n_groups=2), "n_heads 3 must be a multiple of n_groups 2"),
        (lambda: Mamba2(n_heads=3, dt_low=2.0, dt_high=1.0), "0 <= dt_low <= dt_high"),
        (lambda: Mamba2(n_heads=3, dt_low=float("nan")), "0 <= dt_low <= dt_high"),
        (lambda: Mamba2(n_heads=3, eps=0.0), "eps must be above 0"),
        (lambda: phylon.families.mamba2.mamba2_spec(d_model=20), "give n_heads"),
    ],
)
def test_impossible_specs_are_refused(make: Any, words: str) -> None:
    with pytest.raises(UserError) as error:
        make()
    assert words in str(error.value)
