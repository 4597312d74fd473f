"""Recording intermediate tensors by name."""

from collections.abc import Generator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import Tensor

from phylon.spec.errors import UserError, did_you_mean_glob

if TYPE_CHECKING:
    from phylon.model.model import Model


class Recorder(dict[str, Tensor]):
    """Recorded tensors by path, in the order of the forward pass. A path recorded twice keeps the last value."""

    def __init__(self, globs: tuple[str, ...]) -> None:
        super().__init__()
        self.globs = globs
        self._points: set[str] = set()
        self._unmatched = set(globs)

    def wants(self, path: str) -> bool:
        self._points.add(path)
        return any(fnmatchcase(path, glob) for glob in self.globs)

    def __call__(self, path: str, value: Tensor) -> Tensor:
        if self.wants(path):
            self[path] = value.detach()
            self._unmatched -= {glob for glob in self._unmatched if fnmatchcase(path, glob)}
        return value

    def check_matched(self) -> None:
        """Refuse a glob that matched no point although the model ran."""
        missing = [glob for glob in self.globs if glob in self._unmatched]
        if not missing or not self._points:
            return
        glob = missing[0]
        near = did_you_mean_glob(glob, self._points, (".*",))
        raise UserError(f"nothing to record matches '{glob}' in this model{near}")


@contextmanager
def record(model: "Model", *globs: str) -> Generator[Recorder]:
    """Record what matches ``globs``, for example ``"decoder.blocks.*.attn.z"``, during the forward passes inside.

    Points: ``<stack>.embed.out``, ``<block>.resid_pre``, ``resid_mid``, ``resid_post``, ``<block>.attn.q``, ``k``,
    ``v`` (B, T, heads, E), ``scores``, ``weights`` (B, H, T, S), ``z`` (B, T, H, E), ``<block>.ffn.hidden`` (B, T, F),
    ``<block>.<op>.out`` (B, T, D), ``<stack>.out``, ``heads.<name>.logits``. Asking for scores or weights runs the
    reference attention.

    Raises:
        UserError: at the end, if the model ran and a glob matched nothing.
    """
    recorder = Recorder(globs or ("*",))
    before, model.taps = model.taps, recorder
    try:
        yield recorder
    finally:
        model.taps = before
    recorder.check_matched()
