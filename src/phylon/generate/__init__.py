"""Text from a model: generation and streaming over its state, scores of given texts, conversations."""

import sys
from types import ModuleType

from phylon.generate.beam import Hypothesis, beam_search
from phylon.generate.chat import ChatSession
from phylon.generate.decode import Batch, Generation, TextStream, generate, run, stream
from phylon.generate.request import Options, Request
from phylon.generate.sampling import Sampling
from phylon.generate.scoring import Score, score, score_choices

__all__ = [
    "Batch",
    "ChatSession",
    "Generation",
    "Hypothesis",
    "Options",
    "Request",
    "Sampling",
    "Score",
    "TextStream",
    "beam_search",
    "generate",
    "run",
    "score",
    "score_choices",
    "stream",
]


class _Package(ModuleType):
    """``phylon.generate`` is this package and, in the public interface, the function: calling one calls the other."""

    __call__ = staticmethod(generate)


sys.modules[__name__].__class__ = _Package
