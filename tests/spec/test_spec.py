"""Specs as text and back, near misses, paths in errors, overrides; every user's mistake is one line."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import ATTENTION, FFN, arrangements, cases, gpt_like, llama_like, mechanisms, small_models
from phylon.layers.ffn.mlp import GLU, MLP
from phylon.layers.mixers.attention import Attention
from phylon.layers.norms import LayerNorm, RMSNorm
from phylon.layers.positions.rotary import Rotary
from phylon.model import Block, ModelSpec, Stack, pre_norm
from phylon.patterns import Causal, Window
from phylon.spec import (
    Mechanism,
    Norm,
    Slot,
    UserError,
    from_data,
    from_json,
    from_toml,
    override,
    parse_assignment,
    register,
    to_data,
    to_json,
    to_toml,
)
from phylon.spec.base import snake_case

SPECS = small_models() | {"gpt": gpt_like(), "llama": llama_like()}


@pytest.mark.parametrize("name", sorted(SPECS))
def test_round_trip(name: str) -> None:
    spec = SPECS[name]
    assert from_json(ModelSpec, to_json(spec)) == spec
    assert from_toml(ModelSpec, to_toml(spec)) == spec
    assert from_data(ModelSpec, to_data(spec)) == spec
    assert json.loads(to_json(spec))["schema"] == 1


def test_a_long_stack_stays_short() -> None:
    """Equal neighbours are written once; other orders come back as they were."""
    block = lambda pattern: Block(sublayers=(pre_norm(ATTENTION.replace(pattern=pattern), RMSNorm()),))
    order = [Causal()] * 30 + [Window(size=3), Causal(), Causal()]
    base = llama_like()
    assert base.decoder is not None
    spec = base.replace(decoder=base.decoder.replace(blocks=tuple(map(block, order))))
    assert from_toml(ModelSpec, to_toml(spec)) == spec
    assert len(to_toml(spec)) < 4000
    assert [b.get("repeat", 1) for b in to_data(spec)["decoder"]["blocks"]] == [30, 1, 2]


@given(
    heads=st.integers(1, 4),
    group=st.integers(1, 3),
    theta=st.floats(1.5, 1e7),
    softcap=st.none() | st.floats(0.1, 100),
    rotary=st.booleans(),
    size=st.none() | st.integers(1, 99),
    dropout=st.floats(0, 0.9),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_attention_round_trips(
    heads: int, group: int, theta: float, softcap: float | None, rotary: bool, size: int | None, dropout: float
) -> None:
    spec = Attention(
        n_heads=heads * group,
        n_kv_heads=heads,
        head_dim=8,
        pattern=Causal() if size is None else Window(size=size),
        rotary=Rotary(theta=theta) if rotary else None,
        softcap=softcap,
        dropout=dropout,
    )
    assert from_json(Attention, to_json(spec, name="op"), name="op") == spec
    assert from_toml(Attention, to_toml(spec, name="op"), name="op") == spec


def changed(path: str, value: object) -> str:
    """The GPT-like spec as JSON with one value set, ``value`` ``...`` deleting it."""
    data = json.loads(to_json(gpt_like()))
    node, parts = data, path.split(".")
    for part in parts[:-1]:
        node = node[int(part)] if part.isdigit() else node[part]
    if value is ...:
        del node[parts[-1]]
    else:
        node[parts[-1]] = value
    return json.dumps(data)


OP = "model.decoder.blocks.0.of.sublayers.0.branches.0.op"


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("schema", 2, ["schema is 2", "schema = 1"]),
        ("schema", ..., ["'schema = 1' is missing"]),
        ("extra", 1, ["expected the keys 'schema' and 'model'", "'extra'"]),
        ("model.decodr", {}, ["unknown field 'decodr'", "did you mean 'decoder'?"]),
        ("model.decoder.d_modle", 3, ["d_modle", "decoder"]),
        ("model.decoder.d_model", "wide", ["Expected `int`, got `str`", "decoder.d_model"]),
        ("model.decoder.d_model", 0, ["d_model must be at least 1", "decoder"]),
        (f"{OP}.n_heads", 4.5, ["Expected `int`, got `float`", "decoder.blocks", "op.n_heads"]),
        (f"{OP}.n_haeds", 4, ["unknown field 'n_haeds'", "did you mean 'n_heads'?", "op"]),
        (f"{OP}.n_kv_heads", 3, ["n_heads 4 must be a multiple of n_kv_heads 3"]),
        (f"{OP}.head_dim", ..., ["missing required field `head_dim`"]),
        (f"{OP}.kind", "atention", ["unknown Op 'atention'", "did you mean 'attention'?"]),
        (f"{OP}.kind", "causal", ["unknown Op 'causal'"]),
        (f"{OP}.kind", ..., ["Op needs a table with a 'kind'"]),
        (f"{OP}.pattern", 3, ["Pattern needs a table with a 'kind'", "op.pattern"]),
        (f"{OP}.pattern", {"kind": "window", "size": 0}, ["window size must be at least 1"]),
        (f"{OP}.pattern", {"kind": "window"}, ["missing required field `size`", "op.pattern"]),
        ("model.decoder.blocks.0.repeat", 0, ["'repeat' must be a whole number from 1 to 10000, got 0"]),
        ("model.heads.lm.vocab_size", None, ["Expected `int`, got `null`", "heads"]),
        ("model.decoder", ..., ["needs an encoder or a decoder"]),
    ],
)
def test_a_mistake_is_one_line_with_its_path(path: str, value: object, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        from_json(ModelSpec, changed(path, value))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


DEEP = '{"schema":1,"model":' + '{"decoder":' * 5000 + "1" + "}" * 5001


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"schema": 1}', "\x00", DEEP, "[" * 100_000, "a = " + "[" * 5000])
def test_what_is_no_document(text: str) -> None:
    with pytest.raises(UserError):
        from_json(ModelSpec, text)
    with pytest.raises(UserError):
        from_toml(ModelSpec, text)


def test_a_bare_kind_is_enough() -> None:
    assert from_data(Norm, "rms_norm") == RMSNorm()
    assert from_data(Attention, {"kind": "attention", "n_heads": 2, "n_kv_heads": 2, "head_dim": 4}).pattern == Causal()
    with pytest.raises(UserError, match=r"unknown Norm 'rmsnorm' \(did you mean 'rms_norm'\?\)"):
        from_data(Norm, "rmsnorm")


def test_overrides() -> None:
    spec = llama_like()
    new = override(
        spec,
        {
            "decoder.blocks.*.attn.n_heads": 2,
            "decoder.blocks.-1.attn.pattern": {"kind": "window", "size": 7},
            "decoder.blocks.0.sublayers.1.branches.0.op": MLP(d_ff=5),
            "heads.*.softcap": 2,
            "decoder.norm_final": None,
            "init": "depth_scaled_init",
        },
    )
    assert new.decoder is not None
    first, last = new.decoder.blocks
    assert first.op("attn") == ATTENTION.replace(n_heads=2)
    assert last.op("attn") == ATTENTION.replace(n_heads=2, pattern=Window(size=7))
    assert (first.op("ffn"), last.op("ffn")) == (MLP(d_ff=5), FFN)
    assert new.heads["lm"].softcap == 2.0  # type: ignore[attr-defined]
    assert new.decoder.norm_final is None
    assert type(new.init).__name__ == "DepthScaledInit"
    assert override(spec, {}) == spec
    assert spec == llama_like(), "the original is untouched"


def test_a_wildcard_takes_the_places_that_exist() -> None:
    """Alternating windows: only the windowed blocks have a size."""
    spec = override(arrangements()["alternating"], {"decoder.blocks.*.attn.pattern.size": 9})
    assert spec.decoder is not None
    patterns = [block.op("attn").pattern for block in spec.decoder.blocks]  # type: ignore[attr-defined]
    assert sorted(map(str, patterns)) == ["Causal()", "Window(size=9)"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("decoder.blocks.*.atn.n_heads", 2, r"unknown field 'atn' of Block \(did you mean 'attn'\?\)"),
        ("decoder.blocks.*.attn.pattern.size", 2, "unknown field 'size' of Causal"),
        ("decoder.blocks.2.attn.n_heads", 2, "'2' is not an index from 0 to 1"),
        ("decoder.blocks.--1.attn.n_heads", 2, "'--1' is not an index"),
        ("decoder.blocks.*.attn.n_heads", "many", "Expected `int`, got `str`"),
        ("decoder.blocks.*.attn.n_heads", 3, "n_heads 3 must be a multiple of n_kv_heads 2"),
        ("decoder.blocks.0", {"sublayers": 3}, "Expected `array`, got `int`"),
        ("decoder.blocks", [], "a stack needs at least one block"),
        ("decoder.d_model.x", 3, "nothing below 'x' can be set"),
        ("encoder.d_model", 3, "nothing below 'd_model' can be set"),
        ("heads.ml.softcap", 3, r"no entry 'ml' \(did you mean 'lm'\?\)"),
        ("ties.*.name", "x", "there are no elements"),
        ("decoder.norm_final", "causal", "unknown Norm 'causal'"),
    ],
)
def test_an_override_that_does_not_fit(path: str, value: object, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        override(llama_like(), {path: value})
    assert f"'{path}'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_whole_block_by_data() -> None:
    spec = override(llama_like(), {"decoder.blocks.0": to_data(gpt_like())["decoder"]["blocks"][0]["of"]})
    assert spec.decoder is not None
    assert spec.decoder.blocks[0] == gpt_like().decoder.blocks[0]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b=3", ("a.b", 3)),
        ("optim.lr = 3e-4", ("optim.lr", 3e-4)),
        ("x=true", ("x", True)),
        ("x=none", ("x", None)),
        ("x=cosine", ("x", "cosine")),
        ('x="3"', ("x", "3")),
        ("x=[1, 2]", ("x", [1, 2])),
        ('x={kind = "window", size = 3}', ("x", {"kind": "window", "size": 3})),
        ("x=a=b", ("x", "a=b")),
        ("x=", ("x", "")),
    ],
)
def test_assignments(text: str, expected: object) -> None:
    assert parse_assignment(text) == expected


@pytest.mark.parametrize("text", ["x", "=3", " = 3"])
def test_what_is_no_assignment(text: str) -> None:
    with pytest.raises(UserError, match="is not an assignment; write path=value"):
        parse_assignment(text)


def test_specs_are_frozen_values() -> None:
    with pytest.raises(AttributeError):
        ATTENTION.n_heads = 3  # type: ignore[misc]
    assert ATTENTION.replace(n_heads=8) != ATTENTION
    assert hash(RMSNorm()) == hash(RMSNorm())
    with pytest.raises(UserError, match="multiple"):
        ATTENTION.replace(n_heads=3)
    with pytest.raises(TypeError):
        Rotary(100.0)  # type: ignore[misc]


def test_names() -> None:
    given = ["RMSNorm", "Llama3Scaling", "MLP", "TokenEmbed", "DynamicNTKScaling", "GLU"]
    expected = ["rms_norm", "llama3_scaling", "mlp", "token_embed", "dynamic_ntk_scaling", "glu"]
    assert [snake_case(name) for name in given] == expected
    kinds = [name.rpartition("-")[0] for name, _ in cases(Slot)]
    assert set(expected) <= set(kinds)


def test_a_kind_is_registered_once() -> None:
    class GLU(Mechanism, Norm, frozen=True, kw_only=True):
        """Another of the same name."""

    with pytest.raises(UserError, match=r"'glu' is already registered by phylon.layers.ffn.mlp; rename the class"):
        register(GLU, paper="none", cases=lambda: [GLU()])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GLU(d_ff=0), "d_ff must be at least 1"),
        (lambda: GLU(d_ff=3, activation="swish"), "unknown activation 'swish'"),
        (lambda: MLP(d_ff=3, activation="gelu_new"), r"did you mean 'gelu"),
        (lambda: MLP(d_ff=3, dropout=1.0), "dropout must be at least 0 and below 1"),
        (lambda: LayerNorm(eps=0.0), "eps must be above 0"),
        (lambda: ATTENTION.replace(softcap=0.0), "softcap must be above 0"),
        (lambda: ATTENTION.replace(dropout=-0.1), "dropout must be"),
        (lambda: Block(sublayers=()).replace() and Stack(d_model=1, embed=None, blocks=()), "at least one block"),
    ],
)
def test_nonsense_is_refused(make: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()  # type: ignore[operator]


def test_every_mechanism_of_a_spec_is_found() -> None:
    assert {m.__struct_config__.tag for m in mechanisms(llama_like())} >= {"attention", "rotary", "causal", "glu"}


def test_a_kind_below_a_wildcard_replaces_every_mechanism() -> None:
    path = "decoder.blocks.*.sublayers.*.branches.*.norm_in"
    new = override(llama_like(), {f"{path}.eps": 0.5, f"{path}.kind": "layer_norm"})
    assert new.decoder is not None
    branches = [b for block in new.decoder.blocks for sub in block.sublayers for b in sub.branches]  # type: ignore[attr-defined]
    assert branches
    assert {branch.norm_in for branch in branches} == {LayerNorm(eps=0.5)}
    with pytest.raises(UserError, match="unknown Norm 'causal'"):
        override(llama_like(), {f"{path}.kind": "causal"})
