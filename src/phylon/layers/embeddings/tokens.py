"""Token embedding: ids to vectors, with scale, segment types, absolute positions, norm and dropout."""

import torch
from torch import Tensor

from phylon.layers.context import Context
from phylon.layers.ffn.mlp import dropped
from phylon.layers.part import Embedding, Part
from phylon.spec.base import Embed, Mechanism, Norm, Position
from phylon.spec.errors import UserError, check_finite, check_rate
from phylon.spec.registry import build, register


class TokenEmbed(Mechanism, Embed, frozen=True, kw_only=True):
    """``dropout(norm?(scale * tokens[id] + types[type]? + positions(pos)?))``.

    *Attention Is All You Need* (arXiv:1706.03762), sections 3.4 (scale ``sqrt(D)``) and 3.5 (positions); segment types
    and the norm: BERT (arXiv:1810.04805), figure 2. Ids (B, T) to (B, T, D).
    """

    vocab_size: int
    scale: float | None = None
    n_types: int | None = None
    positions: Position | None = None
    norm: Norm | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.vocab_size < 1:
            raise UserError(f"vocab_size must be at least 1, got {self.vocab_size}")
        if self.n_types is not None and self.n_types < 1:
            raise UserError(f"n_types must be at least 1, got {self.n_types}")
        check_finite("scale", self.scale)
        check_rate("dropout", self.dropout)


class TokenEmbedModule(Part):
    def __init__(self, spec: TokenEmbed, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.tokens = Embedding(spec.vocab_size, d_model)
        self.types = None if spec.n_types is None else Embedding(spec.n_types, d_model)
        self.positions = None if spec.positions is None else build(spec.positions, d_model)
        self.norm = None if spec.norm is None else build(spec.norm, d_model)

    def forward(self, tokens: Tensor | None, embeds: Tensor | None, ctx: Context) -> Tensor:
        """``tokens`` (B, T), or their vectors ``embeds`` (B, T, D) in place of the table's."""
        if embeds is None:
            assert tokens is not None
            ids = _in_range(tokens, self.spec.vocab_size, "token id", "the vocabulary")
            own = getattr(self.tokens.forward, "__func__", None) is Embedding.forward  # else somebody's in its place
            embeds = self.tokens(ids, tables=ctx.tables) if own else self.tokens(ids)
        x = embeds if self.spec.scale is None else embeds * self.spec.scale
        if self.types is not None:
            x = x + self._type_vectors(ctx)
        elif ctx.types is not None:
            raise UserError("this model has no segment types; leave out 'types'")
        if self.positions is not None:
            x = x + self.positions(ctx.records.positions).to(x.dtype)
        x = x if self.norm is None else self.norm(x)
        return dropped(x, self.spec.dropout, self.training)

    def _type_vectors(self, ctx: Context) -> Tensor:
        assert self.types is not None
        if ctx.types is None:
            return self.types(ctx.records.positions.new_zeros(1, 1))
        return self.types(_in_range(ctx.types, self.types.num_embeddings, "type", "the model"))


def _in_range(ids: Tensor, n: int, what: str, where: str) -> Tensor:
    # On a GPU the look-up itself traps, and asking would cost a synchronisation.
    if ids.device.type == "cpu" and ids.numel():
        low, high = (int(i) for i in torch.aminmax(ids))
        if low < 0 or high >= n:
            raise UserError(f"{what} {low if low < 0 else high} is out of range: {where} has {n} entries")
    return ids


register(
    TokenEmbed,
    module=TokenEmbedModule,
    paper="arXiv:1706.03762 §3.4",
    cases=lambda: [TokenEmbed(vocab_size=11), TokenEmbed(vocab_size=11, scale=4.0)],
    flops=lambda spec, width, n_keys: 0,
)
