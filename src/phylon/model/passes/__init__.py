"""Passes: how a built model is executed and which of it is trained; never part of the spec.

A pass changes a model in place and keeps every parameter's canonical name, so that checkpoints stay what they are.
"""

from phylon.model.passes.compile import compile_blocks
from phylon.model.passes.freeze import freeze, parameters_matching, train_only
from phylon.model.passes.lora import Lora, add_lora, lora_tensors, merge_lora
from phylon.model.passes.recompute import recompute_blocks

__all__ = [
    "Lora",
    "add_lora",
    "compile_blocks",
    "freeze",
    "lora_tensors",
    "merge_lora",
    "parameters_matching",
    "recompute_blocks",
    "train_only",
]
