"""What every family's builder promises: sizes are checked before they are used, and it has a name in its module."""

import importlib
import inspect
from functools import partial

import pytest

from phylon.families import Family, build_spec, families, family
from phylon.families.sizes import MAY_BE_ZERO
from phylon.spec import UserError

ALL = families()


def sizes(chosen: Family) -> dict[str, object]:
    """The whole-number arguments of a builder."""
    builder = chosen.builder.func if isinstance(chosen.builder, partial) else chosen.builder
    hints = inspect.get_annotations(builder, eval_str=True)
    return {name: hint for name, hint in hints.items() if hint in (int, int | None)}


@pytest.mark.parametrize("chosen", ALL, ids=lambda chosen: chosen.name)
def test_impossible_sizes_are_named(chosen: Family) -> None:
    named = sizes(chosen)
    assert {"d_model", "n_layers"} <= set(named)
    for name, hint in named.items():
        wrong = [-1, 2.5, "3", True, *([] if name in MAY_BE_ZERO else [0]), *([None] if hint is int else [])]
        for value in wrong:
            with pytest.raises(UserError, match=f"^{name} must be .*, got {value!r}$"):
                chosen.builder(**{name: value})


def test_a_recipe_with_no_heads() -> None:
    with pytest.raises(UserError, match="n_heads must be at least 1, got 0"):
        build_spec({"family": "mixtral", "n_heads": 0})
    with pytest.raises(UserError, match="d_model 32 is no multiple of n_heads 5"):
        build_spec({"family": "gpt2", "d_model": 32, "n_heads": 5})


@pytest.mark.parametrize("size", [(0, 32), (32, -4), (8.0, 8)])
def test_impossible_images(size: tuple[int, int]) -> None:
    with pytest.raises(UserError, match="a side of image_size must be"):
        family("vit").builder(image_size=size)


@pytest.mark.parametrize("chosen", ALL, ids=lambda chosen: chosen.name)
def test_every_builder_has_a_name(chosen: Family) -> None:
    """``<family>_spec``, in the family's module or that of the family it varies."""
    module = {"tinygpt": "gpt2", "deit": "vit"}.get(chosen.name, chosen.name)
    assert chosen.builder is getattr(importlib.import_module(f"phylon.families.{module}"), f"{chosen.name}_spec")
