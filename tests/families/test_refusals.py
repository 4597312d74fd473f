"""A number of a configuration that no model can have is refused by the name that the file gives it, in one line."""

import pytest

from phylon.families import families
from phylon.families.base import Config
from phylon.spec.errors import UserError

BAD = {int: (7, 1, 0, -1, 2**40, "x"), float: (float("nan"), -1.0, 1.5, "x"), str: ("xyz", 3)}
# Two keys that say the same: the refusal names the other one.
BESIDE = {
    "num_attention_heads": "num_key_value_heads",
    "num_hidden_layers": "layer_types",
    "num_layers": "attention_types",
    "hidden_size": "embedding_size",
}
AS_SAID = ("architectures", "model_type")
FORMATS = {f.name: f for f in families() if f.hf is not None}


@pytest.mark.parametrize("name", FORMATS)
def test_the_key_is_named(name: str) -> None:
    found = FORMATS[name]
    assert found.hf is not None
    said = found.hf.write(found.cases()[0])
    n_refused = 0
    for key, value in said.items():
        if isinstance(value, bool) or key in AS_SAID:
            continue
        for bad in BAD.get(type(value), ()):
            config = None
            try:
                config = Config(said | {key: bad}, "there")
                found.hf.read(config)
            except UserError as error:
                message = str(error if config is None else config.blame(error))
                named = {key, BESIDE.get(key, key), "sparse_step", "sparse number of blocks"}
                assert message.startswith("there"), message
                assert "\n" not in message
                # A share of a head is checked once it is a width.
                assert any(name in message for name in named) or key == "rotary_pct", (key, bad, message)
                n_refused += 1
    assert n_refused > 20


NAMED = {
    "steps that fall": ("mamba2", {"time_step_limit": [0.5, 0.1]}, r"'time_step_limit' is \[0.5, 0.1\]"),
    "steps below 0": ("mamba2", {"time_step_limit": [-1, 0.1]}, r"'time_step_limit' is \[-1, 0.1\]"),
    "steps from no number": ("mamba2", {"time_step_limit": [float("nan"), 1.0]}, r"'time_step_limit' is \[nan, 1.0\]"),
    "one step": ("mamba2", {"time_step_limit": [0.5]}, r"'time_step_limit' is \[0.5\]"),
    "rope of another kind": ("deepseek", {"rope_scaling": {"rope_type": "longrope"}}, "'rope_type' is 'longrope'"),
    "rope of no kind": ("deepseek", {"rope_scaling": {"rope_type": 3}}, "'rope_type' must be str, got 3"),
    "rope without use of a key": (
        "deepseek",
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}},
        "not understood beside 'rope_type' 'linear', and it may change the maths: 'mscale_all_dim'",
    ),
    "rope of the newer table": (
        "deepseek",
        {"rope_scaling": None, "rope_parameters": {"rope_type": "su", "rope_theta": 1e4}},
        "'rope_type' is 'su'",
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_values_in_lists_and_tables(name: str) -> None:
    kind, change, words = NAMED[name]
    chosen = FORMATS[kind]
    assert chosen.hf is not None
    config = Config(chosen.hf.write(chosen.cases()[0]) | change, "there")
    with pytest.raises(UserError, match=words) as caught:
        chosen.hf.read(config)
    assert "\n" not in str(caught.value)


def test_a_builder_s_refusal_names_the_list_that_holds_the_number() -> None:
    config = Config({"step_limits": [0.25, 0.125], "other": 3}, "there")
    config.take("step_limits")
    config.take("other")
    error = config.blame(UserError("step sizes need low <= high, got 0.25 and 0.125"))
    assert str(error).endswith("(from 'step_limits')")


def test_a_refusal_names_the_key_also_where_a_whole_number_became_a_float() -> None:
    config = Config({"attention_dropout": 0.0, "rms_norm_eps": 0}, "there")
    config.take("attention_dropout")
    config.take("rms_norm_eps")
    assert str(config.blame(UserError("eps must be above 0, got 0.0"))).endswith("(from 'rms_norm_eps')")


PUBLISHED: dict[str, dict[str, object]] = {
    "roberta": {"language": "english", "name": "Roberta", "sbert_ce_default_activation_function": "x.Identity"},
    "bert": {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.1.0"}},
    "gpt2": {"n_special": 0, "predict_special_tokens": True},
    "switch": {"feed_forward_proj": "relu", "is_gated_act": False},
    "jamba": {"calc_logits_for_entire_prompt": False, "n_ctx": 262144},
    "gpt_neox": {"custom_pipelines": {"text-generation": {"impl": "x.Y"}}},
    "deepseek": {"auto_map": None, "quantization_config": None},
    "falcon": {
        "auto_map": {"AutoConfig": "configuration_falcon.FalconConfig", "AutoModel": "modeling_falcon.FalconModel"}
    },
    "mpt": {
        "auto_map": {"AutoConfig": "configuration_mpt.MPTConfig", "AutoTokenizer": ["tokenization_mpt.MPTX", None]}
    },
}


@pytest.mark.parametrize(
    "table",
    [{"AutoConfig": "configuration_falcon.FalconConfig", "AutoModel": "evil.Model"}, {"AutoModel": 3}, "x", ["x"]],
)
def test_an_auto_map_of_foreign_classes_is_refused(table: object) -> None:
    hf = FORMATS["falcon"].hf
    assert hf is not None
    with pytest.raises(UserError, match=r"there: 'auto_map' is .* code of its own"):
        Config(hf.write(FORMATS["falcon"].cases()[0]) | {"auto_map": table}, "there")


@pytest.mark.parametrize("name", PUBLISHED)
def test_keys_of_published_files_that_say_nothing_are_passed_over(name: str) -> None:
    hf = FORMATS[name].hf
    assert hf is not None
    said = hf.write(FORMATS[name].cases()[0])
    config = Config(said | PUBLISHED[name], "there")
    assert hf.read(config) == hf.read(Config(said, "there"))
    config.finish()


def test_keys_of_the_first_code_for_yarn_are_passed_over() -> None:
    hf = FORMATS["llama"].hf
    assert hf is not None
    said = hf.write(FORMATS["llama"].cases()[0])
    said = {key: value for key, value in said.items() if not key.startswith("rope_")}
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    more = {"finetuned": True, "attn_factor": 0.8782488562869419}
    read = [hf.read(Config(said | {"rope_scaling": table}, "there")) for table in (yarn, yarn | more)]
    assert read[0] == read[1]


@pytest.mark.parametrize("change", [{"feed_forward_proj": "gated-gelu"}, {"is_gated_act": True}])
def test_other_feed_forward_networks_of_switch_are_refused(change: dict[str, object]) -> None:
    hf = FORMATS["switch"].hf
    assert hf is not None
    with pytest.raises(UserError, match=next(iter(change))):
        hf.read(Config(hf.write(FORMATS["switch"].cases()[0]) | change, "there"))
