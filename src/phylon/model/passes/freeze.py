"""Partial fine-tuning: which parameters take gradients, by path glob."""

from collections.abc import Sequence

from phylon.model.model import Model
from phylon.model.passes.select import matches, matching
from phylon.spec.errors import UserError


def train_only(model: Model, globs: Sequence[str]) -> list[str]:
    """Train the parameters that match (``"heads"``, ``"decoder.blocks.*.attn"``) and freeze the rest; their names.

    A tied parameter has one name, its first.
    """
    chosen = set(parameters_matching(model, globs))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
    return sorted(chosen)


def freeze(model: Model, globs: Sequence[str]) -> list[str]:
    """Freeze the parameters that match, and leave the others as they are; their names."""
    chosen = set(parameters_matching(model, globs))
    for name, parameter in model.named_parameters():
        if name in chosen:
            parameter.requires_grad_(False)
    return sorted(chosen)


def parameters_matching(model: Model, globs: Sequence[str]) -> list[str]:
    """The names of the parameters that match; a tied one has one name, its first, and is refused under another."""
    names = {id(p): name for name, p in model.named_parameters()}
    for name, p in model.named_parameters(remove_duplicate=False):
        first = names[id(p)]
        for glob in globs:
            if name != first and matches(name, glob) and not any(matches(known, glob) for known in names.values()):
                raise UserError(
                    f"'{name}' is tied to '{first}', one tensor for both: name that in the place of '{glob}'"
                )
    return matching(names.values(), globs, "parameter")
