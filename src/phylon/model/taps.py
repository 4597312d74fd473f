"""Recording intermediate tensors by name."""

from collections.abc import Generator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from phylon.model.model import Model


class Recorder(dict[str, Tensor]):
    """Recorded tensors by path, in the order of the forward pass. A path recorded twice keeps the last value."""

    def __init__(self, globs: tuple[str, ...]) -> None:
        super().__init__()
        self.globs = globs

    def wants(self, path: str) -> bool:
        return any(fnmatchcase(path, glob) for glob in self.globs)

    def __call__(self, path: str, value: Tensor) -> Tensor:
        if self.wants(path):
            self[path] = value.detach()
        return value


@contextmanager
def record(model: "Model", *globs: str) -> Generator[Recorder]:
    """Record what matches ``globs``, for example ``"decoder.blocks.*.attn.z"``, during the forward passes inside.

    Points: ``<stack>.embed.out``, ``<block>.resid_pre``, ``resid_mid``, ``resid_post``, ``<block>.attn.q``, ``k``,
    ``v`` (B, T, heads, E), ``scores``, ``weights`` (B, H, T, S), ``z`` (B, T, H, E), ``<block>.ffn.hidden`` (B, T, F),
    ``<block>.<op>.out`` (B, T, D), ``<stack>.out``, ``heads.<name>.logits``. Asking for scores or weights runs the
    reference attention.
    """
    recorder = Recorder(globs or ("*",))
    before, model.taps = model.taps, recorder
    try:
        yield recorder
    finally:
        model.taps = before
