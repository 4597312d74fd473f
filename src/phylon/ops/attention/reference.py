"""The oracle: attention as it is written, in at least fp32. Supports everything."""

import torch
from torch import Tensor

from phylon.ops.attention.call import AttentionCall
from phylon.ops.random import keep_mask


class Reference:
    """``softmax(scale q k^T + bias) v`` over the allowed keys. arXiv:1706.03762, equation 1."""

    name = "reference"

    def available(self) -> str | None:
        return None

    def supports(self, call: AttentionCall) -> str | None:
        return None

    def run(self, call: AttentionCall) -> Tensor:
        dtype = torch.promote_types(call.q.dtype, torch.float32)
        group = call.q.shape[2] // call.k.shape[2]
        q_BHTE = call.q.transpose(1, 2).to(dtype)
        k_BHSE = call.k.transpose(1, 2).to(dtype).repeat_interleave(group, 1)
        v_BHSE = call.v.transpose(1, 2).to(dtype).repeat_interleave(group, 1)
        mask = call.mask()
        blind = None if mask is None else ~mask.any(dim=-1, keepdim=True)
        if mask is not None and blind is not None:
            # Keys that nobody may look at and queries that see nothing can hold anything, and 0 * NaN is NaN.
            unseen = ~mask.any(dim=2)[..., None]
            k_BHSE, v_BHSE = k_BHSE.masked_fill(unseen, 0), v_BHSE.masked_fill(unseen, 0)
            q_BHTE = q_BHTE.masked_fill(blind, 0)
        scores = (q_BHTE @ k_BHSE.mT) * call.factor
        bias = call.bias_scores()
        if bias is not None:
            scores = scores + bias
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        scores = call.tap("scores", scores) if call.tap else scores
        weights = _softmax(scores, mask, call.sink)
        weights = call.tap("weights", weights) if call.tap else weights
        if call.dropout > 0:
            keep = keep_mask(call.seed, weights.shape, call.dropout, weights.device)
            weights = weights * keep / (1 - call.dropout)
        out = weights @ v_BHSE
        # Zero it is already; so is, now, the gradient that comes back to it.
        out = out if blind is None else out.masked_fill(blind, 0)
        return out.transpose(1, 2).to(call.q.dtype)


def _softmax(scores: Tensor, mask: Tensor | None, sink: Tensor | None) -> Tensor:
    """Softmax over the allowed keys; a row that may see nothing has zero weights and zero gradient."""
    empty = None if mask is None else ~mask.any(dim=-1, keepdim=True)
    if mask is not None and empty is not None:
        scores = scores.masked_fill(~mask, float("-inf")).masked_fill(empty, 0)
    if sink is not None:
        extra = sink.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat([scores, extra], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return weights if empty is None else weights.masked_fill(empty, 0)
