"""`transformers` as the reference of `phylon.checkpoint.verify`: nothing under `src` imports it, so this file does.

``phylon verify MODEL --reference tests/parity/reference.py`` calls ``reference(folder)``.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from phylon.spec.errors import UserError

# Their hidden states leave the embedding out and give the last block both before and after the final norm.
BLOCKS_ONLY = ("mamba", "mamba2")


def reference(folder: str | Path, dtype: torch.dtype = torch.float32) -> Callable[[Tensor], Mapping[str, Tensor]]:
    """Tokens (B, T) to what `AutoModelForCausalLM` computes, by our names: embedding, blocks, final norm, logits.

    Raises:
        UserError: the folder's architecture is not one of a causal language model.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    named = (config.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)])[0]
    if named not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        what = named or config.model_type
        raise UserError(
            f"this reference runs causal language models, and '{folder}' holds {what}; leave --reference out"
        )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype).eval()

    @torch.no_grad()
    def forward(tokens: Tensor) -> dict[str, Tensor]:
        tokens = tokens.to(model.device)
        out = model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        *states, last = out.hidden_states
        if config.model_type in BLOCKS_ONLY:
            first, blocks = model.get_input_embeddings()(tokens), states
        else:
            first, *blocks = states  # the last block's own output is only given after the final norm
        values = {"decoder.embed.out": first}
        values |= {f"decoder.blocks.{i}.resid_post": value for i, value in enumerate(blocks)}
        return values | {"decoder.out": last, "heads.lm.logits": out.logits}

    return forward
