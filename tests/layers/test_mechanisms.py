"""What every registered mechanism must be, its FLOPs as counted by PyTorch, and how weights are drawn."""

import inspect
import math
import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from helpers import WIDTH, assert_close, cases, gpt_like, nodes, of_training, small_models
from phylon.layers.context import Context
from phylon.layers.inits import DepthScaledInit, FanInInit, NormalInit
from phylon.model import build
from phylon.ops import native
from phylon.ops.attention import dispatch
from phylon.patterns import And, Document, Or, Records
from phylon.spec import FeedForward, Head, Init, Mixer, Slot, entries
from phylon.spec import build as build_part

ENTRIES = {entry.kind: entry for entry in entries()}
PAPER = re.compile(r"\(?arXiv:\d{4}\.\d{4,5}|(19|20)\d\d\)|GPT-2 report|LeCun et al")
NO_PAPER = {"and": And, "or": Or, "document": Document}
"""Composition and packing come from this library's own design."""
BOOLEANS = {
    ("attention", "qkv_bias"),
    ("attention", "out_bias"),
    ("classify", "bias"),
    ("cross_attention", "qkv_bias"),
    ("cross_attention", "out_bias"),
    ("mamba", "bias"),
    ("mamba", "conv_bias"),
    ("mamba2", "bias"),
    ("mamba2", "conv_bias"),
    ("glu", "bias"),
    ("layer_norm", "bias"),
    ("lm_head", "bias"),
    ("mamba", "bias"),
    ("mamba", "conv_bias"),
    ("mamba2", "bias"),
    ("mamba2", "conv_bias"),
    ("mlp", "bias"),
    ("mla", "bias"),
    ("softmax_router", "bias"),
    ("wordpiece", "lowercase"),
    ("yarn_scaling", "round_ramp"),
}
"""Presence of a parameter, or a documented convention; nothing that selects a code path."""


@pytest.mark.parametrize("kind", ENTRIES)
def test_what_a_mechanism_is(kind: str) -> None:
    entry = ENTRIES[kind]
    config = entry.spec.__struct_config__
    assert config.frozen
    # A list of texts reads best as a list: ``Texts([...])``.
    assert kind == "texts" or all(p.kind is p.KEYWORD_ONLY for p in inspect.signature(entry.spec).parameters.values())
    assert config.forbid_unknown_fields
    assert config.tag == kind
    text = entry.spec.__doc__ or ""
    assert text.strip()
    assert kind in NO_PAPER or of_training(entry.spec) or PAPER.search(text), "the docstring cites its paper"
    assert entry.paper.strip()
    made = list(entry.cases())
    assert made
    assert all(type(case) is entry.spec for case in made)
    assert issubclass(entry.spec, entry.slot)


@pytest.mark.parametrize("kind", ENTRIES)
def test_optional_fields_default_to_none_and_booleans_are_listed(kind: str) -> None:
    import msgspec

    for field in msgspec.structs.fields(ENTRIES[kind].spec):
        if type(None) in getattr(field.type, "__args__", ()):
            assert field.default is None, f"{field.name}: None is left out when written, so it must be the default"
        if field.type is bool:
            assert (kind, field.name) in BOOLEANS, f"{field.name}: a boolean must not select a code path"


def test_the_list_of_booleans_is_not_stale() -> None:
    assert all(name in ENTRIES[kind].spec.__struct_fields__ for kind, name in BOOLEANS if kind in ENTRIES)


def test_every_slot_has_a_model() -> None:
    """A mechanism in a slot that ``helpers.wrapped`` does not know would go untested.

    ``shared_ref`` is in the models of the shared modules; ``patch_embed`` reads images (tests/parity/test_vit.py).
    """
    elsewhere = ("shared_ref-", "patch_embed-")
    assert {name for name, _ in cases(Slot) if not name.startswith(elsewhere)} <= set(small_models())


