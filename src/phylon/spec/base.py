"""Base classes of every spec: frozen, keyword-only, typed trees.

``Spec`` is a node of the tree. ``Mechanism`` is a node that fills a ``Slot`` and is registered under its ``kind``,
the snake-case name of its class. Slots are plain classes, so that the structuring library hands them to our hook,
which looks the kind up in the registry (``spec.registry``).
"""

import re
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import msgspec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Role = Literal["in", "out", "embed", "head"]
"""What a weight is for: "out" is the last map of a residual branch."""


def snake_case(name: str) -> str:
    """``RMSNorm`` -> ``rms_norm``, ``Llama3Scaling`` -> ``llama3_scaling``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node of a typed spec tree. Optional parts are ``X | None`` and default to ``None``.

    ``training_only`` names the fields that say nothing about evaluation: what the law's exceptions do not ask.
    """

    training_only: ClassVar[tuple[str, ...]] = ()

    def replace(self, **changes: Any) -> Self:
        """The same spec with the named fields changed (validated again)."""
        return msgspec.structs.replace(self, **changes)


class Mechanism(Spec, frozen=True, kw_only=True, tag_field="kind", tag=snake_case):
    """A spec that fills a slot; its serialised form carries ``kind``."""


class Slot:
    """A place in a spec that any registered mechanism of its kind can fill."""

    @classmethod
    def from_word(cls, word: str) -> Any:
        """What a bare string in place of a table stands for: its kind, in most slots."""
        return {"kind": word}


class Op(Slot):
    """What a branch computes from the residual stream; ``label`` is its canonical name inside a block."""

    label: ClassVar[str]


class Mixer(Op):
    """Moves information along the sequence.

    ``streams()`` returns ``None`` when the mixer can continue from a state, or the reason why it cannot.
    """

    label: ClassVar[str] = "mixer"

    def streams(self) -> str | None:
        raise NotImplementedError


class FeedForward(Op):
    """Acts on each position alone."""

    label: ClassVar[str] = "ffn"


class Norm(Slot):
    """Normalises over the last dimension, with statistics in at least fp32."""


class Embed(Slot):
    """Turns the input (token ids, images) into the residual stream."""


class Position(Slot):
    """An absolute position signal added to the embeddings."""


class RopeScaling(Slot):
    """Changes the frequencies of a rotary embedding."""

    def scale(self, inv_freq: "Tensor", theta: float) -> "tuple[Tensor, float]":
        """New frequencies (dim / 2,) in radians a token, and the factor on cosines and sines."""
        raise NotImplementedError


class Head(Slot):
    """Turns final hidden states into predictions, and into a loss when targets are given.

    ``per_document``: it gives one row a document, not one a token.
    """

    @property
    def per_document(self) -> bool:
        return False


class Pool(Slot):
    """Turns the hidden states of a document into one vector."""


class Init(Slot):
    """How the weights of a new model are drawn."""

    def draw(self, weight: "Tensor", role: Role, n_branches: int, generator: "torch.Generator") -> None:
        """Fill ``weight`` in place; ``n_branches`` is the number of residual branches of its stack."""
        raise NotImplementedError


class ScoreBias(Slot):
    """A bias on attention scores, by where query and key stand."""


class Shared(Slot):
    """A module owned by the stack and used by several of its blocks."""
