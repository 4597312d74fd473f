"""Linear map and cross-entropy in one, in chunks: the ``tokens x vocabulary`` logits never exist in training."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from phylon.spec.errors import UserError

IGNORE = -100
_CHUNK_BYTES = 32 * 2**20


class Targets(NamedTuple):
    """What a token-wise head learns: ``ids`` (B, T), -100 ignored; the ``weights`` of the tokens, float (B, T).

    With weights a loss sums ``weight * cross-entropy`` and counts the weights. ``label_smoothing``: the share of each
    target that is spread evenly over the vocabulary (arXiv:1512.00567, section 7).
    """

    ids: Tensor
    weights: Tensor | None = None
    label_smoothing: float = 0.0

    @classmethod
    def of(cls, targets: "Tensor | Targets") -> "Targets":
        """Plain ids as targets; what does not fit is refused."""
        found = targets if isinstance(targets, Targets) else cls(targets)
        if found.weights is not None and found.weights.shape != found.ids.shape:
            raise UserError(f"weights are {tuple(found.weights.shape)}, targets {tuple(found.ids.shape)}")
        if not 0 <= found.label_smoothing < 1:
            raise UserError(f"label_smoothing must be at least 0 and below 1, got {found.label_smoothing}")
        return found


class Loss(NamedTuple):
    """A summed loss and the number of targets it sums over: exact under gradient accumulation."""

    sum: Tensor
    count: Tensor

    @property
    def mean(self) -> Tensor:
        """The mean over targets; 0 when there are none."""
        return self.sum / self.count.clamp(min=1)


def cross_entropy(
    logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0, weights: Tensor | None = None
) -> Loss:
    """The readable form on existing logits (..., V) and targets (...), -100 ignored; computed in at least fp32.

    With ``weights`` (...) the sum is of ``weight * cross-entropy`` and the count that of the weights.
    """
    logits = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    targets = targets.flatten()
    log_probs = torch.log_softmax(logits, dim=-1)
    valid = targets != IGNORE
    picked = log_probs.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    per_token = -(1 - label_smoothing) * picked
    if label_smoothing:  # the mean is infinite where scores are masked, and 0 times that is no number
        per_token = per_token - label_smoothing * log_probs.mean(-1)
    if weights is not None:
        weights = weights.flatten().to(per_token.dtype).masked_fill(~valid, 0)
        return Loss((per_token.masked_fill(~valid, 0) * weights).sum(), weights.sum())
    return Loss(per_token.masked_fill(~valid, 0).sum(), valid.sum())


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    weights: Tensor | None = None,
) -> Loss:
    """Cross-entropy of ``hidden`` (..., D) times ``weight`` (V, D) against ``targets`` (...), -100 ignored.

    ``weights`` (...) as for ``cross_entropy``; they get no gradient.

    The gradient of the scores is formed chunk by chunk in the forward pass (its scale is known: a sum), so peak memory
    beyond inputs and gradients is one chunk of logits. Scores, softmax and the sum are at least fp32.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    hidden, targets = hidden.flatten(0, -2), targets.flatten().long()
    weights = None if weights is None else weights.flatten()
    grad = torch.is_grad_enabled()
    total, count = _LinearCrossEntropy.apply(hidden, weight, bias, targets, weights, softcap, label_smoothing, grad)
    return Loss(total, count)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        weights_N: Tensor | None,
        softcap: float | None,
        smoothing: float,
        grad_enabled: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        compute_VD = weight_VD.to(hidden_ND.dtype)
        if weights_N is not None:
            weights_N = weights_N.to(dtype).masked_fill(targets_N == IGNORE, 0)
        need_h, need_w, need_b = (grad_enabled and need for need in ctx.needs_input_grad[:3])
        grad_h = torch.empty_like(hidden_ND) if need_h else None
        grad_w = torch.zeros_like(weight_VD, dtype=dtype) if need_w else None
        grad_b = torch.zeros_like(bias_V, dtype=dtype) if need_b and bias_V is not None else None
        total = torch.zeros((), dtype=dtype, device=hidden_ND.device)
        rows = max(1, _CHUNK_BYTES // (weight_VD.shape[0] * torch.finfo(dtype).bits // 8))
        for start in range(0, hidden_ND.shape[0], rows):
            h_CD, t_C = hidden_ND[start : start + rows], targets_N[start : start + rows]
            w_C = None if weights_N is None else weights_N[start : start + rows]
            loss, grad_CV = _chunk(
                h_CD @ compute_VD.T, bias_V, t_C, w_C, softcap, smoothing, dtype, need_h or need_w or need_b
            )
            total += loss
            if grad_CV is None:
                continue
            if grad_b is not None:
                grad_b += grad_CV.sum(0)
            grad_CV = grad_CV.to(hidden_ND.dtype)
            if grad_h is not None:
                torch.matmul(grad_CV, compute_VD, out=grad_h[start : start + rows])
            if grad_w is not None:
                grad_w += grad_CV.T @ h_CD
        # Of the sum; the weights' stay wide until the factor of the backward pass is in, so that they round once.
        ctx.grads = (grad_h, grad_w, grad_b)
        ctx.dtypes = (hidden_ND.dtype, weight_VD.dtype, None if bias_V is None else bias_V.dtype)
        count = (targets_N != IGNORE).sum() if weights_N is None else weights_N.sum()
        ctx.mark_non_differentiable(count)
        return total, count

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        grad_total: Tensor = grad_outputs[0]
        # In the total's dtype: a factor such as 1 / count rounded to bf16 would scale every gradient of the model.
        grads = tuple(
            None if grad is None else (grad.to(grad_total.dtype) * grad_total).to(dtype)
            for grad, dtype in zip(ctx.grads, ctx.dtypes, strict=True)
        )
        return (*grads, None, None, None, None, None)


def _chunk(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    weights: Tensor | None,
    softcap: float | None,
    smoothing: float,
    dtype: torch.dtype,
    need_grad: bool,
) -> tuple[Tensor, Tensor | None]:
    """The summed loss of one chunk (C, V), and its gradient with respect to the logits before the cap if needed."""
    logits = logits.to(dtype)
    if bias is not None:
        logits = logits + bias.to(dtype)
    slope = None
    if softcap is not None:
        tanh = torch.tanh(logits / softcap)
        logits, slope = softcap * tanh, 1 - tanh.square()
    valid = targets != IGNORE
    index = targets.clamp(min=0)[:, None]
    log_z = torch.logsumexp(logits, dim=-1, keepdim=True)
    per_token = log_z - (1 - smoothing) * logits.gather(-1, index) - smoothing * logits.mean(-1, keepdim=True)
    per_token = per_token[:, 0].masked_fill(~valid, 0)
    loss = per_token.sum() if weights is None else (per_token * weights).sum()
    if not need_grad:
        return loss, None
    grad = torch.exp(logits - log_z)
    grad.scatter_add_(-1, index, torch.full_like(index, -(1 - smoothing), dtype=dtype))
    if smoothing:
        grad -= smoothing / logits.shape[-1]
    if slope is not None:
        grad *= slope
    if weights is not None:
        grad *= weights[:, None]
    return loss, grad.masked_fill_(~valid[:, None], 0)
