"""The state of every random number generator a run draws from, as tensors and plain data, without pickle."""

import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class RandomState(NamedTuple):
    """PyTorch's generators (``cpu``, ``cuda:0``, …) as byte tensors; Python's and NumPy's as JSON values."""

    torch: dict[str, Tensor]
    python: list[Any]
    numpy: list[Any]


def seed_all(seed: int) -> None:
    """Seed PyTorch (every device), Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_state() -> RandomState:
    """The state of every generator now."""
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        tensors |= {f"cuda:{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    version, words, gauss = random.getstate()
    name, keys, place, has_gauss, cached = np.random.get_state()  # type: ignore[misc]
    return RandomState(
        tensors, [version, list(words), gauss], [name, np.asarray(keys).tolist(), place, has_gauss, cached]
    )


def set_random_state(state: RandomState) -> None:
    """Put every generator back; devices that are gone are passed over (the changed machine is named elsewhere)."""
    for name, value in state.torch.items():
        if name == "cpu":
            torch.set_rng_state(value)
        elif torch.cuda.is_available() and int(name.removeprefix("cuda:")) < torch.cuda.device_count():
            torch.cuda.set_rng_state(value, name)
    version, words, gauss = state.python
    random.setstate((version, tuple(words), gauss))
    name, keys, place, has_gauss, cached = state.numpy
    np.random.set_state((name, np.array(keys, np.uint32), place, has_gauss, cached))


@contextmanager
def random_state_kept() -> Generator[None]:
    """Whatever is drawn inside (a sample, an evaluation) leaves the run's own randomness where it was."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
