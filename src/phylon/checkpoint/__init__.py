"""Checkpoints: safe readers and writers of safetensors and GGUF, and the reversible mapping between layouts."""

from phylon.checkpoint.gguf_io import open_gguf
from phylon.checkpoint.gguf_writer import write_gguf
from phylon.checkpoint.mapping import Layout, PrefixError, identity
from phylon.checkpoint.moves import LoadPlan, StoredDtypes, stored_dtypes
from phylon.checkpoint.rules import (
    Checked,
    Computed,
    Concat,
    Constant,
    Copied,
    Drop,
    Fused,
    Other,
    PermuteRotary,
    Rename,
    Reshaped,
    Rule,
    Stack,
    Tied,
    Transpose,
    interleaved,
    rotary_rows,
)
from phylon.checkpoint.safetensors_io import open_safetensors, write_safetensors
from phylon.checkpoint.source import MemorySource, TensorInfo, TensorSource

__all__ = [
    "Checked",
    "Computed",
    "Concat",
    "Constant",
    "Copied",
    "Drop",
    "Fused",
    "Layout",
    "LoadPlan",
    "MemorySource",
    "Other",
    "PermuteRotary",
    "PrefixError",
    "Rename",
    "Reshaped",
    "Rule",
    "Stack",
    "StoredDtypes",
    "TensorInfo",
    "TensorSource",
    "Tied",
    "Transpose",
    "identity",
    "interleaved",
    "open_gguf",
    "open_safetensors",
    "rotary_rows",
    "stored_dtypes",
    "write_gguf",
    "write_safetensors",
]
