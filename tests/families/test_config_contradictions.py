"""Two keys that say the same thing: read where they agree, refused with both names where they do not."""

import json
from pathlib import Path
from typing import Any

import pytest

from phylon.families import families
from phylon.families.base import Config
from phylon.hub import describe
from phylon.model import ModelSpec
from phylon.spec.errors import UserError

FORMATS = {f.name: f for f in families() if f.hf is not None}


def read(name: str, changes: dict[str, Any], number: int = 0) -> ModelSpec:
    """A case of a family as its file says it, with ``changes``."""
    hf = FORMATS[name].hf
    assert hf is not None
    said = hf.write(FORMATS[name].cases()[number]) | changes
    return hf.read(Config({key: value for key, value in said.items() if value is not ...}, "there"))


def written(name: str, number: int = 0) -> dict[str, Any]:
    hf = FORMATS[name].hf
    assert hf is not None
    return hf.write(FORMATS[name].cases()[number])


GPT2 = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
# What the reference, or the authors' own format, calls a key beside its own name; all of the pinned attribute maps.
NAMES = {
    "bloom": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "n_embed": "hidden_size"},
    "deepseek": {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    "distilbert": {"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
    "falcon": {"n_embed": "hidden_size"},
    "gpt_neo": {"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
    "gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    "jamba": {"num_local_experts": "num_experts"},
    "mamba": {"d_model": "hidden_size", "n_layer": "num_hidden_layers"},
    "mixtral": {"num_experts": "num_local_experts"},
    "mpt": {"num_attention_heads": "n_heads", "hidden_size": "d_model", "num_hidden_layers": "n_layers"},
    "switch": {"hidden_size": "d_model", "num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
    "t5": {
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    },
    "transformer2017": {
        "num_attention_heads": "encoder_attention_heads",
        "hidden_size": "d_model",
        "num_hidden_layers": "encoder_layers",
    },
} | dict.fromkeys(("gpt2", "gptj", "starcoder"), GPT2)


@pytest.mark.parametrize(("name", "other", "key"), [(n, o, k) for n, keys in NAMES.items() for o, k in keys.items()])
def test_two_names_of_one_key(name: str, other: str, key: str) -> None:
    said, spec = written(name), read(name, {})
    value = said.get(key, {"num_nextn_predict_layers": 0}.get(key))
    assert read(name, {key: value, other: value}) == read(name, {key: value}) == spec
    if name != "mamba":  # whose reference would not find it
        assert read(name, {key: ..., other: value}) == spec
    assert read(name, {other: None}) == spec
    with pytest.raises(UserError) as error:
        read(name, {key: value, other: value * 2 + 1})
    message = str(error.value)
    assert message.startswith("there: ")
    assert "\n" not in message
    assert all(f"'{k}' is {v}" in message for k, v in ((key, value), (other, value * 2 + 1))), message


@pytest.mark.parametrize("name", FORMATS)
def test_every_name_that_the_reference_knows_is_above(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    known = type(transformers.AutoConfig.for_model(written(name)["model_type"])).attribute_map
    assert known.items() <= NAMES.get(name, {}).items()


LINEAR = {"rope_type": "linear", "factor": 2.0}
ROPE = {
    "theta": ({"rope_theta": 5e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_theta", "5"),
    "theta of the older table": ({"rope_theta": 5e4, "rope_scaling": LINEAR | {"rope_theta": 1e4}}, "rope_theta", "1"),
    "kind": ({"rope_scaling": LINEAR | {"type": "dynamic"}}, "rope_scaling.type", "'dynamic'"),
    "kind of the newer table": (
        {"rope_theta": ..., "rope_parameters": LINEAR | {"type": "dynamic", "rope_theta": 1e4}},
        "rope_parameters.rope_type",
        "'linear'",
    ),
    "factor": (
        {"rope_scaling": LINEAR, "rope_parameters": LINEAR | {"factor": 4.0}},
        "rope_scaling.factor' is 2.0 and|rope_parameters.factor' is 4.0",
        "2.0",
    ),
    "kinds": ({"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default"}}, "rope_parameters", "'default'"),
    "one without": (
        {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "linear"}},
        "'rope_parameters' lacks 'factor'",
        "",
    ),
}


@pytest.mark.parametrize("name", ROPE)
def test_rotary_tables_that_contradict(name: str) -> None:
    changes, words, value = ROPE[name]
    with pytest.raises(UserError, match=words) as error:
        read("llama", changes)
    assert value in str(error.value)


def test_rotary_tables_that_agree() -> None:
    once = read("llama", {"rope_theta": 1e4, "rope_scaling": LINEAR})
    for same in (
        {"rope_theta": 1e4, "rope_scaling": LINEAR | {"type": "linear"}},
        {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_theta": 10000, "rope_scaling": LINEAR, "rope_parameters": LINEAR | {"rope_theta": 1e4}},
        {"rope_theta": ..., "rope_parameters": LINEAR | {"rope_theta": 1e4, "type": "linear"}},
        {"rope_theta": ..., "rope_scaling": LINEAR | {"rope_theta": 1e4}},
        {"rope_theta": None, "rope_scaling": LINEAR | {"rope_theta": 1e4}} | {"rope_theta": 1e4},
        {"rope_theta": 1e4, "rope_scaling": None, "rope_parameters": LINEAR},
    ):
        assert read("llama", same) == once


def test_a_silent_gemma_has_its_own_two_thetas() -> None:
    stack = read("gemma3", {"rope_theta": ..., "rope_local_base_freq": ..., "rope_scaling": ...}).last_stack
    assert {block.op("attn").rotary.theta for block in stack.blocks} == {1e4, 1e6}  # pyrefly: ignore


GEMMA = {"rope_type": "linear", "factor": 8.0}
PAIRS = {
    "gemma theta": (
        "gemma3",
        {"rope_theta": 2e6, "rope_scaling": ..., "rope_parameters": {"full_attention": GEMMA | {"rope_theta": 1e6}}},
        "'rope_theta' is 2000000.0 and 'rope_parameters.full_attention.rope_theta' is 1000000.0",
    ),
    "gemma local theta": (
        "gemma3",
        {"rope_local_base_freq": 2e4, "rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}},
        "'rope_local_base_freq' is 20000.0 and 'rope_parameters.sliding_attention.rope_theta' is 10000.0",
    ),
    "gemma scaling": (
        "gemma3",
        {"rope_scaling": LINEAR, "rope_parameters": {"full_attention": GEMMA}},
        "'rope_scaling.factor' is 2.0 and 'rope_parameters.full_attention.factor' is 8.0",
    ),
    "gemma pattern": ("gemma3", {"sliding_window_pattern": 1}, "'layer_types' has .* 'sliding_window_pattern' 1"),
    "gemma private pattern": ("gemma3", {"layer_types": ..., "_sliding_window_pattern": 2}, "_sliding_window_pattern"),
    "t5 activation": (
        "t5",
        {"feed_forward_proj": "gated-gelu", "dense_act_fn": "relu"},
        "'feed_forward_proj' is 'gated-gelu' and 'dense_act_fn' is 'relu'",
    ),
    "t5 gate": (
        "t5",
        {"feed_forward_proj": "gated-gelu", "is_gated_act": False},
        "'feed_forward_proj' is 'gated-gelu' and 'is_gated_act' is False",
    ),
    "t5 no gate": ("t5", {"feed_forward_proj": "relu", "is_gated_act": True}, "'is_gated_act' is True"),
    "switch": ("switch", {"feed_forward_proj": "relu", "dense_act_fn": "gelu"}, "'relu' and 'dense_act_fn' is 'gelu'"),
    "starcoder": ("starcoder", {"multi_query": True, "num_key_value_heads": 2}, "'num_key_value_heads' is 2"),
    "booleans are no numbers": ("gpt2", {"n_layer": 1, "num_hidden_layers": True}, "'num_hidden_layers' is True"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_that_contradict(name: str) -> None:
    family, changes, words = PAIRS[name]
    with pytest.raises(UserError, match=words):
        read(family, changes)


AGREEING = {
    "gemma": (
        "gemma3",
        {"rope_theta": 1e6, "rope_scaling": GEMMA, "rope_parameters": {"full_attention": GEMMA | {"rope_theta": 1e6}}},
    ),
    "gemma pattern, as its code writes it": ("gemma3", {"_sliding_window_pattern": 6}),
    "t5 v1.1": ("t5", {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_new", "is_gated_act": True}),
    "t5": ("t5", {"feed_forward_proj": "relu", "dense_act_fn": "relu", "is_gated_act": False}),
    "falcon-7b": ("falcon", {"multi_query": True, "new_decoder_architecture": False, "num_kv_heads": 71}),
    "two names of the type of the weights": ("llama", {"torch_dtype": "float16", "dtype": "bfloat16"}),
}


@pytest.mark.parametrize("name", AGREEING)
def test_pairs_of_published_files(name: str) -> None:
    family, changes = AGREEING[name]
    read(family, changes)


LABELS = {"id2label": {"0": "a", "1": "b", "2": "c"}}


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("bert", "BertForSequenceClassification"),
        ("vit", "ViTForImageClassification"),
        ("deit", "DeiTForImageClassificationWithTeacher"),
        ("llama", "LlamaForSequenceClassification"),
        ("roberta", "RobertaForTokenClassification"),
        ("t5", "T5ForTokenClassification"),
    ],
)
def test_labels_and_their_number(name: str, architecture: str) -> None:
    named: dict[str, Any] = {"architectures": [architecture], **LABELS}
    spec = read(name, named)
    assert read(name, named | {"num_labels": 3}) == spec
    with pytest.raises(UserError, match="'num_labels' is 5 and 'id2label' names 3 classes"):
        read(name, named | {"num_labels": 5})


def test_the_number_of_labels_of_a_model_without_classes_says_nothing() -> None:
    number = next(i for i, case in enumerate(FORMATS["bert"].cases()) if "mlm" in case.heads)
    assert read("bert", LABELS | {"num_labels": 5}, number) == read("bert", {}, number)


def folder(path: Path, names: Any, name: str = "llama") -> Path:
    (path / "config.json").write_text(json.dumps(written(name) | {"architectures": names}))
    return path


def test_several_architectures(tmp_path: Path) -> None:
    """Those that are one model are read; nothing says which of two models the weights are of."""
    one = describe(folder(tmp_path, ["LlamaForCausalLM"])).spec
    for same in (["LlamaForCausalLM"] * 2, ["LlamaForCausalLM", "YiForCausalLM"], [], None):
        assert describe(folder(tmp_path, same)).spec == one
    for name, names in (
        ("llama", ["LlamaForCausalLM", "LlamaForSequenceClassification"]),
        ("llama", ["LlamaForSequenceClassification", "LlamaForCausalLM"]),
        ("bert", ["BertForMaskedLM", "BertForSequenceClassification"]),
        ("t5", ["T5ForConditionalGeneration", "T5EncoderModel"]),
        ("vit", ["ViTModel", "ViTForImageClassification"]),
        ("bert", ["BertForMaskedLM", "MyForOwnTask"]),
    ):
        with pytest.raises(
            UserError, match=f"names '{names[0]}' and '{names[1]}', which are different models"
        ) as error:
            describe(folder(tmp_path, names, name))
        assert str(error.value).startswith(str(tmp_path / "config.json"))
    assert describe(folder(tmp_path, ["T5ForConditionalGeneration", "T5WithLMHeadModel"], "t5")).spec.heads
    for wrong in ([3], [None], [["LlamaForCausalLM"]], [""]):
        with pytest.raises(UserError, match="'architectures' must be a list of names"):
            describe(folder(tmp_path, wrong))
