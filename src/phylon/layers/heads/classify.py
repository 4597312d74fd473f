"""Heads of encoders: classes of documents and tokens, pooled vectors, answer spans, masked tokens."""

import torch
from torch import Tensor

from phylon.layers.context import Context
from phylon.layers.ffn.mlp import dropped
from phylon.layers.heads.pools import First, Last, Mean
from phylon.layers.norms import LayerNorm
from phylon.layers.part import Linear, Part, is_map
from phylon.ops.activation import ACTIVATIONS, check_activation
from phylon.ops.loss import IGNORE, Loss, Targets, cross_entropy, linear_cross_entropy
from phylon.spec.base import Head, Mechanism, Norm, Pool
from phylon.spec.errors import UserError, check_rate
from phylon.spec.registry import build, register


class Classify(Mechanism, Head, frozen=True, kw_only=True):
    """``proj(act?(dense?(pool(hidden))))``: scores of ``n_classes`` for every document, or without a pool every token.

    BERT (arXiv:1810.04805), sections 3.1 (next sentence) and 4; ViT (arXiv:2010.11929), section 3.1. ``activation`` is
    that of a dense map (D, D) before the output, which is there if it is given. hidden (B, T, D) to (documents, C), or
    (B, T, C). Targets are class numbers of the same shape, -100 ignored. Cost: ``2 D (D + C)`` a document.
    """

    n_classes: int
    pool: Pool | None = None
    activation: str | None = None
    bias: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.n_classes < 1:
            raise UserError(f"n_classes must be at least 1, got {self.n_classes}")
        _check(self.activation, self.dropout)

    @property
    def per_document(self) -> bool:
        return self.pool is not None


class Pooled(Mechanism, Head, frozen=True, kw_only=True):
    """``act?(dense?(pool(hidden)))``: one vector a document. BERT's pooler (arXiv:1810.04805, released code).

    Without an activation there is no dense map: sentence embeddings (arXiv:1908.10084), section 3. hidden (B, T, D) to
    (documents, D). It has no loss of its own.
    """

    pool: Pool
    activation: str | None = None

    def __post_init__(self) -> None:
        _check(self.activation, 0.0)

    @property
    def per_document(self) -> bool:
        return True


class Span(Mechanism, Head, frozen=True, kw_only=True):
    """Scores of being the start and the end of an answer: hidden (B, T, D) to (B, T, 2). BERT (arXiv:1810.04805), §4.2.

    Targets (B, 2) are the columns of start and end; a column outside of the row is ignored. Cost: ``4 D`` a token.
    """

    dropout: float = 0.0

    def __post_init__(self) -> None:
        _check(None, self.dropout)


class MaskedLM(Mechanism, Head, frozen=True, kw_only=True):
    """``proj(norm(act(dense(hidden)))) + b`` over the vocabulary; tie ``proj.weight`` to share the embedding.

    BERT (arXiv:1810.04805), section 3.1, task 1, released code. hidden (B, T, D) to (B, T, V). Targets (B, T), -100
    ignored. Cost of a token: ``2 D (D + V)``.
    """

    vocab_size: int
    norm: Norm = LayerNorm(eps=1e-12)
    activation: str = "gelu"

    def __post_init__(self) -> None:
        check_activation(self.activation)
        if self.vocab_size < 1:
            raise UserError(f"vocab_size must be at least 1, got {self.vocab_size}")


def _check(activation: str | None, dropout: float) -> None:
    check_rate("dropout", dropout)
    if activation is not None:
        check_activation(activation)


