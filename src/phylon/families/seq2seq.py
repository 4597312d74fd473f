"""What encoder-decoders share: one embedding for source, target and head, and the parts foreign formats ask for.

Where nothing is tied, the reference still keeps the shared table that nothing reads. Its older releases let both stacks
read that one; a file of theirs lacks the tables that the reference reads now, and draws anew, and is refused by name.
"""

from typing import Any

from phylon.checkpoint import Copied, Rename, Rule, Tied
from phylon.families.base import Config
from phylon.families.decoder import part
from phylon.layers.heads.lm import LMHead
from phylon.model.spec import ModelSpec, Stack, Tie
from phylon.spec.errors import UserError

EMBEDDING = "encoder.embed.tokens.weight"
TIED_TARGET = Tie(name="decoder.embed.tokens.weight", source=EMBEDDING)
TIED_HEAD = Tie(name="heads.lm.proj.weight", source=EMBEDDING)


def read_tied(config: Config) -> bool:
    """Whether source, target and head are one matrix; else each has its own."""
    return config.take("tie_word_embeddings", True, bool)


def write_tied(spec: ModelSpec) -> dict[str, Any]:
    """The key that says so, or a refusal of anything between."""
    whole = {TIED_TARGET, TIED_HEAD} if spec.heads else {TIED_TARGET}
    if set(spec.ties) not in (whole, set()):
        raise UserError("source, target and head are tied all together or not at all in this format")
    return {"tie_word_embeddings": bool(spec.ties)}


def embedding_rules(spec: ModelSpec, prefix: str, shared: str) -> list[Rule | Copied]:
    """The embeddings and the head; ``prefix`` is that of the stacks, ``shared`` the table's name."""
    mine = {stack: f"{prefix}{stack}.embed_tokens.weight" for stack in ("encoder", "decoder")}
    if spec.ties:
        return [Tied(shared, EMBEDDING, (*mine.values(), "lm_head.weight"))]
    return [
        *(Rename(theirs, f"{stack}.embed.tokens.weight") for stack, theirs in mine.items()),
        Copied(shared, EMBEDDING),
        Rename("lm_head.weight", TIED_HEAD.name),
    ]


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
    """The two stacks with a head, which is their embedding where they share one."""
    stacks_of(spec)
    return spec.replace(heads={"lm": head}, ties=(TIED_TARGET, TIED_HEAD) if spec.ties else ())
