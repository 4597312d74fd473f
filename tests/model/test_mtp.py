"""The head for a second token: against its equations, under the law, in training, in a state."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from helpers import VOCAB, assert_close, cases, draw, pre
from law import documents
from phylon.layers.context import Context
from phylon.layers.heads.lm import LMHead
from phylon.layers.mixers.attention import Attention
from phylon.layers.mixers.mla import MLA
from phylon.layers.norms import RMSNorm
from phylon.layers.positions.rotary import Rotary
from phylon.model import MTP, Block, Model, ModelSpec, Tie, pre_norm
from phylon.patterns import Full, Records, Window
from phylon.spec import Head, UserError, from_json, to_json

CASE: MTP = dict(cases(Head))["mtp-0"]  # type: ignore[assignment]
ROTARY = Attention(n_heads=4, n_kv_heads=2, head_dim=8, rotary=Rotary())


def spec(mixer: Attention | MLA = ROTARY) -> ModelSpec:
    block = CASE.block.replace(sublayers=(pre_norm(mixer, RMSNorm()), CASE.block.sublayers[1]))
    heads = {"lm": LMHead(vocab_size=VOCAB), "mtp": CASE.replace(block=block)}
    return pre(heads=heads, ties=(Tie(name="heads.mtp.lm.proj.weight", source="heads.lm.proj.weight"),))


MODELS = {
    "full": draw(spec()),
    "window": draw(spec(ROTARY.replace(pattern=Window(size=3)))),
    "latent": draw(spec(MLA(n_heads=2, kv_lora_rank=20, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=6))),
}


@torch.no_grad()
def ahead(model: Model, tokens: Tensor, **given: object) -> Tensor:
    return model(tokens, **given).heads["mtp"]


@torch.no_grad()
def test_equations() -> None:
    """Equations 21 to 23 written out: h_{j-1} and the embedding of token j, through the block, to the shared head."""
    model = MODELS["full"]
    tokens = torch.stack(documents(model, (9, 9)))
    head, out = model.heads["mtp"], model(tokens)
    embedded = model.decoder.embed.tokens(tokens)
    joined = torch.cat([head.embed_norm(embedded[:, 1:]), head.hidden_norm(out.hidden[:, :-1])], -1)
    x = head.proj(joined)
    positions = torch.arange(1, 9)[None].expand(2, -1)

    context = Context(records=Records(positions, torch.ones_like(positions)), aligned=False, batch_size=2)
    scores = model.heads["lm"].proj(head.norm_final(head.block(x, context)))
    assert_close(out.heads["mtp"][:, 1:], scores)
    assert not out.heads["mtp"][:, 0].any()
    assert torch.equal(out.logits, model(tokens, targets={"mtp": tokens}).logits)


Route = Callable[[Model, list[Tensor]], list[Tensor]]


def packed(model: Model, docs: list[Tensor]) -> list[Tensor]:
    ids = torch.cat([torch.full((len(d),), i + 1) for i, d in enumerate(docs)])[None]
    return list(ahead(model, torch.cat(docs)[None], segments=ids)[0].split([len(d) for d in docs]))


def gapped(model: Model, docs: list[Tensor]) -> list[Tensor]:
    """Padding before, between and after the tokens of a row."""
    width = 2 * max(map(len, docs)) + 1
    tokens, ids = torch.zeros(len(docs), width, dtype=torch.int64), torch.zeros(len(docs), width, dtype=torch.int64)
    for row, doc in enumerate(docs):
        tokens[row, 1 : 2 * len(doc) : 2], ids[row, 1 : 2 * len(doc) : 2] = doc, 1
    out = ahead(model, tokens, segments=ids)
    return [out[row][ids[row] == 1] for row in range(len(docs))]


def chunked(*sizes: int) -> Route:
    """Left-padded rows onto a state, in chunks."""

    def route(model: Model, docs: list[Tensor]) -> list[Tensor]:
        width = sum(sizes)
        tokens, ids = torch.zeros(len(docs), width, dtype=torch.int64), torch.zeros(len(docs), width, dtype=torch.int64)
        for row, doc in enumerate(docs):
            tokens[row, width - len(doc) :], ids[row, width - len(doc) :] = doc, 1
        state, parts = model.new_state(len(docs)), []
        for t, s in zip(tokens.split(sizes, 1), ids.split(sizes, 1), strict=True):
            parts.append(ahead(model, t, segments=s, state=state))
        return [row[-len(doc) :] for row, doc in zip(torch.cat(parts, 1), docs, strict=True)]

    return route


def packed_chunks(model: Model, docs: list[Tensor]) -> list[Tensor]:
    ids = torch.cat([torch.full((len(d),), i + 1) for i, d in enumerate(docs)])[None]
    state, parts = model.new_state(1), []
    for t, s in zip(torch.cat(docs)[None].split(3, 1), ids.split(3, 1), strict=True):
        parts.append(ahead(model, t, segments=s, state=state))
    return list(torch.cat(parts, 1)[0].split([len(d) for d in docs]))


ROUTES: dict[str, Route] = {
    "packed": packed,
    "gapped": gapped,
    "chunks": chunked(4, 3, 6),
    "steps": chunked(*(1,) * 13),
    "packed-chunks": packed_chunks,
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", MODELS)
def test_law(name: str, route: str) -> None:
    model = MODELS[name]
    docs = documents(model, (13, 5, 1, 9))
    for ours, doc in zip(ROUTES[route](model, docs), docs, strict=True):
        assert_close(ours, ahead(model, doc[None])[0], floor=1.0)
    changed = docs[0].clone()
    changed[4] = (changed[4] + 1) % VOCAB
    moved = (ahead(model, changed[None]) - ahead(model, docs[0][None]))[0].abs().amax(-1) > 1e-3
    assert not moved[:4].any()
    assert moved[4:7].all(), "control"


@pytest.mark.parametrize("name", MODELS)
def test_a_state_goes_along_whatever_is_asked(name: str) -> None:
    model = MODELS[name]
    tokens = torch.stack(documents(model, (9, 9)))
    whole = ahead(model, tokens)
    state = model.new_state(2)
    model(tokens[:, :4], state=state, logits="none")
    last = model(tokens[:, 4:6], state=state, logits="last").heads["mtp"]
    assert_close(last, whole[:, 5:6])
    state.reorder([1, 0])
    fork = state.fork(2)
    other = model.new_state(2)
    model(tokens[:, :6], state=other)
    state.insert([0, 1], other)
    assert_close(ahead(model, tokens[:, 6:], state=state), whole[:, 6:])
    assert_close(ahead(model, tokens[[1, 1, 0, 0], 6:], state=fork), whole[[1, 1, 0, 0], 6:])
    with pytest.raises(UserError, match=r"cannot crop the state of heads.mtp"):
        state.crop(2)


def test_a_failed_pass_leaves_the_state() -> None:
    model = MODELS["full"]
    tokens = torch.stack(documents(model, (9, 9)))
    state = model.new_state(2)
    ahead(model, tokens[:, :5], state=state)
    hook = model.heads["mtp"].lm.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("stop")))
    with pytest.raises(RuntimeError, match="stop"):
        ahead(model, tokens[:, 2:4], state=state)
    hook.remove()
    assert_close(ahead(model, tokens[:, 5:], state=state), ahead(model, tokens)[:, 5:])


def test_loss_is_the_main_head_s_targets_without_first_tokens() -> None:
    model = draw(spec()).train()
    tokens = torch.stack(documents(model, (9, 9)))
    targets = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], 1)
    out = model(tokens, targets={"lm": targets, "mtp": targets})
    assert [int(out.losses[name].count) for name in ("lm", "mtp")] == [16, 14]
    wanted = torch.nn.functional.cross_entropy(out.heads["mtp"][:, 1:-1].flatten(0, 1), targets[:, 1:-1].flatten())
    assert_close(out.losses["mtp"].mean, wanted)
    out.losses["mtp"].mean.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    assert model.heads["mtp"].lm.proj.weight is model.heads["lm"].proj.weight
    with pytest.raises(UserError, match="they must agree"):
        model(tokens, targets={"mtp": targets[:, 1:]})


def test_spec_and_state_size() -> None:
    made = spec()
    assert from_json(ModelSpec, to_json(made)) == made
    state = MODELS["full"].new_state(2, max_len=7)
    plain = draw(made.replace(heads={"lm": LMHead(vocab_size=VOCAB)}, ties=())).new_state(2, max_len=7)
    assert state.n_bytes - plain.n_bytes == 2 * (7 * 2 * 2 * 8 + 32) * 4


def test_a_block_that_looks_ahead_cannot_continue() -> None:
    model = draw(spec(ROTARY.replace(pattern=Full())))
    with pytest.raises(UserError, match=r"heads.mtp.block.attn cannot continue"):
        model.new_state(1)
    assert isinstance(CASE.block, Block)
