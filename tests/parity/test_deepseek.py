"""DeepSeek-V3 against ``DeepseekV3ForCausalLM``: latent attention, groups, shared expert, dense blocks first."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

import phylon
from parity.decoders import VOCAB, check, close, padded, reference_logits, refuses, tokens_of, transformers
from parity.harness import drawn, load_reference, ours_to_reference
from parity.margins import assert_clear
from phylon.account import account
from phylon.families import family, preset
from phylon.families.base import Config
from phylon.families.deepseek import read_config, write_config
from phylon.layers.ffn.mlp import GLU
from phylon.layers.ffn.routers import GroupedSigmoidRouter
from phylon.spec.override import override

SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 9,
    "q_lora_rank": 7,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no query latent, biases, all sparse": {
        "q_lora_rank": None,
        "attention_bias": True,
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
    },
    "one group, tied, another eps": {"n_group": 1, "topk_group": 1, "tie_word_embeddings": True, "rms_norm_eps": 1e-3},
    "dense in every block": {"first_k_dense_replace": 2},
    "wide latent": {"kv_lora_rank": 40, "v_head_dim": 12},
    "yarn as released": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "yarn, two temperatures": {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}},
    "yarn, one temperature": {"rope_parameters": YARN | {"mscale_all_dim": 0.8}},
    "yarn without": {"rope_parameters": YARN},
}


def build(**changes: Any) -> Any:
    config = transformers.DeepseekV3Config(**(SIZES | changes))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_parity(name: str, tmp_path: Path) -> None:
    model = check(build(**CONFIGS[name]), tmp_path)
    if "dense" in name:
        return
    assert_clear(model, tokens_of())
    router = model.decoder.blocks[1].ffn.router
    assert router.selection_bias.abs().max() > 0.1
    plain = model(tokens_of()).logits.detach()
    router.selection_bias.zero_()
    assert float((model(tokens_of()).logits.detach() - plain).abs().max()) > 1e-2, "the bias selects"


@pytest.mark.parametrize("case", [0, 1])
def test_cases_both_ways(case: int, tmp_path: Path) -> None:
    ours_to_reference(family("deepseek").cases()[case], tmp_path)


@torch.no_grad()
def test_the_state_keeps_latents_and_both_forms_are_the_reference(tmp_path: Path) -> None:
    """Steps take the absorbed form, a long chunk the expanded one, and each could take the other."""
    model = check(build(kv_lora_rank=40), tmp_path)
    theirs = load_reference(tmp_path / "theirs")
    tokens = tokens_of()
    whole = reference_logits(theirs, tokens, positions=True)
    attn = model.decoder.blocks[0].attn
    assert attn.absorbing_pays(1, 13)
    assert not attn.absorbing_pays(13, 13)
    for pays in (lambda n, m: True, lambda n, m: False):
        for block in model.decoder.blocks:
            block.attn.absorbing_pays = pays
        state = model.new_state(3)
        parts = [model(chunk, state=state).logits for chunk in tokens.split([5, 1, 4, 1, 2], dim=1)]
        close(torch.cat(parts, 1), whole)
        segments = padded("left")
        state = model.new_state(3)
        pairs = zip(tokens.split([4, 9], 1), segments.split([4, 9], 1), strict=True)
        out = torch.cat([model(t, segments=s, state=state).logits for t, s in pairs], 1)
        close(out[segments == 1], model(tokens, segments=segments).logits[segments == 1])
    part = state.parts["decoder.blocks.0.attn"]
    assert part.k.shape[2:] == (1, 40)
    assert part.v.shape[2:] == (1, 4)


@torch.no_grad()
def test_the_layer_for_a_second_token(tmp_path: Path) -> None:
    """Released checkpoints end in one more layer, which the reference loads apart from the model: it is our head."""
    model = drawn(family("deepseek").cases()[2], seed=1)
    phylon.save(model, tmp_path / "a", format="hf")
    main = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a", attn_implementation="eager").eval()
    theirs = MtpModel(main, 1).eval()
    tensors = load_file(tmp_path / "a/model.safetensors")
    stored = {name.split("layers.2.", 1)[1]: t for name, t in tensors.items() if "layers.2." in name}
    for name, tensor in theirs.layers[0].state_dict().items():
        name = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        path, _, leaf = name.rpartition(".experts.")
        if not path:
            tensor.copy_(stored[name])
            continue
        maps = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
        for e in range(6):
            tensor[e] = torch.cat([stored[f"{path}.experts.{e}.{m}.weight"] for m in maps])
    tokens = tokens_of()
    hidden = main.model(tokens, use_cache=False).last_hidden_state
    positions = torch.arange(1, tokens.shape[1])[None].expand(len(tokens), -1)
    ahead = theirs.forward_layer(0, hidden[:, :-1], positions, None, input_ids=tokens[:, 1:])
    out = model(tokens)
    assert_clear(model, tokens)
    close(out.logits, main(tokens, use_cache=False).logits)
    close(out.heads["mtp"][:, 1:], main.lm_head(ahead))
    back = phylon.load(tmp_path / "a", device="cpu")
    assert torch.equal(back(tokens).heads["mtp"], out.heads["mtp"])


def test_copies_in_that_layer_must_be_copies(tmp_path: Path) -> None:
    model = phylon.build(family("deepseek").cases()[2], device="cpu")
    phylon.save(model, tmp_path / "a", format="hf")
    path = tmp_path / "a/model.safetensors"
    tensors = load_file(path)
    copies = {
        "model.layers.2.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.2.shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    save_file(tensors | copies, path, metadata={"format": "pt"})
    assert "mtp" in phylon.load(tmp_path / "a", device="cpu").heads
    copies["model.layers.2.shared_head.head.weight"] += 1
    save_file(tensors | copies, path, metadata={"format": "pt"})
    with refuses("differ", "shared_head"):
        phylon.load(tmp_path / "a", device="cpu")
    left = {name: tensor for name, tensor in tensors.items() if "eh_proj" not in name}
    save_file(left, path, metadata={"format": "pt"})
    with refuses("unexpected", "layers.2"):
        phylon.load(tmp_path / "a", device="cpu")


RELEASED: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def test_the_released_configuration_is_the_preset() -> None:
    assert read_config(Config(RELEASED)) == preset("deepseek-v3-mtp")
    assert read_config(Config(RELEASED, stored=lambda: ["model.norm.weight"])) == preset("deepseek-v3")
    for name in ("deepseek-v3-mtp", "deepseek-v3"):
        spec = preset(name)
        assert read_config(Config(write_config(spec))) == spec
    assert write_config(spec)["rope_scaling"]["mscale"] == 1.0
    blocks = spec.decoder.blocks
    assert [isinstance(b.op("ffn"), GLU) for b in blocks] == [True] * 3 + [False] * 58
    assert blocks[3].op("ffn").router == GroupedSigmoidRouter(top_k=8, n_groups=8, top_groups=4, scale=2.5)


def test_released_sizes() -> None:
    """Without the second-token head: 671 B, of which a token uses 37 B; 576 numbers of state a token and block."""
    figures = account("deepseek-v3", seq_len=4096, dtype="bfloat16")
    assert figures.params_total == 671_026_404_352
    assert figures.params_active == 37_552_282_624
    assert figures.state_bytes_per_token == 61 * (512 + 64) * 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_group": 4}, "n_groups 4"),
        ({"topk_group": 4}, "top_groups must be from 1"),
        ({"num_experts_per_tok": 5}, "the 4 experts"),
        ({"num_key_value_heads": 1}, "num_key_value_heads"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"qk_rope_head_dim": 5}, "rotary dim 5"),
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
        ({"first_k_dense_replace": "3"}, "first_k_dense_replace"),
        ({"num_nextn_predict_layers": 5}, "num_nextn_predict_layers"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
    ],
)
def test_configurations_that_do_not_fit(change: dict[str, Any], words: str) -> None:
    with refuses(words):
        read_config(Config(SIZES | change))


def test_what_the_format_cannot_say(tmp_path: Path) -> None:
    spec = family("deepseek").cases()[1]
    for changes, words in (
        ({"decoder.blocks.*.attn.scale": 0.3}, "without YaRN"),
        ({"decoder.blocks.*.attn.norm": {"kind": "rms_norm", "eps": 1e-3}}, "eps 1e-6"),
        ({"decoder.blocks.*.ffn.dispatch": {"kind": "capacity", "factor": 2.0}}, "an expert capacity"),
    ):
        with refuses(words):
            phylon.save(phylon.build(override(spec, changes), device="cpu"), tmp_path / "x", format="hf")
