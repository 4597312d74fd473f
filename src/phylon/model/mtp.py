"""Multi-token prediction: a head with a block of its own that predicts one token further ahead."""

from typing import Any, Self

import torch
from torch import Tensor

from phylon.layers.context import Context
from phylon.layers.ffn.mlp import GLU
from phylon.layers.heads.lm import LMHead
from phylon.layers.mixers.attention import Attention
from phylon.layers.norms import RMSNorm
from phylon.layers.part import Linear, Part
from phylon.layers.positions.rotary import Rotary
from phylon.layers.state import Chunk, RecurrentState, State
from phylon.layers.state.part import StatePart
from phylon.model.block import BlockModule
from phylon.model.spec import Block, pre_norm
from phylon.ops.loss import IGNORE, Loss
from phylon.patterns import Records
from phylon.spec.base import Head, Mechanism, Mixer, Norm
from phylon.spec.errors import UserError
from phylon.spec.registry import build, entry_of, register


class MTP(Mechanism, Head, frozen=True, kw_only=True, tag="mtp"):
    """``lm(norm(block(proj [norm(e_j); norm(h_{j-1})])))``: from what the model knew before token j, and token j.

    DeepSeek-V3 (arXiv:2412.19437), section 2.2, equations 21 to 23, with one depth. ``h`` (B, T, D) are the model's
    final hidden states, ``e`` (B, T, D) its embeddings, handed over by the model; tie ``lm.proj.weight`` to the main
    head. Scores stand at the newest token they know, so that their targets are the main head's: at token j the main
    head predicts j + 1 knowing h_j, this one knowing h_{j-1} and the token itself, which is one ahead of the main
    model. The first token of a document has no h before it: its scores are 0, it has no loss, and no later token sees
    it. The state keeps the block's own, and the last h of each row. Cost of a token: the block, the head, ``4 D^2``.
    """

    block: Block
    norm: Norm = RMSNorm()
    lm: LMHead