class ClassifyModule(Part):
    def __init__(self, spec: Classify, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.token_wise = spec.pool is None
        self.pool = None if spec.pool is None else build(spec.pool)
        self.dense = None if spec.activation is None else Linear(d_model, d_model, bias=True, role="head")
        self.proj = Linear(d_model, spec.n_classes, bias=spec.bias, role="head")

    def forward(self, hidden: Tensor, ctx: Context) -> Tensor:
        x = hidden if self.pool is None else self.pool(hidden, ctx)
        if self.dense is not None:
            x = ACTIVATIONS[self.spec.activation or ""](self.dense(x))
        return self.proj(dropped(x, self.spec.dropout, self.training))

    def loss(self, hidden: Tensor, targets: Tensor | Targets, ctx: Context) -> Loss:
        targets, weights, smoothing, z_loss = Targets.of(targets)
        scores = self(hidden, ctx)
        if targets.shape != scores.shape[:-1]:
            raise UserError(f"targets are {tuple(targets.shape)}, scores {tuple(scores.shape[:-1])}; they must agree")
        if targets.device.type == "cpu" and targets.numel() and int(targets.max()) >= self.spec.n_classes:
            raise UserError(f"class {int(targets.max())} is out of range: the head has {self.spec.n_classes}")
        return cross_entropy(scores, targets, label_smoothing=smoothing, weights=weights, z_loss=z_loss)


class PooledModule(Part):
    token_wise = False

    def __init__(self, spec: Pooled, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.pool = build(spec.pool)
        self.dense = None if spec.activation is None else Linear(d_model, d_model, bias=True, role="head")

    def forward(self, hidden: Tensor, ctx: Context) -> Tensor:
        x = self.pool(hidden, ctx)
        return x if self.dense is None else ACTIVATIONS[self.spec.activation or ""](self.dense(x))

    def loss(self, hidden: Tensor, targets: Tensor, ctx: Context) -> Loss:
        raise UserError("a pooled vector has no targets; give them to a head that classifies")


class SpanModule(Part):
    token_wise = False

    def __init__(self, spec: Span, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.proj = Linear(d_model, 2, bias=True, role="head")

    def forward(self, hidden: Tensor, ctx: Context) -> Tensor:
        return self.proj(dropped(hidden, self.spec.dropout, self.training))

    def loss(self, hidden: Tensor, targets: Tensor | Targets, ctx: Context) -> Loss:
        targets, weights, smoothing, z_loss = Targets.of(targets)
        if targets.shape != (len(hidden), 2):
            raise UserError(f"span targets must be ({len(hidden)}, 2), got {tuple(targets.shape)}")
        scores = self(hidden, ctx).transpose(1, 2)
        if ctx.records.segments is not None:
            scores = scores.masked_fill((ctx.records.segments == 0)[:, None], torch.finfo(scores.dtype).min)
        inside = (targets >= 0) & (targets < hidden.shape[1])
        asked = torch.where(inside, targets, IGNORE)
        return cross_entropy(scores, asked, label_smoothing=smoothing, weights=weights, z_loss=z_loss)


class MaskedLMModule(Part):
    token_wise = True

    def __init__(self, spec: MaskedLM, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.dense = Linear(d_model, d_model, bias=True, role="head")
        self.norm = build(spec.norm, d_model)
        self.proj = Linear(d_model, spec.vocab_size, bias=True, role="head")

    def transform(self, hidden: Tensor) -> Tensor:
        """(…, D) to (…, D): what the output map reads."""
        return self.norm(ACTIVATIONS[self.spec.activation](self.dense(hidden)))

    def forward(self, hidden: Tensor, ctx: Context) -> Tensor:
        return self.proj(self.transform(hidden))

    def loss(self, hidden: Tensor, targets: Tensor | Targets, ctx: Context) -> Loss:
        targets, weights, smoothing, z_loss = Targets.of(targets)
        if targets.shape != hidden.shape[:-1]:
            raise UserError(f"targets are {tuple(targets.shape)}, tokens {tuple(hidden.shape[:-1])}; they must agree")
        # About one token in seven is asked for; the others need no scores.
        asked = targets != IGNORE
        weights = None if weights is None else weights[asked]
        hidden, targets = hidden[asked], targets[asked]
        if not is_map(self.proj):
            scores = self(hidden, ctx)
            return cross_entropy(scores, targets, label_smoothing=smoothing, weights=weights, z_loss=z_loss)
        return linear_cross_entropy(
            self.transform(hidden),
            ctx.tables.get(self.proj.weight, self.proj.weight),
            targets,
            bias=self.proj.bias,
            label_smoothing=smoothing,
            weights=weights,
            z_loss=z_loss,
        )


register(
    Classify,
    module=ClassifyModule,
    paper="arXiv:1810.04805 §4",
    cases=lambda: [
        Classify(n_classes=3, pool=First(), activation="tanh"),
        Classify(n_classes=2, pool=Mean()),
        Classify(n_classes=5),
    ],
    flops=lambda spec, width, n_keys: 2 * width * ((width if spec.activation else 0) + spec.n_classes),
)
register(
    Pooled,
    module=PooledModule,
    paper="arXiv:1908.10084 §3",
    cases=lambda: [Pooled(pool=First(), activation="tanh"), Pooled(pool=Mean()), Pooled(pool=Last())],
    flops=lambda spec, width, n_keys: 2 * width * width if spec.activation else 0,
)
register(
    Span,
    module=SpanModule,
    paper="arXiv:1810.04805 §4.2",
    cases=lambda: [Span()],
    flops=lambda spec, width, n_keys: 4 * width,
)
register(
    MaskedLM,
    module=MaskedLMModule,
    paper="arXiv:1810.04805 §3.1",
    cases=lambda: [MaskedLM(vocab_size=11)],
    flops=lambda spec, width, n_keys: 2 * width * (width + spec.vocab_size),
)
