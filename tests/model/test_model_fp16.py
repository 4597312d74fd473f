"""Case 7: float16 ends at 65,504, and what goes beyond is refused, whatever part of the output it is in."""

import pytest
import torch

from phylon.families import family
from phylon.model import build
from phylon.spec import UserError

REFUSED = "overflow float16"
TOKENS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
PADDED = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])


def half(name: str, head: str, **options):
    """A model with values of that head beyond float16, and of no other part."""
    options = {"d_model": 24, "n_layers": 1, "n_heads": 3, "vocab_size": 37, "max_seq_len": 64} | options
    model = build(family(name).builder(**options), device="cpu").half().eval()
    with torch.no_grad():
        part = model.heads[head]
        part.proj.weight.sign_().mul_(60_000)
        if getattr(part, "dense", None) is not None:
            part.dense.weight.mul_(50)
    return model


CASES = [
    ("llama", "lm", {"d_ff": 40}),
    ("bert", "class", {"heads": ("class",)}),
    ("bert", "nsp", {"heads": ("mlm", "nsp")}),
    ("bert", "token", {"heads": ("token",)}),
    ("bert", "span", {"heads": ("span",)}),
]


@pytest.mark.parametrize(("name", "head", "options"), CASES)
@pytest.mark.parametrize("segments", [None, PADDED])
def test_scores_beyond_the_range(name, head, options, segments):
    model = half(name, head, **options)
    with torch.no_grad():
        assert model(TOKENS, segments=segments, logits="none").hidden.isfinite().all()
        with pytest.raises(UserError, match=REFUSED):
            model(TOKENS, segments=segments)
        assert bool(model.float()(TOKENS, segments=segments).heads[head].isfinite().all())


def test_the_last_scores_and_the_loss():
    model = half("llama", "lm", d_ff=40)
    with pytest.raises(UserError, match=REFUSED):
        model(TOKENS, targets=TOKENS, logits="none")
    with torch.no_grad():
        for given in ({"logits": "last"}, {"logits": "last", "segments": PADDED}, {"state": model.new_state(2)}):
            with pytest.raises(UserError, match=REFUSED):
                model(TOKENS, **given)
        assert model.float()(TOKENS, targets=TOKENS, logits="none").losses["lm"].sum.isfinite()


def test_padding_may_overflow():
    """What stands there is nobody's answer."""
    model = half("llama", "lm", d_ff=40)
    with torch.no_grad():
        model.heads["lm"].proj.weight.fill_(1.0)
        hidden = PADDED[..., None] == 0
        hook = model.heads["lm"].register_forward_hook(lambda m, given, out: out.masked_fill(hidden, float("inf")))
        assert model(TOKENS, segments=PADDED).logits[PADDED != 0].isfinite().all()
        hook.remove()
