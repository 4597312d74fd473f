"""From scores to losses and back in one chunk (C, V), behind one dispatch: the heart of ``phylon.ops.loss``."""

from dataclasses import dataclass

import torch
from torch import Tensor

from phylon.ops.dispatch import Dispatch
from phylon.ops.rows import native as rows


@dataclass(kw_only=True)
class ScoresCall:
    """``scores`` (C, V) in at least fp32 that a backend may overwrite; ``targets`` (C,), below 0 ignored.

    A token's loss is ``weight * (log_z - (1 - smoothing) score[target] - smoothing mean(scores) + z_loss log_z^2)``,
    scores after ``bias`` (V,) and ``softcap``. A backend gives the sum over tokens and, where ``grad`` asks for it, its
    gradient (C, V) with respect to the scores before both.
    """

    scores: Tensor
    targets: Tensor
    bias: Tensor | None = None
    weights: Tensor | None = None
    softcap: float | None = None
    smoothing: float = 0.0
    z_loss: float = 0.0
    grad: bool = True


class Native:
    """C++ on CPUs: three passes over a row while it is in the cache, the gradient in the scores' own memory."""

    name = "native"

    def available(self) -> str | None:
        return rows.LIBRARY.reason()

    def supports(self, call: ScoresCall) -> str | None:
        if call.scores.dtype != torch.float32 or not call.scores.is_contiguous():
            return "it takes dense float32 scores"
        return rows.refusal(call.scores)

    def run(self, call: ScoresCall) -> tuple[Tensor, Tensor | None]:
        losses = rows.scores_loss(
            call.scores,
            rows.wide(call.bias),
            call.targets.contiguous(),
            rows.wide(call.weights),
            call.softcap,
            call.smoothing,
            call.z_loss,
            call.grad,
        )
        return losses.sum(), call.scores if call.grad else None


class Reference:
    """PyTorch's own ops, one after the other. Supports everything."""

    name = "reference"

    def available(self) -> str | None:
        return None

    def supports(self, call: ScoresCall) -> str | None:
        return None

    def run(self, call: ScoresCall) -> tuple[Tensor, Tensor | None]:
        scores, dtype, smoothing, slope = call.scores, call.scores.dtype, call.smoothing, None
        if call.bias is not None:
            scores = scores + call.bias.to(dtype)
        if call.softcap is not None:
            tanh = torch.tanh(scores / call.softcap)
            scores, slope = call.softcap * tanh, 1 - tanh.square()
        ignored = call.targets < 0
        index = call.targets.clamp(min=0)[:, None]
        log_z = torch.logsumexp(scores, dim=-1, keepdim=True)
        per_token = log_z - (1 - smoothing) * scores.gather(-1, index)
        if smoothing:  # the mean is infinite where a bias masks scores, and 0 times that is no number
            per_token = per_token - smoothing * scores.mean(-1, keepdim=True)
        per_token = (per_token + call.z_loss * log_z.square())[:, 0].masked_fill(ignored, 0)
        loss = per_token.sum() if call.weights is None else (per_token * call.weights).sum()
        if not call.grad:
            return loss, None
        grad = torch.exp(scores - log_z) * (1 + 2 * call.z_loss * log_z)
        grad.scatter_add_(-1, index, torch.full_like(index, -(1 - smoothing), dtype=dtype))
        if smoothing:
            grad -= smoothing / scores.shape[-1]
        if slope is not None:
            grad *= slope
        if call.weights is not None:
            grad *= call.weights[:, None]
        return loss, grad.masked_fill_(ignored[:, None], 0)


dispatch: Dispatch[ScoresCall] = Dispatch("scores", [Native(), Reference()])
