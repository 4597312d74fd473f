"""Values of a configuration that say something else than they seem to: true for 1, null, code of others."""

from collections.abc import Iterator
from typing import Any

import pytest

from phylon.families import families
from phylon.families.base import Config
from phylon.families.neutral import NEUTRAL
from phylon.model import ModelSpec
from phylon.spec.errors import UserError

FORMATS = {f.name: f for f in families() if f.hf is not None}


def said_by(name: str, case: int = 0) -> dict[str, Any]:
    found = FORMATS[name]
    assert found.hf is not None
    return found.hf.write(found.cases()[case])


def read(name: str, said: dict[str, Any]) -> ModelSpec:
    found = FORMATS[name]
    assert found.hf is not None
    config = Config(said, "there")
    try:
        return found.hf.read(config)
    except UserError as error:
        raise config.blame(error) from None


def with_value(said: dict[str, Any], value: Any, kinds: tuple[type, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(key, configuration) with one value of these kinds replaced, in tables and lists of numbers too."""
    for key, old in said.items():
        if key in NEUTRAL:
            continue
        if isinstance(old, dict):
            yield from ((inner, said | {key: table}) for inner, table in with_value(old, value, kinds))
        if isinstance(old, list):
            for i in (i for i, item in enumerate(old) if type(item) in kinds):
                yield key, said | {key: [*old[:i], value, *old[i + 1 :]]}
        if type(old) in kinds:
            yield key, said | {key: value}


@pytest.mark.parametrize("name", FORMATS)
def test_true_is_no_number(name: str) -> None:
    n_tried = 0
    for case in range(len(FORMATS[name].cases())):
        try:
            said = said_by(name, case)
        except UserError:  # a case that this format cannot say
            continue
        for key, config in with_value(said, True, (int, float)):
            with pytest.raises(UserError) as caught:
                read(name, config)
            assert key in str(caught.value), (key, str(caught.value))
            n_tried += 1
    assert n_tried > 5


@pytest.mark.parametrize(
    ("name", "key"), [("gemma3", "final_logit_softcapping"), ("llama", "head_dim"), ("deepseek", "q_lora_rank")]
)
def test_true_is_no_number_where_null_may_stand(name: str, key: str) -> None:
    with pytest.raises(UserError, match=key):
        read(name, said_by(name) | {key: True})


def test_a_number_is_no_switch() -> None:
    with pytest.raises(UserError, match="is_decoder"):
        read("bert", said_by("bert") | {"is_decoder": 0})
    with pytest.raises(UserError, match="partial_rotary_factor"):
        read("llama", said_by("llama") | {"partial_rotary_factor": True})


@pytest.mark.parametrize("name", FORMATS)
def test_no_number_is_cut(name: str) -> None:
    """Where a whole number is meant, one with a fraction is refused; where any number is, it is read as it is."""
    n_refused = 0
    for case in range(len(FORMATS[name].cases())):
        try:
            said = said_by(name, case)
        except UserError:  # a case that this format cannot say
            continue
        cut = dict(with_value(said, 7, (int,)))
        for key, config in with_value(said, 7.625, (int,)):
            refused = refusal_of(name, config)
            if refused is None:
                assert read(name, config) != read(name, cut[key]), key
            else:
                assert key in refused, (key, refused)
                n_refused += 1
    assert n_refused > 4


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
@pytest.mark.parametrize("value", [16.7, 16.0, "16", True, [16], 0, -1])
def test_the_length_that_frequencies_were_made_for_is_a_whole_number(kind: str, value: Any) -> None:
    table = {"rope_type": kind, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    table = {key: said for key, said in table.items() if kind == "llama3" or "freq" not in key}
    with pytest.raises(
        UserError, match=r"there rope_scaling: 'original_max_position_embeddings' (must be int|is -?\d)"
    ):
        read("llama", said_by("llama") | {"rope_scaling": table | {"original_max_position_embeddings": value}})
    read("llama", said_by("llama") | {"rope_scaling": table | {"original_max_position_embeddings": 16}})


def refusal_of(name: str, said: dict[str, Any]) -> str | None:
    try:
        read(name, said)
    except UserError as error:
        return str(error)
    return None


MEANT = {
    "deepseek": {"num_key_value_heads", "q_lora_rank"},
    "falcon": {"num_kv_heads", "ffn_hidden_size"},
    "gpt2": {"n_inner"},
    "gpt_neo": {"intermediate_size"},
    "gptj": {"n_inner"},
    "jamba": {"num_key_value_heads"},
    "llama": {"num_key_value_heads", "head_dim"},
    "mistral": {"num_key_value_heads", "head_dim", "sliding_window"},
    "mixtral": {"num_key_value_heads", "head_dim"},
    "qwen3": {"num_key_value_heads", "head_dim"},
    "roformer": {"embedding_size"},
    "starcoder": {"n_inner"},
    "switch": {"num_decoder_layers"},
    "t5": {"num_decoder_layers"},
    "transformer2017": {"decoder_vocab_size"},
}
"""Numbers for which the reference says what null means, and ours computed the same when it was tried."""


@pytest.mark.parametrize("name", FORMATS)
def test_null_is_no_number_and_no_yes(name: str) -> None:
    said, meant = said_by(name), set()
    for key, old in said.items():
        if key in NEUTRAL or old is None or isinstance(old, dict | list):
            continue
        refused = refusal_of(name, said | {key: None})
        if refused is not None:
            assert key in refused, (key, refused)
            continue
        if not isinstance(old, bool):
            meant.add(key)
        elif old:  # null says no
            assert read(name, said | {key: None}) == read(name, said | {key: False})
    assert meant == MEANT.get(name, set())


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("gemma3", "sliding_window"),
        ("gemma3", "query_pre_attn_scalar"),
        ("llama", "rms_norm_eps"),
        ("gptj", "rotary_dim"),
    ],
)
def test_null_names_the_fix(name: str, key: str) -> None:
    with pytest.raises(UserError, match=f"there: '{key}' is null; give its value, or remove it for "):
        read(name, said_by(name) | {key: None})


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
def test_kernels_of_others_are_refused(key: str) -> None:
    said = said_by("llama")
    for known in ("eager", "sdpa", "paged|eager", "flash_attention_2", "flex_attention", None):
        read("llama", said | {key: known})
    for bad in ("evil/kernel", "evil/kernel@v1:name", "paged|evil/kernel", "turbo", {"": "evil/kernel"}, 3):
        with pytest.raises(UserError, match=f"there: '{key}' is .*never run; remove that key") as caught:
            read("llama", said | {key: bad})
        assert "\n" not in str(caught.value)
    mpt = said_by("mpt")
    with pytest.raises(UserError, match="'attn_impl' is 'evil/kernel'"):
        read("mpt", mpt | {"attn_config": mpt["attn_config"] | {"attn_impl": "evil/kernel"}})


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("bert", "pruned_heads", {"0": [1]}), ("gpt2", "prune_heads", {"0": [1]}), ("t5", "tie_encoder_decoder", True)],
)
def test_what_must_be_empty(name: str, key: str, value: Any) -> None:
    said = said_by(name)
    for empty in (None, {}, [], False):
        assert read(name, said | {key: empty}) == read(name, said)
    with pytest.raises(UserError, match=f"'{key}' is .* not supported"):
        read(name, said | {key: value})


def test_nulls_of_a_table_and_of_deepseeks_heads_say_nothing() -> None:
    said = {k: v for k, v in said_by("llama").items() if k not in ("rope_scaling", "rope_parameters")}
    linear, plain = {"rope_type": "linear", "factor": 2.0}, read("llama", said)
    scaled = read("llama", said | {"rope_scaling": linear})
    assert scaled != plain
    for table in (linear | {"type": None, "beta_fast": None}, {"type": "linear", "rope_type": None, "factor": 2.0}):
        assert read("llama", said | {"rope_scaling": table}) == scaled
        assert read("llama", said | {"rope_parameters": table}) == scaled
    assert read("llama", said | {"rope_parameters": {"rope_type": None, "rope_theta": None}}) == plain
    with pytest.raises(UserError, match="factor"):
        read("llama", said | {"rope_scaling": linear | {"factor": None}})
    assert read("deepseek", said_by("deepseek") | {"head_dim": None}) == read("deepseek", said_by("deepseek"))
