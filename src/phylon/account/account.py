"""The account of a model: every figure with its convention, measured on the meta device wherever it can be."""

import msgspec
import torch

from phylon.account.flops import flops_per_document, flops_per_token
from phylon.account.params import params_active, params_by_part, tensor_bytes
from phylon.account.state import StateBytes, state_bytes
from phylon.families import preset
from phylon.model import ModelSpec
from phylon.model.build import build, resolve_dtype
from phylon.spec.errors import UserError, check_size

_DEFAULT_SEQ_LEN = 2048


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one model for ``batch`` rows of ``seq_len`` tokens, weights and state in ``dtype``.

    Parameters are numbers, each counted once, a tied one too; ``params_by_part`` adds up to ``params_total``.
    FLOPs are matrix products only, a multiply-add counts two, and every token is charged all ``seq_len`` keys, as the
    reference attention computes them (causal or windowed kernels do less). Heads that score tokens are included; those
    that pool are charged once a document. An encoder-decoder is charged one source token and one target token.
    State figures are ``None`` where the model keeps none; ``state_refused`` says why.
    """

    batch: int
    seq_len: int
    dtype: str
    params_total: int
    """Every parameter once."""
    params_active: int
    """Those that one token uses: all but the experts it is not sent to."""
    params_embedding: int
    """Of the embeddings: token, type and position tables, and their norm."""
    params_by_part: dict[str, int]
    """By op ("attn", "ffn", …) over all blocks, "embed", "norm", "shared" and "heads"."""
    weights_bytes: int
    """Parameters and stored buffers in ``dtype``."""
    training_bytes_fp32_adamw: int
    """Weights, gradients and both moments of AdamW in fp32: 16 bytes a parameter. Activations are not included."""
    flops_forward_per_token: int
    flops_forward_per_document: int
    """Of the heads that read one vector a document, beside the tokens."""
    flops_training_per_token: int
    """Three times the forward pass: the backward pass forms two products for every one."""
    state_bytes_per_token: int | None
    """Keys and values that one further token of one row adds once every window is full."""
    state_bytes_fixed: int | None
    """What one row keeps whatever its length: rolling buffers of windows, recurrent states."""
    state_bytes_total: int | None
    """The state of ``batch`` rows made for ``seq_len`` tokens."""
    state_index_bytes_total: int | None
    """Positions and segments of the keys in that state, which mixers of one geometry share; not counted above."""
    state_refused: str | None


def account(
    spec_or_preset: ModelSpec | str, batch: int = 1, seq_len: int | None = None, dtype: str | torch.dtype = "float16"
) -> Account:
    """The figures of a spec or a preset's name; nothing is allocated. ``seq_len`` defaults to the model's longest text.

    Raises:
        UserError: an unknown preset or dtype, an impossible size, or a ``seq_len`` beyond the model's ``max_seq_len``.
    """
    spec = preset(spec_or_preset) if isinstance(spec_or_preset, str) else spec_or_preset
    seq_len = spec.max_seq_len or _DEFAULT_SEQ_LEN if seq_len is None else seq_len
    check_sizes(spec, batch, seq_len)
    model = build(spec, dtype=resolve_dtype(dtype), device="meta")
    by_part = params_by_part(model)
    total = sum(by_part.values())
    forward = flops_per_token(spec, seq_len)
    state = state_bytes(model, batch, seq_len)
    known = state if isinstance(state, StateBytes) else StateBytes(None, None, None, None)
    return Account(
        batch=batch,
        seq_len=seq_len,
        dtype=str(model.dtype).removeprefix("torch."),
        params_total=total,
        params_active=params_active(model),
        params_embedding=by_part.get("embed", 0),
        params_by_part=by_part,
        weights_bytes=tensor_bytes(model),
        training_bytes_fp32_adamw=16 * total,
        flops_forward_per_token=forward,
        flops_forward_per_document=flops_per_document(spec),
        flops_training_per_token=3 * forward,
        state_bytes_per_token=known.per_token,
        state_bytes_fixed=known.fixed,
        state_bytes_total=known.total,
        state_index_bytes_total=known.index_total,
        state_refused=state if isinstance(state, str) else None,
    )


def check_sizes(spec: ModelSpec, batch: int, seq_len: int) -> None:
    """Refuse a batch or length that no forward pass of this model could have."""
    check_size("batch", batch)
    check_size("seq_len", seq_len)
    if spec.max_seq_len is not None and seq_len > spec.max_seq_len:
        raise UserError(f"seq_len {seq_len} is more than the {spec.max_seq_len} tokens the model takes; choose fewer")
