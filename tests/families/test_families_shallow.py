"""What a format read it writes again, however few blocks there are: periods and patterns may be longer than a model."""

import pytest

from phylon.families import families, family
from phylon.families.base import Config
from phylon.hub import load, save
from phylon.model import ModelSpec, build
from phylon.spec import UserError, override

DEPTHS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
)
CONFIGS = {
    f"{f.name}-{i}": (f, spec) for f in families() if f.hf is not None for i, spec in enumerate(f.cases()) if i < 9
}
NOT_SAID = {"mpt-2", "transformer2017-2", "vit-2"}
"""What the format of a family has no word for, at any depth."""


def cut(config: dict, depth: int) -> dict:
    """The configuration of ``depth`` blocks, lists of one item a block cut or repeated."""
    cut = {key: depth if key in DEPTHS else value for key, value in config.items() if "sparse_step" not in key}
    cut |= {key: min(value, depth) for key, value in config.items() if key.startswith("num_sparse_")}
    if "layer_types" in config:
        cut["layer_types"] = (config["layer_types"] * depth)[:depth]
    if "attention_types" in config:
        cut["attention_types"] = [[(config["attention_types"][0][0] * depth)[:depth], 1]]
    return cut


def goes_and_comes(name: str, spec: ModelSpec, tmp_path) -> None:
    model = build(spec, device="cpu")
    model.family = name
    save(model, tmp_path / "a", format="hf")
    back = load(tmp_path / "a", device="cpu")
    assert back.spec.replace(init=spec.init) == spec
    save(back, tmp_path / "b", format="hf")
    assert load(tmp_path / "b", device="cpu").spec == back.spec


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - NOT_SAID))
def test_few_blocks(name, depth, tmp_path):
    found, spec = CONFIGS[name]
    config = cut(found.hf.write(spec), depth)
    assert any(key in config for key in DEPTHS)
    read = found.hf.read(Config(config, stored=list))
    assert len(read.last_stack.blocks) == depth
    goes_and_comes(found.name, read, tmp_path)


ODD = {
    "gpt2-by-depth": ("gpt2", 0, {"n_layer": 1, "scale_attn_by_inverse_layer_idx": True}),
    "gpt2-by-depth-unscaled": (
        "gpt2",
        0,
        {"n_layer": 1, "scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False},
    ),
    "jamba-no-attention": ("jamba", 0, {"attn_layer_period": 8, "attn_layer_offset": 4}),
    "jamba-no-mamba": ("jamba", 0, {"attn_layer_period": 1, "attn_layer_offset": 0}),
    "jamba-no-experts": ("jamba", 0, {"expert_layer_period": 5, "expert_layer_offset": 3}),
    "jamba-late": ("jamba", 0, {"num_hidden_layers": 5, "attn_layer_period": 8, "attn_layer_offset": 4}),
    "deepseek-dense": ("deepseek", 0, {"first_k_dense_replace": 2}),
    "deepseek-dense-beyond": ("deepseek", 0, {"first_k_dense_replace": 9}),
    "deepseek-sparse": ("deepseek", 0, {"first_k_dense_replace": 0}),
    "qwen3-window-beyond": (
        "qwen3",
        0,
        {"layer_types": None, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 28},
    ),
    "qwen3-window-everywhere": (
        "qwen3",
        0,
        {"layer_types": None, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
    ),
    "gemma3-no-full": ("gemma3", 0, {"layer_types": ["sliding_attention"] * 2, "sliding_window_pattern": 6}),
    "gemma3-all-full": ("gemma3", 0, {"layer_types": ["full_attention"] * 2, "sliding_window_pattern": 1}),
    "gpt_neo-all-local": ("gpt_neo", 0, {"attention_types": [[["local"], 2]]}),
    "gpt_neo-all-global": ("gpt_neo", 0, {"attention_types": [[["global"], 2]]}),
}


@pytest.mark.parametrize("name", ODD)
def test_patterns_longer_than_the_model(name, tmp_path):
    kind, case, changes = ODD[name]
    found = family(kind)
    config = found.hf.write(found.cases()[case]) | changes
    read = found.hf.read(Config({key: value for key, value in config.items() if value is not None}))
    goes_and_comes(kind, read, tmp_path)


@pytest.mark.parametrize("sparse", [0, 1, 2, 3])
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
def test_switch_places(depth, sparse, tmp_path):
    found = family("switch")
    config = found.hf.write(found.cases()[0])
    for stack in ("encoder", "decoder"):
        config |= {f"num_sparse_{stack}_layers": sparse}
        config.pop(f"{stack}_sparse_step", None)
    config |= {"num_layers": depth, "num_decoder_layers": depth}
    try:
        read = found.hf.read(Config(config))
    except UserError:
        return
    goes_and_comes("switch", read, tmp_path)


def test_a_refusal_names_the_part(tmp_path):
    """Of the family that comes nearest: the path of what its configuration cannot say."""
    spec = override(family("gpt2").cases()[0], {"decoder.blocks.1.attn.scale": 0.3})
    model = build(spec, device="cpu")
    model.family = "gpt2"
    with pytest.raises(UserError, match=r"gpt2: its configuration has no place for decoder\.blocks\.1\..*scale 0\.3"):
        save(model, tmp_path / "a", format="hf")
