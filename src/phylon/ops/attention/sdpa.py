"""PyTorch's ``scaled_dot_product_attention``, with the pattern as a causal flag or a dense mask."""

import torch
from torch import Tensor
from torch.nn import functional as F

from phylon.ops.attention.call import AttentionCall
from phylon.patterns import Causal, Full, Window

_LARGEST_MASK = 2**22
"""Pairs, on a CPU: beyond, tiles keep memory O(n) and skip what is hidden; a GPU has the memory for more."""


class Sdpa:
    """Fast where the pattern is plain; any other becomes a dense (T, S) mask, which it refuses for long texts."""

    name = "sdpa"

    def available(self) -> str | None:
        return None

    def supports(self, call: AttentionCall) -> str | None:
        if call.softcap is not None:
            return "no softcap in PyTorch's SDPA"
        if call.sink is not None:
            return "no attention sink in PyTorch's SDPA"
        if call.dropout > 0:
            return "its dropout mask is not the counter-based one"
        if call.tap is not None:
            return "scores and weights are not visible"
        if 0 in call.q.shape or 0 in call.k.shape:
            return "an empty dimension"
        limit = _LARGEST_MASK * (1 if call.q.device.type == "cpu" else 64)
        if call.q.shape[1] * call.k.shape[1] > limit and plain_flag(call) is None:
            return f"its mask of {call.q.shape[1]} x {call.k.shape[1]} would be dense"
        return None

    def run(self, call: AttentionCall) -> Tensor:
        q, k, v = call.q.transpose(1, 2), call.k.transpose(1, 2), call.v.transpose(1, 2)
        grouped = call.q.shape[2] != call.k.shape[2]
        flag = plain_flag(call)
        if flag is not None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=flag, scale=call.factor, enable_gqa=grouped)
            return out.transpose(1, 2)
        mask, bias = call.mask(), call.bias_scores()
        if mask is None:
            attn_mask = None if bias is None else bias.to(q.dtype)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask, scale=call.factor, enable_gqa=grouped)
            return out.transpose(1, 2)
        if grouped and mask.shape[1] > 1:  # heads of a group see different keys
            k, v = (x.repeat_interleave(call.q.shape[2] // x.shape[1], 1) for x in (k, v))
            grouped = False
        # What nobody sees and what sees nothing can hold anything, and a masked NaN is still NaN in the product.
        unseen = ~mask.any(dim=2)[..., None]
        seen = mask.any(dim=-1, keepdim=True)
        q, k, v = q.masked_fill(~seen, 0), k.masked_fill(unseen, 0), v.masked_fill(unseen, 0)
        if bias is None:
            attn_mask = mask | ~seen
        else:
            attn_mask = bias.to(q.dtype).masked_fill(~(mask | ~seen), float("-inf"))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask, scale=call.factor, enable_gqa=grouped)
        return torch.where(seen, out, 0).transpose(1, 2)


def plain_flag(call: AttentionCall) -> bool | None:
    """SDPA's ``is_causal`` where that says all there is to say, else ``None``: then it takes a mask."""
    if call.bias is not None or call.segmented or call.query is not None or call.key is not None:
        return None
    if isinstance(call.pattern, Full):
        return False
    t, s = call.q.shape[1], call.k.shape[1]
    causal = isinstance(call.pattern, Causal) or (isinstance(call.pattern, Window) and call.pattern.size >= s)
    if causal and t == 1:
        return False
    return True if causal and t == s else None
