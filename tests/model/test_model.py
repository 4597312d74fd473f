"""Models: building, ties, names, recording, what the call accepts and refuses, and life as an ordinary module."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from helpers import (
    ATTENTION,
    EMBED,
    WIDTH,
    arrangements,
    assert_close,
    decoder,
    draw,
    drawn,
    gpt_like,
    llama_like,
    pre,
    small_models,
)
from law import documents, values
from phylon.layers.norms import RMSNorm
from phylon.model import Block, ModelSpec, Stack, Tie, build, build_meta, materialise, pre_norm, record
from phylon.spec import UserError, override

GOLDEN = Path(__file__).parents[1] / "golden"
TOKENS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
TIED = ("heads.lm.proj.weight", "decoder.embed.tokens.weight")


@pytest.mark.parametrize("name", sorted(small_models()))
def test_meta_and_real_agree(name: str) -> None:
    spec = small_models()[name]
    meta, real = build_meta(spec), build(spec, device="cpu")
    assert all(p.is_meta for p in meta.parameters())
    shapes = [[(n, tuple(p.shape)) for n, p in m.named_parameters()] for m in (meta, real)]
    assert shapes[0] == shapes[1]
    assert all(bool(torch.isfinite(p).all()) for p in real.parameters())


def test_counts_by_hand_and_without_memory() -> None:
    v, d, f, layers = 11, WIDTH, 64, 2
    attention, ffn, norm = 4 * d * d + 4 * d, 2 * d * f + f + d, 2 * d
    expected = (v + 64) * d + layers * (attention + ffn + 2 * norm) + norm
    assert sum(p.numel() for p in build_meta(gpt_like()).parameters()) == expected
    huge = gpt_like().decoder.replace(d_model=2**20)  # type: ignore[union-attr]
    meta = build_meta(gpt_like().replace(decoder=huge))
    assert sum(p.numel() for p in meta.parameters()) > 2**26
    assert {p.device.type for p in meta.parameters()} == {"meta"}


def test_ties() -> None:
    model = build(gpt_like(), device="cpu")
    one, two = (model.get_parameter(name) for name in TIED)
    assert one is two
    assert TIED[0] not in dict(model.named_parameters()), "counted once"
    assert set(TIED) <= set(model.state_dict()), "stored under both names"
    copied = copy.deepcopy(model)
    assert copied.get_parameter(TIED[0]) is copied.get_parameter(TIED[1])
    assert copied.get_parameter(TIED[0]) is not one
    before = model(TOKENS).logits
    with torch.no_grad():
        one[3] += 1
    assert float((model(TOKENS).logits - before)[..., 3].detach().abs().min()) > 0, (
        "the head sees the embedding's change"
    )


@pytest.mark.parametrize(
    ("tie", "message"),
    [
        (Tie(name="heads.lm.proj.wieght", source=TIED[1]), "'heads.lm.proj.wieght', which is no parameter"),
        (Tie(name="heads.ml.proj.weight", source=TIED[1]), "which is no parameter"),
        (Tie(name=TIED[0], source="decoder.embed.positions.weight"), "the shapes differ"),
    ],
)
def test_wrong_ties(tie: Tie, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_meta(gpt_like().replace(ties=(tie,)))


def test_materialise_keeps_ties_and_dtype() -> None:
    model = build_meta(gpt_like())
    materialise(model, torch.bfloat16, torch.device("cpu"))
    assert model.get_parameter(TIED[0]) is model.get_parameter(TIED[1])
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(("name", "spec"), [("gpt", gpt_like()), ("llama", llama_like()), *arrangements().items()])
def test_canonical_names(name: str, spec: ModelSpec, request: pytest.FixtureRequest) -> None:
    model = build_meta(spec)
    lines = [f"{key} {list(value.shape)}" for key, value in model.state_dict().items()]
    path = GOLDEN / f"names-{name}.txt"
    if request.config.getoption("--update-golden"):
        path.write_text("\n".join(lines) + "\n")
    assert path.read_text().splitlines() == lines, f"{path.name} changes only on purpose"


@pytest.mark.parametrize(("name", "spec"), [("gpt", gpt_like()), ("llama", llama_like())])
def test_golden_logits(name: str, spec: ModelSpec, request: pytest.FixtureRequest) -> None:
    """A seed means the same weights and the same logits, release after release."""
    logits = build(spec, seed=0, device="cpu").eval()(TOKENS).logits[0, -1]
    path = GOLDEN / f"logits-{name}.txt"
    if request.config.getoption("--update-golden"):
        path.write_text("".join(f"{x:.9g}\n" for x in logits.tolist()))
    assert_close(logits, torch.tensor([float(x) for x in path.read_text().split()]))


def test_the_algebra_by_hand() -> None:
    """Each arrangement equals its formula, written with the modules themselves."""
    from phylon.layers.context import Context
    from phylon.patterns import Records

    x = torch.randn(1, 5, WIDTH)
    ctx = Context(records=Records(torch.arange(5)[None]), aligned=True)
    formulas = {
        "sandwich": lambda m, y: [
            y := y + m.attn_norm_branch(m.attn(m.attn_norm(y), ctx)),
            y + m.ffn_norm_branch(m.ffn(m.ffn_norm(y), ctx)),
        ],
        "branch-only": lambda m, y: [
            y := y + m.attn_norm_branch(m.attn(y, ctx)),
            y + m.ffn_norm_branch(m.ffn(y, ctx)),
        ],
        "parallel": lambda m, y: [n := m.attn_norm_shared(y), y + m.attn(n, ctx) + m.ffn(n, ctx)],
        "parallel-own": lambda m, y: [y + m.attn(m.attn_norm(y), ctx) + 0.5 * m.ffn(m.ffn_norm(y), ctx)],
        "post": lambda m, y: [y := m.attn_norm_out(y + m.attn(y, ctx)), m.ffn_norm_out(y + m.ffn(y, ctx))],
    }
    for name, formula in formulas.items():
        block = draw(arrangements()[name]).decoder.blocks[0]  # type: ignore[union-attr]
        assert_close(block(x, ctx), formula(block, x)[-1], what=name)


def test_taps() -> None:
    model = drawn("attention-1")
    plain = model(TOKENS)
    with record(model, "decoder.blocks.*.attn.*", "heads.*") as taps:
        out = model(TOKENS)
    assert_close(out.logits, plain.logits)
    assert list(taps)[:7] == [f"decoder.blocks.0.attn.{n}" for n in ("q", "k", "v", "scores", "weights", "z", "out")]
    assert taps["decoder.blocks.1.attn.q"].shape == (2, 5, 3, 10)
    assert taps["decoder.blocks.1.attn.k"].shape == (2, 5, 1, 10)
    weights = taps["decoder.blocks.0.attn.weights"]
    assert weights.shape == (2, 3, 5, 5)
    assert_close(weights.sum(-1), torch.ones(2, 3, 5))
    assert not weights.triu(1).any(), "causal"
    assert torch.equal(taps["heads.lm.logits"], out.logits)
    assert not any(value.requires_grad for value in taps.values())
    with record(model) as everything:
        model(TOKENS)
    expected = {"decoder.embed.out", "decoder.out", "decoder.blocks.0.resid_pre", "decoder.blocks.0.resid_mid"}
    assert expected | {"decoder.blocks.1.resid_post", "decoder.blocks.1.ffn.hidden"} <= set(everything)
    with pytest.raises(RuntimeError), record(model, "decoder.out"):
        raise RuntimeError
    assert model.taps is None, "recording ends with the block"
    assert "decoder.blocks.0.attn.scores" not in _recorded(model, "*.z"), "only what was asked for"


def _recorded(model: nn.Module, glob: str) -> dict:
    with record(model, glob) as taps:  # type: ignore[arg-type]
        model(TOKENS)
    return taps


def test_which_logits() -> None:
    model = drawn("causal-0")
    full = model(TOKENS).logits
    assert model(TOKENS, logits="none").logits is None
    assert_close(model(TOKENS, logits="last").logits, full[:, -1:])
    segments = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    padded = model(TOKENS, segments=segments)
    last = model(TOKENS, segments=segments, logits="last").logits
    assert_close(last, torch.stack([padded.logits[0, 4:], padded.logits[1, 2:3]]))


def test_losses_inside_forward() -> None:
    model = draw(gpt_like())
    targets = torch.tensor([[2, 3, 4, 5, -100], [7, -100, 9, 10, 0]])
    out = model(TOKENS, targets=targets, logits="none")
    expected = F.cross_entropy(model(TOKENS).logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert_close(out.losses["lm"].sum, expected)
    assert (int(out.losses["lm"].count), out.logits) == (8, None)
    named = model(TOKENS, targets={"lm": targets}).losses["lm"]
    assert torch.equal(named.sum, out.losses["lm"].sum)
    table = model.get_parameter(TIED[1])
    mine, theirs = (torch.autograd.grad(loss, table)[0] for loss in (out.losses["lm"].sum, expected))
    assert_close(mine, theirs)


IDS = torch.ones(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(), "give either tokens or embeds"),
        (lambda m: m(IDS, embeds=torch.zeros(2, 3, WIDTH)), "give either tokens or embeds"),
        (lambda m: m(IDS[0]), r"tokens must be \(B, T\) int64, got \(3,\)"),
        (lambda m: m(IDS.float()), "tokens must be .* got .* torch.float32"),
        (lambda m: m(IDS[:, :0]), "the input is empty"),
        (lambda m: m(IDS[:0]), "the input is empty"),
        (lambda m: m(IDS * 11), "token id 11 is out of range: the vocabulary has 11 entries"),
        (lambda m: m(-IDS), "token id -1 is out of range"),
        (lambda m: m(embeds=torch.zeros(2, 3, 5)), r"embeds must be \(B, T, 32\), got \(2, 3, 5\)"),
        (lambda m: m(IDS, segments=IDS[:, :2]), r"segments are \(2, 2\), tokens \(2, 3\); they must agree"),
        (lambda m: m(IDS, segments=IDS.bool()), "segments must be int64, got torch.bool"),
        (lambda m: m(IDS, positions=IDS.float()), "positions must be int64"),
        (lambda m: m(IDS, types=IDS), "no segment types; leave out 'types'"),
        (lambda m: m(IDS, source=IDS), "this model takes no source"),
        (lambda m: m(IDS, images=torch.zeros(2, 3, 4, 4)), "this model takes no images"),
        (lambda m: m(IDS, logits="some"), "logits must be 'all', 'last' or 'none', got 'some'"),
        (lambda m: m(IDS, state=m.new_state(3)), "the state has 3 rows, the input 2"),
        (lambda m: m(IDS, targets=IDS[:, :2]), r"targets are \(2, 2\), tokens \(2, 3\)"),
        (lambda m: m(IDS, targets=IDS.float()), "targets must be int64, got torch.float32"),
        (lambda m: m(IDS, targets=IDS * 11), "target id 11 is out of range"),
        (lambda m: m(IDS, targets=-IDS), "target id -1 is out of range.* -100 is ignored"),
        (lambda m: m(IDS, targets={"ml": IDS}), "targets name the head 'ml'; this model has lm"),
    ],
)
def test_mistakes_are_one_line(call: object, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        call(drawn("causal-0"))  # type: ignore[operator]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["past_key_values", "attention_mask", "cache"])
def test_unknown_keywords_are_refused(name: str) -> None:
    """Case 2: a state under a wrong name is never swallowed."""
    model = drawn("causal-0")
    with pytest.raises(TypeError, match=name):
        model(IDS, **{name: model.new_state(2)})


def test_types() -> None:
    model = draw(arrangements()["post"])
    zeros = torch.zeros_like(TOKENS)
    assert_close(values(model, TOKENS, types=zeros), values(model, TOKENS))
    assert float((values(model, TOKENS, types=zeros + 1) - values(model, TOKENS)).abs().max()) > 0.1
    with pytest.raises(UserError, match="type 2 is out of range: the model has 2 entries"):
        model(TOKENS, types=zeros + 2)


def test_embeds_stand_for_tokens() -> None:
    for name in ("token_embed-0", "token_embed-1", "learned_positions-0"):
        model = drawn(name)
        vectors = model.decoder.embed.tokens(TOKENS)  # type: ignore[union-attr]
        assert_close(model(embeds=vectors).logits, model(TOKENS).logits)


def test_targets_without_a_head() -> None:
    headless = build(llama_like().replace(heads={}), device="cpu")
    assert headless(IDS).logits is None
    with pytest.raises(UserError, match="this model has none"):
        headless(IDS, targets=IDS)


def test_an_encoder_has_no_state() -> None:
    spec = llama_like()
    encoder = spec.replace(encoder=spec.decoder, decoder=None)
    model = build(encoder, device="cpu")
    assert model(IDS).hidden.shape == (2, 3, WIDTH)
    assert next(n for n, _ in model.named_parameters()) == "encoder.embed.tokens.weight"
    with pytest.raises(UserError, match="an encoder reads the whole text at once"):
        model.new_state(1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build(llama_like(), dtype="float31"), "unknown dtype 'float31'"),
        (lambda: build(llama_like(), device="gpu"), "unknown device 'gpu'"),
        (lambda: Stack(d_model=0, embed=EMBED, blocks=()), "d_model must be at least 1"),
        (lambda: ModelSpec(), "an encoder or a decoder"),
        (lambda: build_meta(override(llama_like(), {"heads.lm.vocab_size": 2**60})), "beyond what a tensor can have"),
        (lambda: build_meta(override(llama_like(), {"heads.lm.vocab_size": 2**70})), "beyond what a tensor can have"),
    ],
)
def test_wrong_builds(call: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()  # type: ignore[operator]


def test_repeated_ops_are_numbered() -> None:
    twice = Block(sublayers=(pre_norm(ATTENTION, RMSNorm()), pre_norm(ATTENTION, RMSNorm())))
    model = build_meta(decoder(twice))
    names = [name for name, _ in model.decoder.blocks[0].named_children()]  # type: ignore[union-attr]
    assert names == ["attn_norm", "attn", "attn2_norm", "attn2"]
    assert all(module.path == name for name, module in model.named_modules() if hasattr(module, "path"))


@pytest.mark.parametrize("name", sorted(small_models()))
def test_copies(name: str) -> None:
    """deepcopy and pickle (spawned workers) keep the values; the copy is its own."""
    model = drawn(name)
    expected = values(model, TOKENS)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(values(other, TOKENS), expected)
        with torch.no_grad():
            next(other.parameters()).zero_()
    assert torch.equal(values(model, TOKENS), expected)


def test_a_replica_without_registered_parameters() -> None:
    """What ``DataParallel`` makes: modules whose weights are plain tensors."""
    model = draw(pre())
    replica = copy.deepcopy(model)
    for module in replica.modules():
        for key, parameter in list(module._parameters.items()):
            del module._parameters[key]
            setattr(module, key, None if parameter is None else parameter.detach())
    assert not list(replica.parameters())
    assert torch.equal(values(replica, TOKENS), values(model, TOKENS))


def test_state_dict_round_trip() -> None:
    source, target = draw(gpt_like()), build(gpt_like(), seed=9, device="cpu").eval()
    assert not torch.equal(values(source, TOKENS), values(target, TOKENS))
    target.load_state_dict(source.state_dict())
    assert torch.equal(values(source, TOKENS), values(target, TOKENS))


def test_low_precision_is_as_good_as_hf_style() -> None:
    """A cast model's error to fp64 stays within a few bf16 units per block, for both kinds of model."""
    for spec in (gpt_like(), llama_like()):
        exact = values(draw(spec, dtype=torch.float64), TOKENS)
        low = values(draw(spec).to(torch.bfloat16), TOKENS)
        assert low.dtype == torch.bfloat16
        assert float((low.double() - exact).norm() / exact.norm()) < 0.05


