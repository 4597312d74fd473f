"""`transformers` as the reference of `phylon.checkpoint.verify`: nothing under `src` imports it, so this file does.

``phylon verify MODEL --reference tests/parity/reference.py`` calls ``reference(folder)``.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import transformers
from torch import Tensor


def reference(folder: str | Path, dtype: torch.dtype = torch.float32) -> Callable[[Tensor], Mapping[str, Tensor]]:
    """Tokens (B, T) to what `AutoModelForCausalLM` computes, by our names: embedding, blocks, final norm, logits."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype).eval()

    @torch.no_grad()
    def forward(tokens: Tensor) -> dict[str, Tensor]:
        out = model(input_ids=tokens.to(model.device), use_cache=False, output_hidden_states=True)
        first, *blocks, last = out.hidden_states  # the last block's own output is only given after the final norm
        values = {"decoder.embed.out": first}
        values |= {f"decoder.blocks.{i}.resid_post": value for i, value in enumerate(blocks)}
        return values | {"decoder.out": last, "heads.lm.logits": out.logits}

    return forward
