"""Partial fine-tuning: which parameters take gradients, by path glob."""

from collections.abc import Sequence

from phylon.model.model import Model
from phylon.model.passes.select import matching


def train_only(model: Model, globs: Sequence[str]) -> list[str]:
    """Train the parameters that match (``"heads"``, ``"decoder.blocks.*.attn"``) and freeze the rest; their names.

    A tied parameter has one name, its first.
    """
    chosen = set(matching(_names(model), globs, "parameter"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
    return sorted(chosen)


def freeze(model: Model, globs: Sequence[str]) -> list[str]:
    """Freeze the parameters that match, and leave the others as they are; their names."""
    chosen = set(matching(_names(model), globs, "parameter"))
    for name, parameter in model.named_parameters():
        if name in chosen:
            parameter.requires_grad_(False)
    return sorted(chosen)


def _names(model: Model) -> list[str]:
    return [name for name, _ in model.named_parameters()]