TIMED = [(name, case) for slot in (Mixer, FeedForward, Head) for name, case in cases(slot)]


@pytest.mark.parametrize(("name", "case"), TIMED)
def test_flops_are_what_pytorch_counts(name: str, case: Slot) -> None:
    """Matrix products of one token's forward pass (one document's, where a head pools), on the reference.

    A multiply-add counts two; all keys are counted, masked or not.
    """
    formula = ENTRIES[name.rpartition("-")[0]].flops
    assert formula is not None
    for length in (5, 9):
        with torch.random.fork_rng():
            module = build_part(case, WIDTH)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter)
        records, memory = Records(torch.arange(length)[None]), torch.randn(2, length, WIDTH)
        x = torch.randn(2, length, WIDTH)
        context = Context(
            records=records, aligned=True, batch_size=2, memory=memory, memory_records=records, embedded=x
        )
        with FlopCounterMode(display=False) as counter, dispatch.force("reference"), native.without():
            module(x, context)
        outputs = 1 if isinstance(case, Head) and case.per_document else length
        # Cross-attention is charged one source token a target token, as many as there are here.
        assert counter.get_total_flops() == 2 * outputs * formula(case, WIDTH, length)


def test_roles_of_initialisation() -> None:
    spec = gpt_like()
    wide = spec.replace(
        decoder=spec.decoder.replace(d_model=256),  # type: ignore[union-attr]
        init=DepthScaledInit(std=0.1),
    )
    model = build(wide, device="cpu")
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert bool((parameter == 1).all()), name
        else:
            out = name.endswith(("o_proj.weight", "down_proj.weight"))
            expected = 0.1 / math.sqrt(4) if out else 0.1  # 2 blocks x 2 branches
            assert float(parameter.detach().std()) == pytest.approx(expected, rel=0.1), name
    fan = dict(build(wide.replace(init=FanInInit(gain=2.0)), device="cpu").named_parameters())
    assert float(fan["decoder.embed.tokens.weight"].std()) == pytest.approx(1.0, rel=0.1), "tied: drawn once, as embed"
    assert float(fan["decoder.blocks.0.ffn.down_proj.weight"].std()) == pytest.approx(2 / math.sqrt(64), rel=0.1)


@pytest.mark.parametrize("name", [n for n, _ in cases(Init)])
def test_a_seed_means_the_same(name: str) -> None:
    spec = gpt_like().replace(init=dict(cases(Init))[name])
    first, again, other = (dict(build(spec, seed=s, device="cpu").named_parameters()) for s in (3, 3, 4))
    for key, value in first.items():
        assert torch.equal(value, again[key])
        assert value.ndim == 1 or not torch.equal(value, other[key])
    low = dict(build(spec, seed=3, device="cpu", dtype="bfloat16").named_parameters())
    assert_close(low["decoder.embed.tokens.weight"].float(), first["decoder.embed.tokens.weight"], 0.01)


def test_a_tied_head_with_a_bias_does_not_draw_again() -> None:
    from phylon.layers.heads.lm import LMHead

    spec = gpt_like().replace(init=FanInInit(gain=5.0))
    with_bias = spec.replace(heads={"lm": LMHead(vocab_size=11, bias=True)})
    weights = [build(s, device="cpu").get_parameter("decoder.embed.tokens.weight") for s in (spec, with_bias)]
    assert torch.equal(*weights)


@pytest.mark.parametrize("make", [lambda: NormalInit(std=0.0), lambda: FanInInit(gain=-1.0)])
def test_nonsense_is_refused(make: object) -> None:
    from phylon.spec import UserError

    with pytest.raises(UserError, match="above 0"):
        make()  # type: ignore[operator]


def test_nodes_helper_sees_nested_mechanisms() -> None:
    kinds = {type(node).__name__ for node in nodes(gpt_like())}
    assert {"ModelSpec", "Stack", "Attention", "LayerNorm", "LearnedPositions", "LMHead", "Tie"} <= kinds
