"""Embeddings of texts: one vector each, in batches that do not pay for padding."""

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from phylon.generate.kinds import refused, tokenizer_of
from phylon.model import Model, ModelSpec
from phylon.spec.errors import UserError, check_size
from phylon.text import Tokenizer
from phylon.text.tokenizer import Joint

Pooling = Literal["mean", "first", "last"]
FAIR = 512
"""Tokens in a batch from which on padding costs more than another call."""


@torch.inference_mode()
def encode(
    model: Model,
    texts: Sequence[str],
    *,
    pool: Pooling = "mean",
    normalise: bool = True,
    max_tokens: int | None = None,
    batch_tokens: int = 4096,
) -> Tensor:
    """One vector a text, (n, D) in fp32 on the CPU, in the order of ``texts``.

    Sentence-BERT (arXiv:1908.10084), section 3: the mean of the final hidden states over all tokens, [CLS] and [SEP]
    included, scaled to length 1; or the ``first`` or ``last`` token's. Texts are sorted by length and cut into batches
    of at most ``batch_tokens`` tokens, so that rows of a batch are about equally long. ``max_tokens`` shortens a text
    from its end and keeps the closing token; without it a text longer than the model's positions is refused.

    Raises:
        UserError: no tokenizer, an empty text without special tokens, a text that is too long.
    """
    if isinstance(texts, str):
        raise UserError("encode takes a list of texts; write encode(model, [text])")
    if pool not in ("mean", "first", "last"):
        raise UserError(f"pool must be 'mean', 'first' or 'last', got {pool!r}")
    tokenizer = tokenizer_of(model, "read texts")
    if model.encoder is not None and model.decoder is not None:
        raise refused(model, "give vectors of texts")
    check_size("batch_tokens", batch_tokens)
    rows = [shortened(ids, max_tokens) for ids in tokenizer.encode_batch(texts)]
    check_lengths(rows, model.spec.max_seq_len)
    vectors = torch.empty(len(rows), model.spec.last_stack.d_model)
    for chosen in batches([len(ids) for ids in rows], batch_tokens):
        tokens, segments = padded([rows[i] for i in chosen], model.device)
        hidden = model(tokens, segments=segments, logits="none").hidden
        vectors[chosen] = _pooled(hidden, segments, pool).cpu()
    return torch.nn.functional.normalize(vectors, dim=-1) if normalise else vectors


def batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indices in batches, longest first (what does not fit fails at once); at most ``batch_tokens`` each, padding too.

    A batch of a fair size also ends where a text is a tenth shorter than its longest, so that few texts of very
    different lengths pay for little padding too. A text of more than ``batch_tokens`` makes a batch of its own.
    """
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        width = lengths[batch[0]] if batch else lengths[i]
        full = width * (len(batch) + 1) > batch_tokens
        if batch and (full or (10 * lengths[i] < 9 * width and width * len(batch) >= FAIR)):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def shortened(ids: list[int], most: int | None) -> list[int]:
    if most is None or len(ids) <= most:
        return ids
    if most < 2:
        raise UserError(f"max_tokens must be at least 2, got {most}")
    return [*ids[: most - 1], ids[-1]]


def joined(
    tokenizer: Tokenizer, texts: Sequence[str], pairs: Sequence[str] | None, max_tokens: int | None
) -> list[Joint]:
    """What is read of each text, or of each with the second text ``pairs`` has for it; cut as for fine-tuning."""
    if pairs is not None and (isinstance(pairs, str) or len(pairs) != len(texts)):
        count = 1 if isinstance(pairs, str) else len(pairs)
        raise UserError(f"{len(texts)} texts and {count} to read with them; give one for each")
    seconds = [None] * len(texts) if pairs is None else pairs
    found = [tokenizer.encode_joint(text, second) for text, second in zip(texts, seconds, strict=True)]
    return found if max_tokens is None else [joint.shortened(max_tokens) for joint in found]


def has_types(spec: ModelSpec) -> bool:
    """Whether the embedding tells two texts apart."""
    return (getattr(spec.last_stack.embed, "n_types", 0) or 0) > 1


def check_lengths(rows: list[list[int]], most: int | None) -> None:
    for i, ids in enumerate(rows):
        if not ids:
            raise UserError(f"text {i} is empty: it has no tokens")
        if most is not None and len(ids) > most:
            raise UserError(f"text {i} has {len(ids)} tokens, the model reads {most}; give max_tokens={most} to cut it")


def padded(rows: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    tokens, segments = torch.zeros(2, len(rows), width, dtype=torch.int64)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)], segments[row, : len(ids)] = torch.tensor(ids), 1
    return tokens.to(device), segments.to(device)


def _pooled(hidden: Tensor, segments: Tensor, pool: Pooling) -> Tensor:
    """(B, D) in fp32 from hidden states (B, T, D), padded on the right."""
    if pool == "first":
        return hidden[:, 0].float()
    lengths = segments.sum(1)
    if pool == "last":
        return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1].float()
    return (hidden.float() * segments[..., None]).sum(1) / lengths[:, None]
