"""The law for the tiny specs of every registered family."""

import pytest

from helpers import draw
from law import ROUTES, check
from phylon.layers.inits import FanInInit

families = pytest.importorskip("phylon.families")


def all_model_specs() -> dict[str, object]:
    """Every case of every family that reads token ids with one stack, by id."""
    made = {f"{f.name}-{i}": spec for f in families.families() for i, spec in enumerate(f.cases())}
    return {name: s for name, s in made.items() if len(s.stacks) == 1 and hasattr(s.last_stack.embed, "vocab_size")}


SPECS = all_model_specs()
MODELS = {name: draw(spec.replace(init=FanInInit(gain=2.0))) for name, spec in SPECS.items()}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", sorted(SPECS))
def test_law(name: str, route: str) -> None:
    check(MODELS[name], route)