def test_dropout_only_in_training_and_repeatable() -> None:
    dropping = pre(mixer=ATTENTION.replace(dropout=0.3))
    model = build(dropping, device="cpu")
    torch.manual_seed(0)
    first = model(TOKENS).logits
    second = model(TOKENS).logits
    torch.manual_seed(0)
    again = model(TOKENS).logits
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    model.eval()
    assert torch.equal(model(TOKENS).logits, model(TOKENS).logits)


def test_training_lowers_the_loss() -> None:
    model = build(gpt_like(), device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    targets = torch.cat([TOKENS[:, 1:], torch.full((2, 1), -100)], 1)
    losses = []
    for _ in range(20):
        loss = model(TOKENS, targets=targets, logits="none").losses["lm"].mean
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 * losses[0]
    assert all(p.grad is not None and bool(p.grad.any()) for n, p in model.named_parameters() if "k_proj.bias" not in n)


def test_under_autocast() -> None:
    """fp32 weights, bf16 products: QK-norm and the residual stream must not end in two dtypes."""
    for name in ("attention-4", "rms_norm-0", "layer_norm-0", "token_embed-1"):
        model = drawn(name)
        with torch.autocast("cpu", torch.bfloat16):
            low = values(model, TOKENS, targets=TOKENS)
        expected = values(model, TOKENS)
        assert float((low - expected).norm() / expected.norm()) < 0.1


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_compiled(name: str, backend: str) -> None:
    model = draw({"gpt": gpt_like(), "llama": llama_like()}[name])
    expected = values(model, TOKENS)
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        out = compiled(TOKENS)
        assert_close(torch.cat([out.hidden, out.logits], -1), expected)
        state = model.new_state(2)
        pieces = [compiled(piece, state=state).hidden for piece in TOKENS.split([3, 1, 1], 1)]
    assert_close(torch.cat(pieces, 1), expected[..., :WIDTH])


def test_longer_than_documents_helper() -> None:
    assert [len(doc) for doc in documents(drawn("causal-0"), (3, 1))] == [3, 1]
