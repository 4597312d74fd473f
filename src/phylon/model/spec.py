"""The residual algebra: branches, sublayers, blocks, stacks, models."""

import msgspec

from phylon.layers.inits import NormalInit
from phylon.spec.base import Embed, Head, Init, Norm, Op, Shared, Spec
from phylon.spec.errors import UserError, check_finite, check_number, check_rate, check_size

_LAST_ID = 2**31 - 1


class Branch(Spec, frozen=True, kw_only=True):
    """``drop(gain * norm_branch?(op(norm_in?(x))))``: one increment to the residual stream."""

    op: Op
    norm_in: Norm | None = None
    norm_branch: Norm | None = None
    gain: float | None = None
    drop: float = 0.0

    def __post_init__(self) -> None:
        check_finite("gain", self.gain)
        check_rate("drop", self.drop)


class Sublayer(Spec, frozen=True, kw_only=True):
    """``x <- norm_out?(x + sum of branches of norm_shared?(x))``."""

    branches: tuple[Branch, ...]
    norm_shared: Norm | None = None
    norm_out: Norm | None = None

    def __post_init__(self) -> None:
        if not self.branches:
            raise UserError("a sublayer needs at least one branch")


class Block(Spec, frozen=True, kw_only=True):
    """A tuple of sublayers."""

    sublayers: tuple[Sublayer, ...]

    def ops(self) -> dict[str, tuple[int, int]]:
        """Canonical name of every op ("attn", "ffn", repeats numbered) to its sublayer and branch."""
        places: dict[str, tuple[int, int]] = {}
        for s, sublayer in enumerate(self.sublayers):
            for b, branch in enumerate(sublayer.branches):
                name, n = branch.op.label, 2
                while name in places:
                    name, n = f"{branch.op.label}{n}", n + 1
                places[name] = (s, b)
        return places

    def op(self, name: str) -> Op:
        """The op of one canonical name."""
        s, b = self.ops()[name]
        return self.sublayers[s].branches[b].op

    def aliases(self) -> dict[str, str]:
        """Canonical names as short paths for dotted overrides: ``blocks.*.attn.pattern``."""
        return {name: f"sublayers.{s}.branches.{b}.op" for name, (s, b) in self.ops().items()}


class Stack(Spec, frozen=True, kw_only=True):
    """Embedding, blocks, shared modules, final norm and dropout, all of width ``d_model``."""

    d_model: int
    embed: Embed
    blocks: tuple[Block, ...]
    shared: dict[str, Shared] = msgspec.field(default_factory=dict)
    norm_final: Norm | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.d_model < 1:
            raise UserError(f"d_model must be at least 1, got {self.d_model}")
        if not self.blocks:
            raise UserError("a stack needs at least one block")
        check_rate("dropout", self.dropout)

    @property
    def n_branches(self) -> int:
        """Residual branches of the whole stack: what depth-scaled initialisation divides by."""
        return sum(len(sublayer.branches) for block in self.blocks for sublayer in block.sublayers)


class Tie(Spec, frozen=True, kw_only=True):
    """``name`` is the very parameter ``source``, under a second canonical name."""

    name: str
    source: str


class ModelSpec(Spec, frozen=True, kw_only=True):
    """Encoder and/or decoder, named heads (the first is the main one), explicit ties.

    ``max_seq_len`` is the longest text the model was made for, where that is known.
    """

    encoder: Stack | None = None
    decoder: Stack | None = None
    heads: dict[str, Head] = msgspec.field(default_factory=dict)
    ties: tuple[Tie, ...] = ()
    init: Init = NormalInit()
    max_seq_len: int | None = None

    def __post_init__(self) -> None:
        if self.encoder is None and self.decoder is None:
            raise UserError("a model needs an encoder or a decoder")

    @property
    def stacks(self) -> dict[str, Stack]:
        """The stacks that exist, by name."""
        both = {"encoder": self.encoder, "decoder": self.decoder}
        return {name: stack for name, stack in both.items() if stack is not None}

    @property
    def last_stack(self) -> Stack:
        """The stack whose hidden states the heads read."""
        stack = self.decoder or self.encoder
        assert stack is not None
        return stack


class GenerationDefaults(Spec, frozen=True, kw_only=True):
    """Special ids and sampling defaults that come with a checkpoint.

    ``not_applied`` names what else the checkpoint asks of its generation, such as beams or forbidden tokens.
    """

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    decoder_start_id: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    not_applied: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, ids in (
            ("bos_id", (self.bos_id,)),
            ("eos_ids", self.eos_ids),
            ("pad_id", (self.pad_id,)),
            ("decoder_start_id", (self.decoder_start_id,)),
        ):
            for token in ids:
                if token is not None:
                    check_size(name, token, 0)
                    if token > _LAST_ID:
                        raise UserError(f"{name} must be at most {_LAST_ID}")
        if self.top_k is not None:
            check_size("top_k", self.top_k)
        for name, most in (("temperature", 1e12), ("top_p", 1.0), ("min_p", 1.0), ("repetition_penalty", 1e12)):
            value = getattr(self, name)
            if value is not None:
                check_number(name, value)
                if not 0 <= value <= most or (value == 0 and name == "repetition_penalty"):
                    raise UserError(f"{name} must be from 0 to {most:g}, got {value!r:.40}")


def pre_norm(op: Op, norm: Norm, *, drop: float = 0.0) -> Sublayer:
    """``x + drop(op(norm(x)))`` (GPT-2, LLaMA)."""
    return Sublayer(branches=(Branch(op=op, norm_in=norm, drop=drop),))


def post_norm(op: Op, norm: Norm, *, drop: float = 0.0) -> Sublayer:
    """``norm(x + drop(op(x)))`` (2017, BERT)."""
    return Sublayer(branches=(Branch(op=op, drop=drop),), norm_out=norm)
