"""The law (design, section 3) checked on a model as it is: its own weights, vocabulary, dtype and device.

Each cell runs a few random documents another way and compares with every document alone in one plain call. A cell that
does not apply says why; positive controls show that the comparison could fail.
"""

import torch

from phylon.checkpoint.compare import Reference, compare
from phylon.checkpoint.law import Cell, Report
from phylon.checkpoint.verify_images import Images, verify_images
from phylon.checkpoint.verify_texts import Texts, verify_texts
from phylon.model import Model
from phylon.spec.errors import UserError, check_seed

__all__ = ["Cell", "Reference", "Report", "against", "verify"]


def verify(model: Model, *, reference: Reference | None = None, length: int | None = None, seed: int = 0) -> Report:
    """Run the law's table on ``model``, with random documents of at most ``length`` tokens of its own vocabulary.

    All that the model gives is compared: hidden states and the values of every head. Two ways agree if they differ by
    at most 1e-5 of the largest value (fp32), or if the other way is at most twice as far from a run in higher precision
    as the plain pass is, with these inputs or with some a rounding away (deep models; the only rule in low precision).
    The plain pass itself is judged alike by a pass on the readable backends, also with rows enough for every kernel to
    act. ``length`` defaults to 24, or to eight more than a window that is no longer than 128. A model that reads images
    is given a few of random pixels: alone, beside others, after another call, on every backend, in another size.

    Raises:
        UserError: the model reads neither tokens nor images, or ``length`` is given for images.
    """
    check_seed("seed", seed)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            if not hasattr(model.spec.last_stack.embed, "image_shape"):
                return verify_texts(Texts(model, length, seed), reference)
            if length is not None:
                raise UserError("a length is one of token ids, and this model reads images; leave it out")
            return verify_images(model, reference, seed)
    finally:
        model.train(was_training)


def against(model: Model, reference: Reference, *, seed: int = 0) -> list[Cell]:
    """The cells of ``verify`` that compare ``model``, in eval mode, with ``reference``, on inputs of its own size."""
    with torch.no_grad():
        sees = hasattr(model.spec.last_stack.embed, "image_shape")
        return compare(Images(model, seed) if sees else Texts(model, None, seed), reference)
