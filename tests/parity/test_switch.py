"""Switch Transformers against the reference: capacity per row, what padding must not take, both directions."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from phylon.account import account
from phylon.families import family, preset
from phylon.families.base import Config
from phylon.families.switch import read_config, write_config
from phylon.hub import load, save
from phylon.layers.ffn.dispatchers import Capacity, Dropless
from phylon.layers.ffn.moe import MoE
from phylon.model import Model, build, build_meta
from phylon.spec import UserError
from phylon.spec.override import override

from .decoders import refuses
from .encoders import rows
from .harness import assert_close, differs, draw, random_tokens
from .margins import assert_clear
from .seq2seq import check, logits, ours_saved
from .test_t5 import calm

CLS = hf.SwitchTransformersForConditionalGeneration
SIZES: dict[str, Any] = {"vocab_size": 41, "d_model": 24, "d_kv": 10, "d_ff": 20, "num_layers": 2, "num_heads": 3}
SIZES |= {"num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 4}
SIZES |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "every other": {},
    "all sparse, router bias": {
        "num_sparse_encoder_layers": 2,
        "num_sparse_decoder_layers": 2,
        "router_bias": True,
        "router_jitter_noise": 0.0,
    },
    "gelu, odd": {
        "dense_act_fn": "gelu",
        "num_experts": 3,
        "relative_attention_num_buckets": 8,
        "layer_norm_epsilon": 1e-3,
    },
}


def tiny(**changes: Any) -> Any:
    return hf.SwitchTransformersConfig(**(SIZES | changes))


@pytest.mark.parametrize("name", CONFIGS)
def test_parity(name: str, tmp_path: Path) -> None:
    model = check(CLS, tiny(**CONFIGS[name]), tmp_path, prepare=calm)
    source, segments = rows(41, "right")
    assert_clear(model, random_tokens(41, len(source), 13), source=source, source_segments=segments)
    moe = model.spec.encoder.blocks[1].op("ffn")
    assert isinstance(moe, MoE)
    assert (moe.dispatch, moe.eval_dispatch) == (Capacity(tokens=64), Dropless())
    assert isinstance(model.spec.encoder.blocks[0].op("ffn"), MoE) == ("all" in name)


@pytest.mark.parametrize("case", range(len(family("switch").cases())))
def test_cases_both_ways(case: int, tmp_path: Path) -> None:
    ours_saved(family("switch").cases()[case], CLS, tmp_path, calm)


def tight(folder: Path, capacity: int) -> tuple[Model, Any]:
    """A reference with a capacity that overflows, and ours told to keep it in evaluation as the reference does."""
    reference = CLS(tiny(expert_capacity=capacity)).eval()
    draw(reference)
    calm(reference)
    reference.save_pretrained(folder)
    loaded = load(folder, device="cpu")
    kept = {f"{s}.blocks.1.ffn.eval_dispatch": Capacity(tokens=capacity) for s in ("encoder", "decoder")}
    model = build(override(loaded.spec, kept), device="cpu").eval()
    model.load_state_dict(loaded.state_dict())
    return model, reference


@torch.no_grad()
@pytest.mark.parametrize("capacity", [1, 3])
def test_capacity_drops_what_the_reference_drops(capacity: int, tmp_path: Path) -> None:
    model, reference = tight(tmp_path / "a", capacity)
    source, tokens = random_tokens(41, 3, 19), random_tokens(41, 3, 11, seed=2)
    theirs = reference(input_ids=source, decoder_input_ids=tokens, use_cache=False).logits
    assert_close(logits(model, tokens, source=source), theirs)
    assert differs(logits(load(tmp_path / "a", device="cpu"), tokens, source=source), theirs), "something overflows"


@torch.no_grad()
def test_case_9_padding_takes_no_capacity(tmp_path: Path) -> None:
    """The law the reference breaks: padding. Its padding is routed like text, and on the left it goes first."""
    model, reference = tight(tmp_path / "a", 3)
    source, tokens = random_tokens(41, 1, 12), random_tokens(41, 1, 5, seed=2)
    padded = torch.cat([torch.zeros(1, 9, dtype=torch.int64), source], 1)
    real = torch.tensor([[0] * 9 + [1] * 12])

    def theirs(ids: Tensor, mask: Tensor) -> Tensor:
        return reference(input_ids=ids, attention_mask=mask, decoder_input_ids=tokens, use_cache=False).logits

    alone = theirs(source, torch.ones_like(source))
    assert_close(logits(model, tokens, source=padded, source_segments=real), alone)
    assert differs(theirs(padded, real), alone), "the reference has learned it; use it as one"


@torch.no_grad()
def test_router_losses_are_the_reference_s(tmp_path: Path) -> None:
    """Its z-loss, and its balance loss on one row, where top-1 and per row are its conventions too."""
    reference = CLS(tiny()).eval()
    draw(reference)
    calm(reference)
    reference.save_pretrained(tmp_path / "a")
    model = load(tmp_path / "a", device="cpu")
    source, tokens = random_tokens(41, 3, 19), random_tokens(41, 3, 11, seed=2)
    aux = model(tokens, source=source).aux
    assert set(aux) == {f"{s}.blocks.1.ffn.{n}" for s in ("encoder", "decoder") for n in ("balance", "z_loss")}
    seen: dict[str, Tensor] = {}
    for stack in ("encoder", "decoder"):
        router = getattr(reference, stack).block[1].layer[-1].mlp.router
        router.register_forward_hook(lambda m, a, out, stack=stack: seen.__setitem__(stack, out[2]))
    reference(input_ids=source, decoder_input_ids=tokens)
    module = hf.models.switch_transformers.modeling_switch_transformers
    for stack, found in seen.items():
        assert_close(aux[f"{stack}.blocks.1.ffn.z_loss"].mean, module.router_z_loss_func(found))
        probs = found.softmax(-1)
        wanted = module.load_balancing_loss_func(probs, probs.argmax(-1))
        assert_close(aux[f"{stack}.blocks.1.ffn.balance"].mean, wanted)


RELEASED: dict[str, Any] = {
    "add_router_probs": False,
    "architectures": ["SwitchTransformersForConditionalGeneration"],
    "classifier_dropout": 0.0,
    "d_ff": 3072,
    "d_kv": 64,
    "d_model": 768,
    "decoder_sparse_step": 2,
    "decoder_start_token_id": 0,
    "dense_act_fn": "relu",
    "dropout_rate": 0.1,
    "encoder_sparse_step": 2,
    "eos_token_id": 1,
    "expert_capacity": 64,
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "switch_transformers",
    "num_decoder_layers": 12,
    "num_experts": 8,
    "num_heads": 12,
    "num_layers": 12,
    "num_sparse_decoder_layers": 6,
    "num_sparse_encoder_layers": 6,
    "pad_token_id": 0,
    "relative_attention_max_distance": 128,
    "relative_attention_num_buckets": 32,
    "router_aux_loss_coef": 0.001,
    "router_bias": False,
    "router_dtype": "float32",
    "router_ignore_padding_tokens": False,
    "router_jitter_noise": 0.01,
    "router_z_loss_coef": 0.001,
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 32128,
}


def test_the_released_configuration_is_the_preset() -> None:
    spec = read_config(Config(RELEASED))
    assert spec == preset("switch-base-8")
    assert read_config(Config(write_config(spec))) == spec
    assert [isinstance(b.op("ffn"), MoE) for b in spec.encoder.blocks] == [False, True] * 6
    with torch.device("meta"):
        reference = CLS(hf.SwitchTransformersConfig(**RELEASED))
    count = sum(p.numel() for p in reference.parameters())
    assert count == 619_339_008 == sum(p.numel() for p in build_meta(spec).parameters())
    figures = account("switch-base-8", seq_len=512)
    assert figures.params_total - figures.params_active == 12 * 7 * 2 * 768 * 3072


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"router_dtype": "bfloat16"}, "router_dtype"),
        ({"num_sparse_encoder_layers": 3}, "there are 2 layers"),
        ({"encoder_sparse_step": 1}, "encoder_sparse_step"),
        ({"dense_act_fn": "gated-gelu"}, "unknown activation 'gated-gelu'"),
        ({"expert_capacity": 0}, "expert_capacity"),
        ({"router_jitter_noise": 1.5}, "jitter"),
        ({"num_shared_experts": 1}, "not understood"),
    ],
)
def test_configurations_that_do_not_fit(change: dict[str, Any], words: str) -> None:
    with refuses(words):
        read_config(Config(SIZES | change))


def test_what_the_format_cannot_say(tmp_path: Path) -> None:
    for change in (
        {"encoder.blocks.1.ffn.dispatch": Dropless()},
        {"encoder.blocks.1.ffn.eval_dispatch": Capacity(tokens=2)},
    ):
        model = build(override(family("switch").cases()[0], change), device="cpu")
        with pytest.raises(UserError, match="a capacity in tokens"):
            save(model, tmp_path / "x", format="hf")
