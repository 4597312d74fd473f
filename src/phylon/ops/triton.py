"""Whether Triton's kernels can run here."""

import os
from functools import cache
from importlib.util import find_spec

import torch


def unavailable() -> str | None:
    """``None``, or why no kernel can run."""
    if not _installed():
        return "Triton is not installed"
    return None if torch.cuda.is_available() or interpreted() else "no GPU"


def interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU, step by step; it asks the environment when it is first imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _installed() -> bool:
    return find_spec("triton") is not None
