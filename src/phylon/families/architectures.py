"""Whose class an architecture is, by the stem of its name: LlamaForCausalLM is LLaMA's, whatever stands beside it."""

import re
from collections.abc import Iterable

from phylon.families.base import Config, Family, families
from phylon.families.neutral import shown
from phylon.model.spec import ModelSpec
from phylon.spec.errors import UserError

_STEM = re.compile(r"(.+?)(?:For[A-Z]\w*|(?:WithLMHead|LMHead|DoubleHeads|Encoder|MT|PreTrained)?Model)")


def check_architectures(config: Config, family: Family, names: Iterable[str]) -> None:
    """Refuse a class of another family than the one that the model_type names.

    A class that is no family's is a descendant's own name of the same model (YiForCausalLM in files of LLaMA).
    """
    stems = {_plain(stem): f for f in families() if f.hf for stem in (*f.hf.model_types, *f.hf.stems)}
    for name in names:
        found = _STEM.fullmatch(name)
        other = stems.get(_plain(found[1])) if found else None
        if other is not None and other.name != family.name:
            raise UserError(
                f"{config.where}: 'architectures' names {shown(name)}, which is of family '{other.name}', and "
                f"'model_type' is of family '{family.name}': put the one that the weights are of"
            )


def check_stacks(config: Config, family: Family, spec: ModelSpec) -> None:
    """Refuse an ``is_encoder_decoder`` that contradicts the family.

    An encoder that is read alone out of an encoder-decoder (T5EncoderModel) may be said either way.
    """
    said = config.take("is_encoder_decoder", None, bool)
    both = spec.encoder is not None and spec.decoder is not None
    possible = both or any(case.encoder is not None and case.decoder is not None for case in family.cases())
    if said is not None and ((said and not possible) or (both and not said)):
        are = "are encoders with decoders" if both else "have one stack"
        raise UserError(
            f"{config.where}: 'is_encoder_decoder' is {str(said).lower()}, and models of family '{family.name}' {are}: "
            "correct it, or the model_type"
        )


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name)).casefold()
