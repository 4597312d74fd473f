"""Linear map and cross-entropy in one, in chunks: the ``tokens x vocabulary`` logits never exist in training."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phylon.ops.backward import once
from phylon.ops.checks import check_floats, may_ask, transformed
from phylon.ops.products import as_given, compute_dtype, operand, widened
from phylon.ops.scores import ScoresCall, dispatch
from phylon.spec.errors import UserError

IGNORE = -100
_CHUNK_BYTES = 44 * 2**20
"""So much of the scores may exist at a time, however few tokens there are."""
_SHARE, _SHARED_BYTES = 4, 128 * 2**20
"""Every fourth token's scores may, up to so many bytes: an eighth of what scores and log-probabilities of all take."""
_CACHE_BYTES = 8 * 2**20
"""Scores of this size are still in a cache when they are needed again."""


class Targets(NamedTuple):
    """What a token-wise head learns: ``ids`` (B, T), -100 ignored; the ``weights`` of the tokens, float (B, T).

    With weights a loss sums ``weight * cross-entropy`` and counts the weights. ``label_smoothing``: the share of each
    target that is spread evenly over the vocabulary (arXiv:1512.00567, section 7). ``z_loss`` times the square of the
    log of the softmax's sum is added to every token's loss (PaLM, arXiv:2204.02311, section 5: 1e-4).
    """

    ids: Tensor
    weights: Tensor | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    @classmethod
    def of(cls, targets: "Tensor | Targets") -> "Targets":
        """Plain ids as targets; what does not fit is refused."""
        found = targets if isinstance(targets, Targets) else cls(targets)
        if found.weights is not None and found.weights.shape != found.ids.shape:
            raise UserError(f"weights are {tuple(found.weights.shape)}, targets {tuple(found.ids.shape)}")
        if not 0 <= found.label_smoothing < 1:
            raise UserError(f"label_smoothing must be at least 0 and below 1, got {found.label_smoothing}")
        if not found.z_loss >= 0:
            raise UserError(f"z_loss must be at least 0, got {found.z_loss}")
        return found


class Loss(NamedTuple):
    """A summed loss and the number of targets it sums over (or their weights): exact under gradient accumulation."""

    sum: Tensor
    count: Tensor

    @property
    def mean(self) -> Tensor:
        """The mean over targets; 0 when there are none."""
        return self.sum / self.count.where(self.count != 0, 1)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    label_smoothing: float = 0.0,
    weights: Tensor | None = None,
    z_loss: float = 0.0,
) -> Loss:
    """The readable form on existing logits (..., V) and targets (...), -100 ignored; computed in at least fp32.

    With ``weights`` (...) the sum is of ``weight * cross-entropy`` and the count that of the weights. ``z_loss`` as for
    ``Targets``.
    """
    found = Targets.of(Targets(targets, weights, label_smoothing, z_loss))
    check_floats("cross-entropy", logits=logits)
    _check_ids(found.ids, logits.shape[:-1], logits.shape[-1] if logits.ndim else 0)
    logits = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    targets = targets.flatten().long()
    log_z = torch.logsumexp(logits, dim=-1, keepdim=True)
    log_probs = logits - log_z
    valid = targets != IGNORE
    picked = log_probs.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    per_token = -(1 - label_smoothing) * picked
    if label_smoothing:  # the mean is infinite where scores are masked, and 0 times that is no number
        per_token = per_token - label_smoothing * log_probs.mean(-1)
    per_token = (per_token + z_loss * log_z[:, 0].square()).masked_fill(~valid, 0)
    if weights is not None:
        weights = weights.flatten().to(per_token.dtype).masked_fill(~valid, 0)
        return Loss((per_token * weights).sum(), weights.sum())
    return Loss(per_token.sum(), valid.sum())


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    weights: Tensor | None = None,
    z_loss: float = 0.0,
) -> Loss:
    """Cross-entropy of ``hidden`` (..., D) times ``weight`` (V, D) against ``targets`` (...), -100 ignored.

    ``weights`` (...) as for ``cross_entropy``; they get no gradient. ``z_loss`` as for ``Targets``.

    The gradient of the scores is formed chunk by chunk in the forward pass (its scale is known: a sum), so peak memory
    beyond inputs and gradients is one chunk of logits. Scores, softmax and the sum are at least fp32. Under
    ``torch.func`` and in forward mode, which see into PyTorch's operations alone, all logits exist.
    """
    _check(hidden, weight, bias, Targets.of(Targets(targets, weights, label_smoothing, z_loss)))
    if softcap is not None and not 0 < softcap < math.inf:
        raise UserError(f"softcap must be above 0 and finite, got {softcap}")
    dtype = compute_dtype(hidden)
    hidden, targets = hidden.flatten(0, -2).to(dtype), targets.flatten().long()
    weights = None if weights is None else weights.flatten()
    options = _Options(softcap, label_smoothing, z_loss, torch.is_grad_enabled())
    with as_given(hidden):
        if transformed():
            logits = _logits(hidden, weight, bias, softcap)
            weights = None if weights is None else weights.detach()
            return cross_entropy(logits, targets, label_smoothing=label_smoothing, weights=weights, z_loss=z_loss)
        total, count = _LinearCrossEntropy.apply(hidden, weight, bias, targets, weights, options)
    return Loss(total, count)


