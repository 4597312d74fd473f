"""Every attribute of every reference configuration, changed one at a time: ours computes the same, or refuses by name.

A key that is read and means something else, or is ignored and changes the maths, would be a silent difference.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import phylon
from phylon.families import families, family
from phylon.model import ModelSpec
from phylon.ops import native
from phylon.spec.errors import UserError

from .decoders import transformers
from .harness import draw, drawn, wide_casts, wide_reference

FORMATS = [f.name for f in families() if f.hf is not None]
BOOKKEEPING = {
    "_attn_implementation",
    "_name_or_path",
    "architectures",
    "chunk_size_feed_forward",
    "dtype",
    "id2label",
    "label2id",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
    "transformers_version",
    "use_cache",
}
ROPES = (
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.5},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
)
DECLARED = {
    ("mpt", "attn_config.alibi_bias_max"): "its ALiBi ends at 2^-8 whatever the key says",
    ("switch", "expert_capacity"): "the reference drops tokens in evaluation, ours in training alone (the law)",
    ("roberta", "pad_token_id"): "the reference counts positions by padding id, ours by segment (the law)",
    ("mpt", "max_seq_len"): "beyond it, its ALiBi has no values; ALiBi knows no longest text",
}
"""Where the reference and the configuration, or the reference and the law, part."""
BLAMED = {
    "num_attention_heads": ("num_key_value_heads", "partial_rotary_factor"),
    "hidden_size": ("embedding_size", "partial_rotary_factor"),
    "num_hidden_layers": ("layer_types",),
    "num_layers": ("attention_types", "sparse_step"),
    "num_decoder_layers": ("sparse_step",),
    "num_sparse_encoder_layers": ("sparse_step",),
    "num_sparse_decoder_layers": ("sparse_step",),
    "attn_config.attn_pdrop": ("dropout",),
    "rope": ("partial_rotary_factor",),
    "time_step_max": ("time_step_min",),
}
"""What a refusal names in the place of a key that no longer fits it."""
TOLERANCE = 1e-9
"""Both sides in float64: in fp32, rounding spread by T5's unscaled scores reaches 1e-4, and by deep Mamba-2 more."""


def others(key: str, value: Any) -> Iterator[Any]:
    """Other values for a key: null, others of the same kind, and what a key that is null might mean."""
    if value is not None:
        yield None
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value * 2, 1, 0)
    elif isinstance(value, float):
        yield from (value * 2, 0.0)
    elif value is None:
        yield from (True, 2, 0.5)
    elif isinstance(value, str):
        acts = ("relu", "gelu", "gelu_new", "gelu_fast", "quick_gelu", "tanh", "swish")
        yield from (acts if "act" in key else ("relative_key", "first", "sigmoid"))
    elif isinstance(value, list) and value:
        yield from (value[::-1], value[:-1])


def without(table: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name != key}


def changes(config: dict[str, Any], default: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, configuration) with one value changed or left out, also inside tables."""
    for key, value in config.items():
        if key in BOOKKEEPING:
            continue
        fallback = default.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or (isinstance(fallback, int) and fallback <= 64):
            yield key, without(config, key)
        for new in others(key, value):
            if new != value:
                yield key, config | {key: new}
        if isinstance(value, dict):
            for inner, new in ((k, new) for k, v in value.items() for new in others(k, v) if new != v):
                yield f"{key}.{inner}", config | {key: value | {inner: new}}
            for inner in value:
                yield f"{key}.{inner}", config | {key: without(value, inner)}
            if key == "rope_parameters" and "rope_theta" in value:
                for table in ROPES:
                    yield "rope", config | {key: {"rope_theta": value["rope_theta"]} | table}


def inputs(spec: ModelSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """Theirs and ours: more tokens than any window of the cases is long, or images."""
    generator = torch.Generator().manual_seed(0)
    embed: Any = spec.last_stack.embed
    if hasattr(embed, "grid"):
        images = torch.randn(2, embed.n_channels, *(n * embed.patch_size for n in embed.grid), generator=generator)
        return {"pixel_values": images}, {"images": images}
    tokens, source = torch.randint(2, embed.vocab_size, (2, 2, 41), generator=generator)
    cache = {} if spec.decoder is None else {"use_cache": False}
    if spec.encoder is not None and spec.decoder is not None:
        return cache | {"input_ids": source, "decoder_input_ids": tokens}, {"tokens": tokens, "source": source}
    if getattr(embed, "n_types", None):
        types = torch.arange(41).expand(2, 41) % embed.n_types
        return cache | {"input_ids": tokens, "token_type_ids": types}, {"tokens": tokens, "types": types}
    return cache | {"input_ids": tokens}, {"tokens": tokens}


def value_of(out: Any) -> Tensor:
    names = ("logits", "prediction_logits", "last_hidden_state")
    return next(getattr(out, name) for name in names if getattr(out, name, None) is not None)


def reference(folder: Path, config: dict[str, Any], given: dict[str, Any]) -> Tensor | None:
    """Writes a random model of theirs with ``config`` as it is said; what it computes, or ``None`` where it cannot."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    cls = getattr(transformers, config["architectures"][0])
    try:
        read = transformers.AutoConfig.from_pretrained(folder)
        kind = "sdpa" if cls._supports_sdpa else "eager"
        made = cls._from_config(read, attn_implementation=kind, dtype=torch.float32)
        draw(made)
        made.eval().save_pretrained(folder)
        value = value_of(wide_reference(made, **given))
    except Exception:  # whatever a foreign program raises at a senseless value
        return None
    (folder / "config.json").write_text(json.dumps(config))
    return value if torch.isfinite(value).all() else None


