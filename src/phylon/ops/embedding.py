"""Rows of a table of vectors, and the table itself for a head that shares it."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from phylon.ops.backward import as_forward
from phylon.ops.checks import transformed


def embedding(ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """``weight[ids]`` (..., D) of ids (...) below V, and ``weight`` (V, D) for a tied head.

    In training on a CPU both are of one node of the graph. Its backward pass adds the embedding's rows, those of equal
    ids summed in at least fp32 and in the order of the ids, into the gradient that comes from the head, so that none of
    the embedding's own lies beside that. It is changed in place: give the second result to nothing but
    ``linear_cross_entropy``, whose gradient is nobody else's, or to ``embedding`` again, as a decoder does with the
    table of its encoder: the rows of both go into the head's gradient.
    """
    trains = weight.requires_grad and torch.is_grad_enabled()
    if not trains or torch.compiler.is_compiling() or transformed() or weight.device.type != "cpu":
        return F.embedding(ids, weight), weight
    return _Table.apply(ids, weight)


class _Table(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[bad-override]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ids)
        ctx.shape = weight.shape
        return F.embedding(ids, weight), weight.view_as(weight)

    @staticmethod
    @as_forward
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[None, Tensor | None]:  # type: ignore[bad-override]
        (ids,), (of_rows, of_table) = ctx.saved_tensors, grad_outputs
        if of_rows is None:
            return None, of_table
        n, width = ctx.shape
        of_rows = of_rows.reshape(-1, width)
        # Enabled: the gradient is to be differentiated in turn. Transformed: there are several at once.
        if of_table is None or torch.is_grad_enabled() or transformed(of_rows, of_table):
            of_ids = torch.ops.aten.embedding_dense_backward(of_rows, ids.flatten(), n, -1, False)
            return None, of_ids if of_table is None else of_table + of_ids
        read, place = ids.flatten().unique(return_inverse=True)
        wide = of_rows.to(torch.promote_types(of_rows.dtype, torch.float32))
        summed = torch.ops.aten.embedding_dense_backward(wide, place, len(read), -1, False)
        return None, of_table.index_put_((read,), summed.add_(of_table[read]).to(of_table.dtype))
