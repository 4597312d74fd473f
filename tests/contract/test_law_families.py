"""The law for the tiny specs of every registered family."""

import pytest

from helpers import draw
from law import ROUTES, check
from phylon import families
from phylon.layers.inits import FanInInit


def all_model_specs() -> dict[str, object]:
    """Every case of every family that reads token ids, by id."""
    made = {f"{f.name}-{i}": spec for f in families.families() for i, spec in enumerate(f.cases())}
    return {name: s for name, s in made.items() if hasattr(s.last_stack.embed, "vocab_size")}


SPECS = all_model_specs()
MODELS = {name: draw(spec.replace(init=FanInInit(gain=2.0))) for name, spec in SPECS.items()}


# Each of these has its like among the others, or runs on every mechanism of the family already (test_law.py).
AGAIN = {
    "chunks-4+4+5",
    "chunks-2+2+2+2+2+2+1",
    "chunks-" + "+".join("1" * 13),
    "chunks-bounded",
    "padding-left-chunks",
}
AGAIN |= {"sdpa-alone", "sdpa-chunks", "reference-chunks", "positions"}


@pytest.mark.parametrize("route", [pytest.param(r, marks=pytest.mark.slow) if r in AGAIN else r for r in ROUTES])
@pytest.mark.parametrize("name", sorted(SPECS))
def test_law(name: str, route: str) -> None:
    check(MODELS[name], route)
