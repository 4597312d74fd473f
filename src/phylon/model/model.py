"""The model: stacks, heads, ties, and the one forward pass everything goes through."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from phylon.layers.context import Context, Taps
from phylon.layers.part import Part
from phylon.layers.state import Chunk, State, positions_from_segments
from phylon.model.block import StackModule
from phylon.model.spec import GenerationDefaults, ModelSpec
from phylon.ops.checks import check_int32
from phylon.ops.loss import Loss, Targets
from phylon.patterns import Records
from phylon.spec.base import Mixer
from phylon.spec.errors import UserError
from phylon.spec.registry import build

GivenTargets = Tensor | Targets | Mapping[str, Tensor | Targets] | None


@dataclass(kw_only=True)
class Output:
    """Main ``logits``, ``heads`` by name, ``hidden`` (B, T, D), ``losses`` by head, ``aux`` terms by name."""

    hidden: Tensor
    logits: Tensor | None = None
    heads: dict[str, Tensor] = field(default_factory=dict)
    losses: dict[str, Loss] = field(default_factory=dict)
    aux: dict[str, Any] = field(default_factory=dict)


class Model(Part):
    """An ordinary ``nn.Module`` built from a ``ModelSpec``; parameters have canonical names.

    ``tokenizer`` and ``generation`` come with a checkpoint, ``family`` is whose format it is saved in, ``labels`` are
    the names of a head's classes in order, by head, where they have names, and ``stored_dtypes`` says what is given
    back in another dtype than the parameter has: by name, as stored and as loaded.
    ``kept`` is the ``config.json`` it came from, ``kept_generation`` the ``generation_config.json`` if there was one,
    and ``unread`` holds tensors that came beside it and that the model has no use for, by their foreign name and as
    stored: all go back with it, the words as far as they are still true.
    Build with ``phylon.build``, load with ``phylon.load``.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.encoder = None if spec.encoder is None else StackModule(spec.encoder)
        self.decoder = None if spec.decoder is None else StackModule(spec.decoder)
        width = spec.last_stack.d_model
        self.heads = nn.ModuleDict({name: build(head, width) for name, head in spec.heads.items()})
        self.tokenizer: Any = None
        self.generation = GenerationDefaults()
        self.stored_dtype: str | None = None
        self.stored_dtypes: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        self.family: str | None = None
        self.labels: dict[str, tuple[str, ...]] = {}
        self.kept: dict[str, Any] = {}
        self.kept_generation: dict[str, Any] | None = None
        self.unread: dict[str, Tensor] = {}
        self.taps: Taps | None = None
        for name, module in self.named_modules():
            if isinstance(module, Part):
                module.path = name
        self.apply_ties()

    def apply_ties(self) -> None:
        """Make every tied name the very parameter it is tied to."""
        for tie in self.spec.ties:
            source, target = self._owner(tie.source), self._owner(tie.name)
            theirs, mine = source[0]._parameters[source[1]], target[0]._parameters[target[1]]
            if theirs is None or mine is None or theirs.shape != mine.shape:
                raise UserError(f"cannot tie {tie.name} to {tie.source}: the shapes differ")
            target[0]._parameters[target[1]] = theirs

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        path, _, leaf = name.rpartition(".")
        try:
            module = self.get_submodule(path)
        except AttributeError:
            module = None
        if module is None or leaf not in module._parameters:
            raise UserError(f"a tie names '{name}', which is no parameter of this model")
        return module, leaf

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def new_state(self, batch_size: int, max_len: int | None = None) -> State:
        """An empty state for ``batch_size`` rows; ``max_len`` allocates once, otherwise buffers grow as needed."""
        if batch_size < 1 or (max_len is not None and max_len < 1):
            raise UserError(f"a state needs at least one row and one token, got {batch_size} and {max_len}")
        stack = self.decoder
        if stack is None:
            raise UserError("an encoder reads the whole text at once and has no state; call the model without one")
        for i, block in enumerate(stack.spec.blocks):
            for name in block.ops():
                op = block.op(name)
                reason = op.streams() if isinstance(op, Mixer) else None
                if reason:
                    raise UserError(f"decoder.blocks.{i}.{name} cannot continue from a state: {reason}")
        state = State(batch_size, max_len, self.device)
        # A head gives what it and its own parts keep; most keep nothing.
        for module in (*stack.modules(), *self.heads.values()):
            if isinstance(module, Part):
                module.add_state(state, max_len)
        return state

    def forward(
        self,
        tokens: Tensor | None = None,
        *,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
        types: Tensor | None = None,
        marks: Tensor | None = None,
        source: Tensor | None = None,
        source_segments: Tensor | None = None,
        images: Tensor | None = None,
        embeds: Tensor | None = None,
        state: State | None = None,
        targets: GivenTargets = None,
        logits: Literal["all", "last", "none"] = "all",
    ) -> Output:
        """One pass over ``tokens`` (B, T) int64, or their ``embeds`` (B, T, D), or ``images`` float (B, C, H, W).

        ``segments`` (B, T): 0 is padding, equal ids are one document; left out, all tokens are real and continue the
        row's last document. ``positions`` (B, T) follow from segments unless given. ``types``, ``marks`` (B, T).
        With a ``state`` the tokens are appended to it, without gradients; a pass that fails leaves it as it was; given
        positions must then rise within a document. An
        encoder-decoder reads ``source`` (B, S) with ``source_segments`` on the first call: query and key ids must be
        equal there too. ``targets`` (B, T) or ``Targets``, or a dict of them by head, adds ``losses``. ``logits``: all
        scores, those of each row's last real token (B, 1, V), or none.

        Only a table of positions limits T here. Without one, T may pass ``spec.max_seq_len``, which is what the model
        was made for: ``generate`` and the command line refuse it.
        """
        if logits not in ("all", "last", "none"):
            raise UserError(f"logits must be 'all', 'last' or 'none', got {logits!r}")
        per_token = {"segments": segments, "positions": positions, "types": types, "marks": marks}
        seen = self._sees(images, {"tokens": tokens, "embeds": embeds, **per_token})
        shape = self._shape(tokens, embeds) if seen is None else seen
        for name, given in per_token.items():
            _check_per_token(name, given, shape)
        # The embedding of a model that sees takes its input where others take token ids.
        tokens = images if tokens is None else tokens
        device = tokens.device if tokens is not None else self.device if embeds is None else embeds.device
        ctx = self._context(shape, device, segments, positions, types, marks, state)
        read = self._reads_source(source, source_segments, state)
        if state is None:
            if read is not None:
                self._read(*read, ctx)
            return self._run(tokens, embeds, ctx, targets, logits)
        assert ctx.chunk is not None
        with torch.no_grad():
            state.begin(ctx.chunk)
            ctx.memory_records = state.source
            try:
                if read is not None:
                    self._read(*read, ctx)
                out = self._run(tokens, embeds, ctx, targets, logits)
            except BaseException:
                state.rollback()
                raise
            state.commit(ctx.chunk, ctx.memory_records)
        return out

    def _sees(self, images: Tensor | None, others: dict[str, Tensor | None]) -> torch.Size | None:
        """(B, T) of what the images of a model that reads images become; ``None`` for a model that reads tokens."""
        stack = self.decoder or self.encoder
        assert stack is not None
        if not hasattr(stack.embed, "shape_of"):
            if images is not None:
                raise UserError("this model takes no images; it reads tokens")
            return None
        beside = [name for name, given in others.items() if given is not None]
        if images is None or beside:
            raise UserError(f"this model reads images alone{', without ' + beside[0] if beside else ''}")
        return stack.embed.shape_of(images)

    def _reads_source(
        self, source: Tensor | None, segments: Tensor | None, state: State | None
    ) -> tuple[Tensor, Tensor | None] | None:
        """The source this call must encode, or ``None``; a one-line refusal where it is missing or given twice."""
        if self.encoder is None or self.decoder is None:
            if source is not None or segments is not None:
                raise UserError("this model takes no source; give the text as tokens")
            return None
        if state is not None and state.source is not None:
            if source is not None or segments is not None:
                raise UserError("the state has read its source already; only the first call takes it")
            return None
        if source is None:
            raise UserError("an encoder-decoder needs source (B, S) on its first call")
        if source.ndim != 2 or 0 in source.shape or source.dtype not in (torch.int64, torch.int32):
            raise UserError(f"source must be (B, S) int64 and not empty, got {tuple(source.shape)} {source.dtype}")
        _check_per_token("source_segments", segments, source.shape)
        return source, segments

    def _read(self, source: Tensor, segments: Tensor | None, ctx: Context) -> None:
        """Encode the source into ``ctx.memory``."""
        assert self.encoder is not None
        if len(source) != ctx.batch_size:
            raise UserError(f"source has {len(source)} rows, tokens {ctx.batch_size}; they must agree")
        own = self._context(source.shape, source.device, segments, None, None, None, None)
        own.aux, own.tables = ctx.aux, ctx.tables
        ctx.memory = self.encoder(source, None, own)
        if ctx.state is not None:
            ids = torch.ones_like(source) if segments is None else segments
            ctx.memory_records = Records(own.records.positions.expand_as(source), ids)
        elif own.records.segments is not None:
            ctx.memory_records = own.records

    def _run(
        self,
        tokens: Tensor | None,
        embeds: Tensor | None,
        ctx: Context,
        targets: GivenTargets,
        logits: str,
    ) -> Output:
        stack = self.decoder or self.encoder
        assert stack is not None
        out = Output(hidden=stack(tokens, embeds, ctx), aux=ctx.aux)
        if out.hidden.dtype == torch.float16 and not self.training:
            _refuse_overflow(out.hidden, ctx.records.segments)
        self._run_heads(out, ctx, targets, logits)
        return out

    def _shape(self, tokens: Tensor | None, embeds: Tensor | None) -> torch.Size:
        if (tokens is None) == (embeds is None):
            raise UserError("give either tokens or embeds")
        if tokens is not None:
            if tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32):
                raise UserError(f"tokens must be (B, T) int64, got {tuple(tokens.shape)} {tokens.dtype}")
            shape = tokens.shape
        else:
            assert embeds is not None
            width = next(iter(self.spec.stacks.values())).d_model
            if embeds.ndim != 3 or embeds.shape[2] != width:
                raise UserError(f"embeds must be (B, T, {width}), got {tuple(embeds.shape)}")
            shape = embeds.shape[:2]
        if 0 in shape:
            raise UserError(f"the input is empty: {tuple(shape)}; give at least one row and one token")
        return shape

    def _context(
        self,
        shape: torch.Size,
        device: torch.device,
        segments: Tensor | None,
        positions: Tensor | None,
        types: Tensor | None,
        marks: Tensor | None,
        state: State | None,
    ) -> Context:
        batch, length = shape
        if marks is not None and state is not None:
            raise UserError("a state does not keep marks; call the model on the whole text, without a state")
        if segments is not None and _is_one_document(segments, state):
            segments = None
        chunk: Chunk | None = None
        if state is not None:
            if state.batch_size != batch:
                raise UserError(f"the state has {state.batch_size} rows, the input {batch}")
            chunk = state.chunk(length, segments, positions)
            segments, positions = chunk.segments, chunk.positions
            aligned = state.aligned and chunk.uniform and segments is None
        else:
            aligned = segments is None and positions is None and marks is None
            if positions is None and segments is not None:
                positions = positions_from_segments(segments)
            elif positions is None:
                positions = torch.arange(length, device=device)[None]
        records = Records(positions, segments, marks)
        return Context(
            records=records, aligned=aligned, batch_size=batch, types=types, state=state, chunk=chunk, taps=self.taps
        )

    def _run_heads(self, out: Output, ctx: Context, targets: GivenTargets, logits: str) -> None:
        heads: dict[str, Any] = dict(self.heads.items())
        given: dict[str, Tensor | Targets] = dict(targets) if isinstance(targets, Mapping) else {}
        if isinstance(targets, Tensor | Targets):
            given[next(iter(heads), "lm")] = targets
        for name in given:
            if name not in heads:
                raise UserError(f"targets name the head '{name}'; this model has {', '.join(heads) or 'none'}")
        ctx.last_only = logits != "all"
        is_half = out.hidden.dtype == torch.float16 and not self.training
        for name, head in heads.items():
            if name in given:
                out.losses[name] = head.loss(out.hidden, given[name], ctx)
                if is_half:
                    _refuse_overflow(out.losses[name].sum[None, None], None)
            if logits == "none":
                if ctx.state is not None and head.path in ctx.state.parts:
                    head(out.hidden, ctx)  # its state goes along, whoever asks
                continue
            hidden = ctx.last_real(out.hidden) if logits == "last" and head.token_wise else out.hidden
            out.heads[name] = self.tap(ctx, f"heads.{name}.logits", head(hidden, ctx))
            if is_half:
                _refuse_overflow(out.heads[name], None if self.spec.heads[name].per_document else ctx.records.segments)
        out.logits = next(iter(out.heads.values()), None)

    def tap(self, ctx: Context, name: str, value: Tensor) -> Tensor:
        """The model itself is the root: its points have no prefix."""
        return value if ctx.taps is None else ctx.taps(name, value)


