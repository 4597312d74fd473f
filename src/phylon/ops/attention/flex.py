"""PyTorch's FlexAttention: one fused kernel compiled for the pattern, on GPUs."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from phylon.ops.attention.call import AttentionCall
from phylon.ops.attention.plan import FULL, TilePlan, tile_plan
from phylon.ops.attention.tile_bias import parameters
from phylon.patterns import Records
from phylon.patterns.bounds import in_tiles

_BLOCK = 128


class Flex:
    """Block-sparse and fused, forward and backward; compiled once for every pattern and dtype.

    Dong et al. (arXiv:2412.05496). On CPUs it has no backward pass and compiles for seconds before its first call, so
    it stands aside there; on GPUs it comes last before the reference until it has been measured on one.
    """

    name = "flex"
    device = "cuda"

    def available(self) -> str | None:
        if not torch.cuda.is_available():
            return "no backward pass on CPUs, and seconds of compiling"
        return None

    def supports(self, call: AttentionCall) -> str | None:
        if call.q.device.type not in ("cuda", "meta"):
            return f"it runs on GPUs, not on {call.q.device.type}"
        if call.q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"it computes float32, bfloat16 and float16, not {str(call.q.dtype).removeprefix('torch.')}"
        for reason, present in (
            ("scores and weights are not visible", call.tap is not None),
            ("its dropout mask is not the counter-based one", call.dropout > 0),
            ("no attention sink in FlexAttention", call.sink is not None),
            ("the pattern tells heads apart", call.pattern.heads > 1),
            ("gradients of the score bias are not asked of it", bool(parameters(call.bias))),
            ("an empty dimension", 0 in call.q.shape or 0 in call.k.shape or 0 in call.v.shape),
        ):
            if present:
                return reason
        return None

    def run(self, call: AttentionCall) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
        if not torch.is_grad_enabled():
            q, k, v = q.detach(), k.detach(), v.detach()
        plan = tile_plan(call, _BLOCK, _BLOCK)
        if plan.unseen is not None:
            k, v = (x.masked_fill(plan.unseen[..., None], 0) for x in (k, v))
        if plan.blind is not None:
            q = q.masked_fill(plan.blind[..., None], 0)
        attend = compiled() if call.q.device.type == "cuda" else flex_attention
        out = attend(
            q,
            k,
            v,
            score_mod=_score_mod(call),
            block_mask=block_mask(call),
            scale=call.factor,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return (out if plan.blind is None else out.masked_fill(plan.blind[..., None], 0)).transpose(1, 2)


@cache
def compiled() -> Callable[..., Any]:
    """``flex_attention`` as a fused kernel."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def block_mask(call: AttentionCall) -> Any:
    """The call's block map in FlexAttention's form; the masks of its partial tiles are computed in the kernel."""
    from torch.nn.attention.flex_attention import BlockMask

    plan = tile_plan(call, _BLOCK, _BLOCK)
    query, key = (_by_token(side) for side in call.records())
    visible = call.visible

    def mask_mod(b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        seen = visible.allowed(_at(query, b, q_index), _at(key, b, k_index))
        return seen.reshape(q_index.shape) if seen.ndim > q_index.ndim else seen  # of patterns that number their heads

    partial, full = _listed(plan, plan.masks != FULL), _listed(plan, plan.masks == FULL)
    sizes = (plan.n_queries, plan.n_keys)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=_BLOCK, mask_mod=mask_mod, seq_lengths=sizes)


def _listed(plan: TilePlan, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Of the chosen tiles, how many each row has (B, H, nQ) and which (B, H, nQ, nK), filled up with zeros."""
    n_rows = plan.batch * plan.heads * plan.n_query_tiles
    row = plan.row_of[chosen]
    counts = torch.bincount(row, minlength=n_rows)
    rank = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    tiles = torch.zeros(n_rows, plan.n_key_tiles, dtype=torch.int32, device=row.device)
    tiles[row, rank] = plan.key_tiles[chosen]
    shape = (plan.batch, plan.heads, plan.n_query_tiles)
    return counts.int().view(shape), tiles.view(*shape, -1)


def _by_token(side: Records) -> Records:
    """Whole tiles: the kernel asks beyond the end."""
    return side.map(lambda field: in_tiles(field, _BLOCK).flatten(1).contiguous())


def _at(side: Records, row: Tensor, index: Tensor) -> Records:
    return side.map(lambda field: field[row if len(field) > 1 else torch.zeros_like(row), index])


def _score_mod(call: AttentionCall) -> Callable[..., Tensor] | None:
    """Bias and cap of one score."""
    if call.bias is None and call.softcap is None:
        return None
    query, key = (_by_token(side) for side in call.records())
    bias, cap = call.bias, call.softcap

    def change(score: Tensor, b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        if bias is not None:
            sides = (side.map(lambda x: x.view(1, 1, 1, 1)) for side in (_at(query, b, q_index), _at(key, b, k_index)))
            score = score + bias.scores(*sides).flatten()[h]
        return score if cap is None else cap * torch.tanh(score / cap)

    return change