class MTPModule(Part):
    token_wise = False

    def __init__(self, spec: MTP, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.embed_norm, self.hidden_norm = build(spec.norm, d_model), build(spec.norm, d_model)
        self.proj = Linear(2 * d_model, d_model, bias=False)
        self.block = BlockModule(spec.block, d_model)
        self.norm_final = build(spec.norm, d_model)
        self.lm = build(spec.lm, d_model)

    def forward(self, hidden: Tensor, ctx: Context) -> Tensor:
        """Scores (B, T, V), or those of each row's last real token where the call asks for no more."""
        h, known = self._ahead(hidden, ctx)
        scores = self.lm(h, ctx).masked_fill(~known[..., None], 0)
        return ctx.last_real(scores) if ctx.last_only else scores

    def loss(self, hidden: Tensor, targets: Tensor, ctx: Context) -> Loss:
        """Cross-entropy against the main head's targets, without those of first tokens."""
        h, known = self._ahead(hidden, ctx)
        if targets.shape != known.shape:
            raise UserError(f"targets are {tuple(targets.shape)}, tokens {tuple(known.shape)}; they must agree")
        return self.lm.loss(h, targets.masked_fill(~known, IGNORE), ctx)

    def _ahead(self, hidden: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """Final hidden states (B, T, D) of the block, and where they exist: computed once per forward pass."""
        return ctx.memo((self.path, "ahead"), lambda: self._run(hidden, ctx))

    def _run(self, hidden: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        assert ctx.embedded is not None, "the model hands its embeddings over"
        part = None if ctx.state is None else ctx.state.parts[self.path]
        assert part is None or isinstance(part, AheadState)
        before, known, last = _before(hidden, ctx, part)
        # Under autocast a norm answers in fp32.
        both = torch.cat([self.embed_norm(ctx.embedded), self.hidden_norm(before)], -1).to(hidden.dtype)
        segments = ctx.records.segments
        ids = known.long() if segments is None else segments.expand(known.shape).masked_fill(~known, 0)
        inner = Context(
            records=Records(ctx.records.positions.expand(known.shape), ids, ctx.records.marks),
            aligned=False,
            shared=ctx.shared,
            batch_size=ctx.batch_size,
            taps=ctx.taps,
            aux=ctx.aux,
        )
        if part is not None:
            inner.state, inner.chunk = part.inner, part.begin(inner.records, last)
        return self.norm_final(self.block(self.proj(both), inner)), known

    def add_state(self, state: State, max_len: int | None) -> None:
        """A state within the state: what this head's block has seen is not what the model has seen."""
        for name in self.spec.block.ops():
            op = self.spec.block.op(name)
            reason = op.streams() if isinstance(op, Mixer) else None
            if reason:
                raise UserError(f"{self.path}.block.{name} cannot continue from a state: {reason}")
        inner = State(state.batch_size, max_len, state.device)
        for module in self.block.modules():
            if isinstance(module, Part):
                module.add_state(inner, max_len)
        like = self.proj.weight
        state.add(self.path, AheadState(inner, RecurrentState(like.new_zeros(state.batch_size, like.shape[0]))))


class AheadState(StatePart):
    """``inner``, the state of the head's block, and ``last``, the final hidden state (B, D) of each row's last one."""

    def __init__(self, inner: State, last: RecurrentState) -> None:
        self.inner, self.last = inner, last
        self._chunk: Chunk | None = None

    def begin(self, records: Records, last: Tensor) -> Chunk:
        self.last.update(last)
        chunk = self.inner.chunk(records.positions.shape[1], records.segments, records.positions)
        self.inner.begin(chunk)
        self._chunk = chunk
        return chunk

    def commit(self, chunk: Chunk, state: State) -> None:
        assert self._chunk is not None, "the head did not run"
        self.inner.commit(self._chunk)
        self.last.commit(chunk, state)
        self._chunk = None

    def rollback(self) -> None:
        if self._chunk is not None:
            self.inner.rollback()
        self.last.rollback()
        self._chunk = None

    def select(self, rows: Tensor) -> Self:
        return type(self)(self.inner.rows(rows), self.last.select(rows))

    def insert(self, rows: Tensor, other: Any) -> None:
        self.inner.insert(rows, other.inner)
        self.last.insert(rows, other.last)

    def can_crop(self, state: State) -> str | None:
        return "it keeps the hidden state of the last token alone, not those before it"

    @property
    def n_bytes(self) -> int:
        return self.inner.n_bytes + self.last.n_bytes


def _before(hidden: Tensor, ctx: Context, part: AheadState | None) -> tuple[Tensor, Tensor, Tensor]:
    """For every token the hidden state (B, T, D) of the one before it, where that is of its document (B, T), and the
    row's last hidden state (B, D) after this call."""
    batch, length, _ = hidden.shape
    segments = ctx.records.segments
    ids = torch.ones_like(hidden[..., 0], dtype=torch.int64) if segments is None else segments.expand(batch, length)
    first = (
        hidden.new_zeros(batch, 1, hidden.shape[2]) if part is None else part.last.tensors[0][:, None].to(hidden.dtype)
    )
    was = [0] * batch if ctx.state is None else ctx.state.last_segment
    everything = torch.cat([first, hidden], 1)
    all_ids = torch.cat([torch.tensor(was, device=ids.device, dtype=ids.dtype)[:, None], ids], 1)
    # Column 0 is what came before this call; the others are this call's tokens, of which the nearest real one counts.
    index = torch.arange(length + 1, device=ids.device).expand(batch, -1)
    seen = torch.where((all_ids != 0) | (index == 0), index, 0).cummax(1).values
    rows = torch.arange(batch, device=ids.device)[:, None]
    before = everything[rows, seen[:, :-1]]
    known = (ids != 0) & (all_ids[rows, seen[:, :-1]] == ids)
    return before, known, everything[rows[:, 0], seen[:, -1]]


def _flops(spec: MTP, width: int, n_keys: int) -> int:
    ops: list[Any] = [spec.block.op(name) for name in spec.block.ops()]
    total = 4 * width * width
    for op in (*ops, spec.lm):
        formula = entry_of(op).flops
        assert formula is not None, f"{type(op).__name__} registers no FLOPs"
        total += formula(op, width, n_keys)
    return total


def _cases() -> list[MTP]:
    attention = Attention(n_heads=4, n_kv_heads=2, head_dim=8, rotary=Rotary())
    block = Block(sublayers=(pre_norm(attention, RMSNorm()), pre_norm(GLU(d_ff=20), RMSNorm())))
    return [MTP(block=block, lm=LMHead(vocab_size=11))]


register(MTP, module=MTPModule, paper="arXiv:2412.19437 §2.2", cases=_cases, flops=_flops)
