"""A number of a configuration that no model can have is refused by the name that the file gives it, in one line."""

import pytest

from phylon.families import families
from phylon.families.base import Config
from phylon.spec.errors import UserError

BAD = {int: (7, 1, 0, -1, 2**40, "x"), float: (float("nan"), -1.0, 1.5, "x"), str: ("xyz", 3)}
# Two keys that say the same: the refusal names the other one.
BESIDE = {
    "num_attention_heads": "num_key_value_heads",
    "num_hidden_layers": "layer_types",
    "num_layers": "attention_types",
    "hidden_size": "embedding_size",
}
AS_SAID = ("architectures", "model_type")
FORMATS = {f.name: f for f in families() if f.hf is not None}


@pytest.mark.parametrize("name", FORMATS)
def test_the_key_is_named(name: str) -> None:
    found = FORMATS[name]
    assert found.hf is not None
    said = found.hf.write(found.cases()[0])
    n_refused = 0
    for key, value in said.items():
        if isinstance(value, bool) or key in AS_SAID:
            continue
        for bad in BAD.get(type(value), ()):
            config = Config(said | {key: bad}, "there")
            try:
                found.hf.read(config)
            except UserError as error:
                message = str(config.blame(error))
                named = {key, BESIDE.get(key, key), "sparse_step", "sparse number of blocks"}
                assert message.startswith("there"), message
                assert "\n" not in message
                # A share of a head is checked once it is a width.
                assert any(name in message for name in named) or key == "rotary_pct", (key, bad, message)
                n_refused += 1
    assert n_refused > 20
