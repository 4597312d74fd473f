"""A small model and a stand-in for the loader: batches as a pure function of the step."""

from typing import Any

import torch

from phylon.layers.embeddings.tokens import TokenEmbed
from phylon.layers.ffn.mlp import MLP
from phylon.layers.heads.lm import LMHead
from phylon.layers.inits import FanInInit
from phylon.layers.mixers.attention import Attention
from phylon.layers.norms import LayerNorm
from phylon.layers.positions.absolute import LearnedPositions
from phylon.model import Block, ModelSpec, Stack, Tie, build, pre_norm
from phylon.train import AdamW, DataRecipe, Recipe, RunRecipe

VOCAB, LENGTH = 13, 12


def toy_spec(dropout: float = 0.0) -> ModelSpec:
    attention = Attention(n_heads=2, n_kv_heads=1, head_dim=8, dropout=dropout)
    block = Block(
        sublayers=(
            pre_norm(attention, LayerNorm(), drop=dropout),
            pre_norm(MLP(d_ff=24, dropout=dropout), LayerNorm(), drop=dropout),
        )
    )
    embed = TokenEmbed(vocab_size=VOCAB, positions=LearnedPositions(max_seq_len=LENGTH), dropout=dropout)
    return ModelSpec(
        decoder=Stack(d_model=16, embed=embed, blocks=(block, block), norm_final=LayerNorm()),
        heads={"lm": LMHead(vocab_size=VOCAB)},
        ties=(Tie(name="heads.lm.proj.weight", source="decoder.embed.tokens.weight"),),
        init=FanInInit(gain=2.0),
        max_seq_len=LENGTH,
    )


def toy_model(dropout: float = 0.0, **options: Any):
    return build(toy_spec(dropout), seed=3, device="cpu", **options)


def toy_recipe(*, optim: AdamW | None = None, **run: Any) -> Recipe:
    return Recipe(
        model={"family": "toy"},
        data=DataRecipe(seq_len=LENGTH),
        optim=optim or AdamW(lr=1e-2, clip=1.0),
        run=RunRecipe(**{"steps": 20, "batch_size": 4, "seed": 5, **run}),
    )


class ToyLoader:
    """Random documents of unequal lengths, padded to rows; ``poison`` maps a step to another batch."""

    def __init__(self, batch_size: int = 4, seed: int = 0) -> None:
        self.batch_size, self.seed, self.step = batch_size, seed, 0

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(1000 * self.seed + step)
        tokens = torch.randint(VOCAB, (self.batch_size, LENGTH), generator=draw)
        lengths = torch.randint(3, LENGTH + 1, (self.batch_size, 1), generator=draw)
        segments = (torch.arange(LENGTH) < lengths).long()
        targets = torch.full_like(tokens, -100)
        targets[:, :-1] = torch.where(segments[:, 1:] == 1, tokens[:, 1:], -100)
        return {"tokens": tokens, "segments": segments, "targets": targets}

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "batch_size": self.batch_size, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        from phylon.spec import UserError

        if (state["batch_size"], state["seed"]) != (self.batch_size, self.seed):
            raise UserError(f"the data position cannot be resumed: seed was {state['seed']} and is now {self.seed}")
        self.step = state["step"]