def _check_per_token(name: str, given: Tensor | None, shape: torch.Size) -> None:
    if given is None:
        return
    if given.shape != shape:
        raise UserError(f"{name} are {tuple(given.shape)}, tokens {tuple(shape)}; they must agree")
    if given.dtype not in (torch.int64, torch.int32):
        raise UserError(f"{name} must be int64, got {given.dtype}")
    check_int32(name, given)


def _is_one_document(segments: Tensor, state: State | None) -> bool:
    """Whether segments say nothing beyond their default; asked on the CPU only, where asking is free."""
    if segments.device.type != "cpu" or not bool((segments == 1).all()):
        return False
    return state is None or (state.aligned and all(s in (0, 1) for s in state.last_segment))


def _refuse_overflow(values: Tensor, segments: Tensor | None) -> None:
    """float16 ends at 65,504; T5's released weights go beyond, and a clamped value is a wrong one.

    ``values`` (B, T, W) or one a row (B, 1, W) with the ``segments`` (B, T) that say padding, else of any shape.
    """
    finite = values.isfinite().all(-1)
    if segments is not None:
        padding = segments == 0
        finite = finite | (padding if finite.shape[1] == padding.shape[1] else padding.all(1, keepdim=True))
    if not bool(finite.all()):
        raise UserError("the values overflow float16; load the model with dtype='bfloat16' or 'float32'")
