"""The language-model head."""

import torch
from torch import Tensor

from phylon.layers.context import Context
from phylon.layers.part import Linear, Part, is_map
from phylon.ops.loss import Loss, Targets, cross_entropy, linear_cross_entropy
from phylon.spec.base import Head, Mechanism
from phylon.spec.errors import UserError, check_finite
from phylon.spec.registry import register


class LMHead(Mechanism, Head, frozen=True, kw_only=True):
    """Scores of the next token: ``softcap?(scale * hidden W^T + b?)``; tie ``proj.weight`` to share the embedding.

    *Attention Is All You Need* (arXiv:1706.03762), section 3.4; softcap: Gemma 2 (arXiv:2408.00118), section 2.
    hidden (B, T, D) to logits (B, T, V). Targets (B, T) or ``Targets``: the id to predict at each place, -100 ignored.
    Cost of a token: ``2 D V``.
    """

    vocab_size: int
    bias: bool = False
    scale: float | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.vocab_size < 1:
            raise UserError(f"vocab_size must be at least 1, got {self.vocab_size}")
        check_finite("scale", self.scale)
        check_finite("softcap", self.softcap, above=0)


class LMHeadModule(Part):
    token_wise = True

    def __init__(self, spec: LMHead, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.proj = Linear(d_model, spec.vocab_size, bias=spec.bias, role="head")

    def forward(self, hidden: Tensor, ctx: Context) -> Tensor:
        hidden = hidden if self.spec.scale is None else hidden * self.spec.scale
        logits = self.proj(hidden)
        if self.spec.softcap is not None:
            logits = self.spec.softcap * torch.tanh(logits / self.spec.softcap)
        return logits

    def loss(self, hidden: Tensor, targets: Tensor | Targets, ctx: Context) -> Loss:
        """Summed cross-entropy and its count, without the (B, T, V) logits where ``proj`` is a linear map alone."""
        targets, weights, smoothing, z_loss = Targets.of(targets)
        if not is_map(self.proj):
            scores = self(hidden, ctx)
            return cross_entropy(scores, targets, label_smoothing=smoothing, weights=weights, z_loss=z_loss)
        hidden = hidden if self.spec.scale is None else hidden * self.spec.scale
        weight, bias = ctx.tables.get(self.proj.weight, self.proj.weight), self.proj.bias
        softcap = self.spec.softcap
        return linear_cross_entropy(
            hidden,
            weight,
            targets,
            bias=bias,
            softcap=softcap,
            label_smoothing=smoothing,
            weights=weights,
            z_loss=z_loss,
        )


register(
    LMHead,
    module=LMHeadModule,
    paper="arXiv:1706.03762 §3.4",
    cases=lambda: [LMHead(vocab_size=11), LMHead(vocab_size=11, bias=True, softcap=3.0)],
    flops=lambda spec, width, n_keys: 2 * width * spec.vocab_size,
)
