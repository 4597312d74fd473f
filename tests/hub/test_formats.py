"""Every family's Hugging Face format: its own cases go through it, and any other spec is said exactly or refused."""

import contextlib

import pytest
import torch

import phylon
from phylon.families import families
from phylon.families.base import Config, Family
from phylon.families.gpt_neox import gpt_neox_spec
from phylon.hub.load import stored_tensors
from phylon.layers.positions.rotary import Rotary
from phylon.model import ModelSpec, build_meta
from phylon.spec import UserError

FORMATS = [pytest.param(f, id=f.name) for f in families() if f.hf]
CASES = [(f"{f.name}-{i}", case) for f in families() for i, case in enumerate(f.cases())]


def said(family: Family, spec: ModelSpec) -> ModelSpec:
    assert family.hf is not None
    hf = family.hf

    def stored() -> list[str]:
        """The tensors that lie beside the file: BERT's pooler is said by them."""
        return list(hf.layout(spec).unmap(stored_tensors(build_meta(spec))).names())

    return hf.read(Config(hf.write(spec), stored=stored)).replace(init=spec.init)


@pytest.mark.parametrize("family", FORMATS)
def test_own_cases_are_said_exactly(family: Family) -> None:
    """All but those that the docstring of a family says no file can hold."""
    said_ = []
    for case in family.cases():
        with contextlib.suppress(UserError):
            said_.append(said(family, case) == case)
    assert said_
    assert all(said_)


@pytest.mark.parametrize("family", FORMATS)
def test_every_spec_is_said_exactly_or_refused(family: Family) -> None:
    """What a format writes for any spec at all is read back or refused; nothing else is raised."""
    for _, spec in CASES:
        with contextlib.suppress(UserError):
            said(family, spec)


def test_a_model_is_saved_in_the_format_it_came_from(tmp_path) -> None:
    """GPT-NeoX with biases is a Falcon too; the folder, the native format and a preset's name keep which."""
    spec = gpt_neox_spec(d_model=24, n_layers=1, n_heads=3, vocab_size=11, rotary=Rotary())
    model = phylon.build(spec, device="cpu")
    model.family = "gpt_neox"
    phylon.save(model, tmp_path / "native")
    again = phylon.load(tmp_path / "native", device="cpu")
    phylon.save(again, tmp_path / "hf", format="hf")
    last = phylon.load(tmp_path / "hf", device="cpu")
    assert (again.family, last.family, last.spec) == ("gpt_neox", "gpt_neox", spec)
    tokens = torch.arange(7)[None]
    assert torch.equal(model.eval()(tokens).logits, last(tokens).logits)
    model.family = None
    phylon.save(model, tmp_path / "unnamed", format="hf")
    assert phylon.load(tmp_path / "unnamed", device="cpu").family == "falcon"
    assert phylon.build("pythia-70m", device="meta").family == "gpt_neox"
