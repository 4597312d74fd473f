"""What encoder-decoders share: one embedding for source, target and head, and the parts foreign formats ask for."""

from phylon.families.decoder import part
from phylon.layers.heads.lm import LMHead
from phylon.model.spec import ModelSpec, Stack, Tie
from phylon.spec.errors import UserError

EMBEDDING = "encoder.embed.tokens.weight"
TIED_TARGET = Tie(name="decoder.embed.tokens.weight", source=EMBEDDING)
TIED_HEAD = Tie(name="heads.lm.proj.weight", source=EMBEDDING)


def stacks_of(spec: ModelSpec) -> tuple[Stack, Stack]:
    """Encoder and decoder of a model with both and at most a language-model head, or why it is no such model."""
    if spec.encoder is None or spec.decoder is None or set(spec.heads) - {"lm"}:
        raise UserError("this format holds encoder-decoders with one language-model head")
    return spec.encoder, spec.decoder


def lm_of(spec: ModelSpec) -> LMHead:
    """The language-model head."""
    if "lm" not in spec.heads:
        raise UserError("this format needs a language-model head")
    return part(spec.heads["lm"], LMHead, "heads.lm")


def with_lm(spec: ModelSpec, head: LMHead) -> ModelSpec:
    """The two stacks with a head that is their embedding."""
    stacks_of(spec)
    return spec.replace(heads={"lm": head}, ties=(TIED_TARGET, TIED_HEAD))