def ours(folder: Path, given: dict[str, Any]) -> Tensor | str:
    """What our model of the folder computes, or the line that says why there is none."""
    try:
        model = phylon.load(folder, device="cpu", dtype="float64")
        with wide_casts(), native.without():  # our tables of angles are fp32 in a float64 model too
            out = model(**given)
    except UserError as error:
        return str(error)
    return out.hidden if out.logits is None else out.logits


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@torch.no_grad()
def test_no_key_differs_silently(name: str, tmp_path: Path) -> None:
    chosen = family(name)
    assert chosen.hf is not None
    case = chosen.cases()[0]
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "decoder_start_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(ids | chosen.hf.write(case)))
    written = json.loads((tmp_path / "config.json").read_text())
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    full, default = read.to_dict() | {"architectures": written["architectures"]}, type(read)().to_dict()
    theirs, given = inputs(case)
    first = reference(tmp_path / "base", full, theirs)
    assert first is not None
    agreed = n_refused = 0
    for i, (key, config) in enumerate(changes(full, default)):
        expected = reference(tmp_path / str(i), config, theirs)
        if expected is None:
            continue
        mine = ours(tmp_path / str(i), given)
        if isinstance(mine, str):
            leaf = key.rpartition(".")[2]
            assert "\n" not in mine
            assert any(word in mine for word in (leaf, *BLAMED.get(key, ()), "does not fit", "position")), mine
            n_refused += 1
            continue
        apart = float((mine - expected).abs().max() / expected.abs().max()) if mine.shape == expected.shape else 9.0
        assert apart < TOLERANCE or (name, key) in DECLARED, (key, config, apart)
        agreed += 1
    assert agreed > 8
    assert n_refused > 2


@pytest.mark.slow
@torch.no_grad()
def test_mamba2_as_deep_as_the_reference_is_by_default(tmp_path: Path) -> None:
    """64 blocks drawn like this magnify a change of the embeddings two million times: rounding alone gives fp32 logits
    that are off by a tenth, ours and theirs. The formula is the same: in float64 they agree."""
    case = family("mamba2").cases()[0]
    stack = case.last_stack
    model = drawn(case.replace(decoder=stack.replace(blocks=stack.blocks[:1] * 64)))
    phylon.save(model, tmp_path / "a", format="hf")
    theirs, given = inputs(case)
    made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32).eval()
    assert made.config.num_hidden_layers == type(made.config)().num_hidden_layers
    ours_fp32, theirs_fp32 = model(**given).logits, made(**theirs).logits
    exact, expected = model.double()(**given).logits, value_of(wide_reference(made, **theirs))
    scale = float(expected.abs().max())
    assert float((exact - expected).abs().max()) < 1e-7 * scale
    # The control: no bound on fp32 logits could tell such a model from a wrong one.
    assert min(float((x - expected).abs().max()) for x in (ours_fp32, theirs_fp32)) > 1e-2 * scale
