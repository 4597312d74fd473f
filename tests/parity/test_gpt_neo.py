"""GPT-Neo against ``GPTNeoForCausalLM``: alternating windows, no scale; and GPT-3 against both GPT classes."""

from pathlib import Path

import pytest
import torch

import phylon
from parity.decoders import VOCAB, check, close, padded, reference_logits, refuses, tokens_of, transformers
from phylon.families.base import Config
from phylon.families.gpt3 import gpt3_spec
from phylon.families.gpt_neo import read_config
from phylon.patterns import Strided, Window

CONFIGS = {
    "alternating": {},
    "local first, untied": {"attention_types": [[["local"], 1], [["global"], 1]], "tie_word_embeddings": False},
    "global only": {"attention_types": [[["global"], 2]], "intermediate_size": 41, "activation_function": "relu"},
}


def build(**changes: object):
    sizes = {"hidden_size": 24, "num_heads": 3, "num_layers": 2, "vocab_size": VOCAB, "max_position_embeddings": 64}
    rest = {"attention_types": [[["global", "local"], 1]], "window_size": 4, "attn_implementation": "eager"}
    return transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(**(sizes | rest | changes)))


@pytest.mark.parametrize("name", CONFIGS)
def test_parity(name: str, tmp_path: Path) -> None:
    check(build(**CONFIGS[name]), tmp_path)


def test_reference_needs_positions_for_left_padding(tmp_path: Path) -> None:
    """The law the reference breaks: padding. Its positions count the padding unless the caller passes them."""
    ours = check(build(), tmp_path)
    tokens, segments = tokens_of(), padded("left")
    real = segments != 0
    told = reference_logits(build_again(tmp_path), tokens, segments, positions=True)[real]
    untold = reference_logits(build_again(tmp_path), tokens, segments, positions=False)[real]
    close(ours(tokens, segments=segments).logits[real].detach(), told)
    assert float((told - untold).abs().max()) > 0.1


def build_again(folder: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "ours", attn_implementation="eager").eval()


def test_attention_types_must_cover_the_blocks() -> None:
    config = build().config.to_dict()
    for wrong in ([[["global"], 3]], [[["near", "local"], 1]], ["global"], [[["global"], 10**12]]):
        with refuses("attention_types"):
            read_config(Config(config | {"attention_types": wrong}))


def test_attention_layers_must_say_the_same() -> None:
    """The reference runs ``attention_layers`` where a file has both."""
    config = build().config.to_dict()
    assert config["attention_layers"] == ["global", "local"]
    for wrong in (["local", "global"], ["global"], []):
        with refuses("'attention_layers' and 'attention_types' differ"):
            read_config(Config(config | {"attention_layers": wrong}))


def gpt3(**changes: object) -> phylon.Model:
    sizes = {"d_model": 24, "n_layers": 2, "n_heads": 3, "vocab_size": VOCAB, "max_seq_len": 64}
    return phylon.build(gpt3_spec(**(sizes | changes)), device="cpu").eval()


def test_dense_gpt3_is_gpt2(tmp_path: Path) -> None:
    """The dense form is a GPT-2 file; the reference's own draw of it is checked on the way back."""
    phylon.save(gpt3(band=None), tmp_path / "dense", format="hf")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", attn_implementation="eager")
    assert type(reference).__name__ == "GPT2LMHeadModel"
    check(reference, tmp_path)


def test_banded_gpt3_is_gpt_neo_with_biases_and_scale(tmp_path: Path) -> None:
    """GPT-Neo has neither query biases nor a scale: with the biases 0 and the scale in q, the two agree."""
    ours = gpt3(band=Window(size=4))
    reference = build().eval()
    with torch.no_grad():
        for module in ours.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.normal_(generator=torch.Generator().manual_seed(module.weight.numel())).mul_(0.4)
        mine, theirs = dict(ours.named_parameters()), dict(reference.named_parameters())
        for name, parameter in theirs.items():
            parameter.copy_(mine[_name(name)] * (8**-0.5 if "q_proj" in name else 1))
        tokens = tokens_of()
        close(ours(tokens).logits, reference_logits(reference, tokens, positions=True))
    with refuses("no family"):
        phylon.save(ours, tmp_path / "banded", format="hf")


def _name(theirs: str) -> str:
    swaps = {
        "transformer.wte": "decoder.embed.tokens",
        "transformer.wpe": "decoder.embed.positions",
        "transformer.h": "decoder.blocks",
        "transformer.ln_f": "decoder.norm_final",
        "attn.attention.out_proj": "attn.o_proj",
        "attn.attention": "attn",
        "ln_1": "attn_norm",
        "ln_2": "ffn_norm",
        "mlp.c_fc": "ffn.up_proj",
        "mlp.c_proj": "ffn.down_proj",
    }
    for old, new in swaps.items():
        theirs = theirs.replace(old, new)
    return theirs


def test_width_of_heads_is_its_own_number() -> None:
    """The table's 1.3B and 13B rows, in small: three heads of 10 beside d_model 24; and the full strided pattern."""
    model = gpt3(head_dim=10, band=Window(size=3) | Strided(stride=3))
    assert model.decoder.blocks[0].attn.q_proj.weight.shape == (30, 24)
    tokens = tokens_of()
    state = model.new_state(3)
    chunks = [model(part, state=state).logits for part in tokens.split([5, 8], dim=1)]
    close(torch.cat(chunks, dim=1), model(tokens).logits.detach())


def test_published_sizes() -> None:
    """Table 2.1: the counts of the paper's formula, with its rows taken to the letter."""
    rows = {
        "125m": (12, 768, 12, 64),
        "350m": (24, 1024, 16, 64),
        "760m": (24, 1536, 16, 96),
        "1.3b": (24, 2048, 24, 128),
        "2.7b": (32, 2560, 32, 80),
        "6.7b": (32, 4096, 32, 128),
        "13b": (40, 5140, 40, 128),
        "175b": (96, 12288, 96, 128),
    }
    for name, (n_layers, d, heads, width) in rows.items():
        attention = 4 * d * heads * width + 3 * heads * width + d
        block = attention + 8 * d * d + 4 * d + d + 4 * d
        with torch.device("meta"):
            built = sum(p.numel() for p in phylon.Model(phylon.preset(f"gpt3-{name}")).parameters())
        assert built == n_layers * block + (50_257 + 2048) * d + 2 * d, name
