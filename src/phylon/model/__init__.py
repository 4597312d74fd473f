"""Block, stack, model, building and recording."""

from phylon.model.build import build, build_meta, materialise, resolve_device, resolve_dtype
from phylon.model.model import Model, Output
from phylon.model.mtp import MTP
from phylon.model.spec import (
    Block,
    Branch,
    GenerationDefaults,
    ModelSpec,
    Stack,
    Sublayer,
    Tie,
    post_norm,
    pre_norm,
)
from phylon.model.taps import Recorder, record

__all__ = [
    "MTP",
    "Block",
    "Branch",
    "GenerationDefaults",
    "Model",
    "ModelSpec",
    "Output",
    "Recorder",
    "Stack",
    "Sublayer",
    "Tie",
    "build",
    "build_meta",
    "materialise",
    "post_norm",
    "pre_norm",
    "record",
    "resolve_device",
    "resolve_dtype",
]
