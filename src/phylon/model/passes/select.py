"""Which parts of a model a glob names."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from phylon.spec.errors import UserError, did_you_mean_glob


def matching(names: Iterable[str], globs: Sequence[str], what: str) -> list[str]:
    """Those of ``names`` that match a glob, in their order.

    A glob matches a whole name, or the beginning of one at a dot: ``decoder.blocks.0`` names all below that block.

    Raises:
        UserError: a glob that matches nothing, with the nearest name.
    """
    names = list(names)
    for glob in globs:
        if not any(matches(name, glob) for name in names):
            near = did_you_mean_glob(glob, names, ("", ".*"))
            raise UserError(f"no {what} of this model matches '{glob}'{near}")
    return [name for name in names if any(matches(name, glob) for glob in globs)]


def matches(name: str, glob: str) -> bool:
    """Whether a glob names ``name`` or something that it is below."""
    return fnmatchcase(name, glob) or fnmatchcase(name, f"{glob}.*")
