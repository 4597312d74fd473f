"""Text from a model: generation and streaming over its state, scores of given texts, conversations."""

from phylon.generate.chat import ChatSession
from phylon.generate.decode import Batch, Generation, TextStream, generate, run, stream
from phylon.generate.encode import encode
from phylon.generate.request import Options, Request
from phylon.generate.sampling import Sampling
from phylon.generate.scoring import Score, score, score_choices

__all__ = [
    "Batch",
    "ChatSession",
    "Generation",
    "Options",
    "Request",
    "Sampling",
    "Score",
    "TextStream",
    "encode",
    "generate",
    "run",
    "score",
    "score_choices",
    "stream",
]