def _logits(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, softcap: float | None) -> Tensor:
    """The scores (N, V) as the chunks have them, in at least fp32."""
    dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
    scores = (operand(hidden_ND, hidden_ND.dtype) @ operand(weight_VD, hidden_ND.dtype).T).to(dtype)
    scores = scores if bias_V is None else scores + bias_V.to(dtype)
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _check(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets) -> None:
    check_floats("cross-entropy", hidden=hidden, weight=weight, bias=bias)
    if (
        weight.ndim != 2
        or weight.shape[1:] != hidden.shape[-1:]
        or (bias is not None and bias.shape != weight.shape[:1])
    ):
        shapes = " and ".join(str(tuple(x.shape)) for x in (weight, bias) if x is not None)
        raise UserError(f"weights {shapes} do not fit hidden states of width {hidden.shape[-1]}")
    _check_ids(targets.ids, hidden.shape[:-1], len(weight))


def _check_ids(ids: Tensor, tokens: torch.Size, n: int) -> None:
    """Kernels write where a target points."""
    if n == 0:
        raise UserError("cross-entropy needs a vocabulary of at least one")
    if ids.shape != tokens:
        raise UserError(f"targets are {tuple(ids.shape)}, tokens {tuple(tokens)}; they must agree")
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise UserError(f"targets must be int64, got {ids.dtype}")
    if may_ask(ids):
        wrong = ids[((ids < 0) & (ids != IGNORE)) | (ids >= n)]
        if len(wrong):
            raise UserError(f"target id {int(wrong[0])} is out of range: the head has {n}, and {IGNORE} is ignored")


class _Options(NamedTuple):
    softcap: float | None
    smoothing: float
    z_loss: float
    grad: bool


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        weights_N: Tensor | None,
        options: _Options,
    ) -> tuple[Tensor, Tensor]:
        if weights_N is not None:
            dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
            weights_N = weights_N.to(dtype).masked_fill(targets_N == IGNORE, 0)
        ctx.options, ctx.needs = options, tuple(options.grad and need for need in ctx.needs_input_grad[:3])
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, weights_N)
        total, ctx.grads = _sum_and_gradients(hidden_ND, weight_VD, bias_V, targets_N, weights_N, options, ctx.needs)
        ctx.dtypes = (hidden_ND.dtype, weight_VD.dtype, None if bias_V is None else bias_V.dtype)
        count = (targets_N != IGNORE).sum() if weights_N is None else weights_N.sum()
        ctx.mark_non_differentiable(count)
        return total, count

    @staticmethod
    @once("linear_cross_entropy", "use cross_entropy of the logits")
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:  # type: ignore[bad-override]
        grads, ctx.grads = ctx.grads, None
        if grads is None:  # a second backward pass through a graph that was kept
            hidden_ND, weight_VD, bias_V, targets_N, weights_N = ctx.saved_tensors
            _, grads = _sum_and_gradients(hidden_ND, weight_VD, bias_V, targets_N, weights_N, ctx.options, ctx.needs)
        made = tuple(_scaled(grad, grad_outputs[0], dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True))
        return (*made, None, None, None)


def _scaled(grad: Tensor | None, factor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """``grad * factor``, rounded once. The factor stays wide: 1 / count in bf16 would scale all gradients."""
    if grad is None:
        return None
    if factor.device.type == "cpu" and float(factor) == 1:
        return grad.to(dtype)
    wide = grad.to(factor.dtype)
    return (wide.mul_(factor) if wide is grad else wide * factor).to(dtype)


def _sum_and_gradients(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    weights_N: Tensor | None,
    options: _Options,
    needs: tuple[bool, ...],
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The summed loss, and the gradients of that sum: the weights' and the bias's in at least fp32."""
    dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
    low = hidden_ND.dtype != dtype and not widened(hidden_ND)
    compute_VD = operand(weight_VD, hidden_ND.dtype)
    need_h, need_w, need_b = needs
    grad_h = torch.empty_like(hidden_ND) if need_h else None
    grad_w = torch.empty_like(weight_VD, dtype=dtype) if need_w else None
    grad_b = torch.zeros_like(bias_V, dtype=dtype) if need_b and bias_V is not None else None
    total = torch.zeros((), dtype=dtype, device=hidden_ND.device)
    rows = _chunk_rows(len(hidden_ND), weight_VD.shape, torch.finfo(dtype).bits // 8, low)
    for start in range(0, max(1, hidden_ND.shape[0]), rows):
        part = slice(start, start + rows)
        h_CD, ignored = hidden_ND[part], targets_N[part] == IGNORE
        if not may_ask(ignored) or bool(ignored.any()):
            # It can hold anything, and 0 * NaN would be NaN in the weights' gradient.
            h_CD = h_CD.masked_fill(ignored[:, None], 0)
        h_CD = operand(h_CD, hidden_ND.dtype)
        call = ScoresCall(
            scores=(h_CD @ compute_VD.T).to(dtype),
            targets=targets_N[part],
            bias=bias_V,
            weights=None if weights_N is None else weights_N[part],
            softcap=options.softcap,
            smoothing=options.smoothing,
            z_loss=options.z_loss,
            grad=any(needs),
        )
        loss, grad_CV = dispatch.pick(call).run(call)
        total += loss
        if grad_CV is None:
            continue
        if grad_b is not None:
            grad_b += grad_CV.sum(0)
        grad_CV = grad_CV.to(h_CD.dtype)
        if grad_h is not None:
            grad_h[part] = grad_CV @ compute_VD
        if grad_w is not None:
            _add_product(grad_w, grad_CV.T, h_CD, first=start == 0)
        del call, grad_CV
    return total, (grad_h, grad_w, grad_b)


def _chunk_rows(tokens: int, shape: torch.Size, width: int, low: bool) -> int:
    """Tokens of a chunk: its scores should stay in a cache, but every chunk reads and writes the weights' gradient."""
    n, d = shape
    a_token = n * width * (2 if low else 1)  # below fp32 a chunk exists a second and a third time in half the width
    at_once = min(_CHUNK_BYTES, max(_CACHE_BYTES, 2 * n * d * width)) // a_token
    at_once = max(1, at_once, min(tokens // _SHARE, _SHARED_BYTES // a_token))
    return -(-tokens // -(-tokens // at_once)) if tokens else 1


def _add_product(out: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """``out += a b``, or ``out = a b`` for the first, without a copy in between where the dtypes agree."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out) if first else out.addmm_(a, b)
    elif first:
        out.copy_(a @ b)
    else:
        out += a @ b
