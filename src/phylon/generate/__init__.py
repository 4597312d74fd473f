"""Text from a model: generation and streaming over its state, scores of given texts, conversations."""

from phylon.generate.beam import Hypothesis, beam_search
from phylon.generate.chat import ChatSession
from phylon.generate.classify import Classified, classifier, classify
from phylon.generate.decode import Batch, Generation, TextStream, generate, run, stream
from phylon.generate.encode import encode
from phylon.generate.finetuned import answer, label_words, rate, taught
from phylon.generate.request import Options, Request
from phylon.generate.sampling import Sampling
from phylon.generate.scoring import Score, score, score_choices
from phylon.spec.package import make_callable

__all__ = [
    "Batch",
    "ChatSession",
    "Classified",
    "Generation",
    "Hypothesis",
    "Options",
    "Request",
    "Sampling",
    "Score",
    "TextStream",
    "answer",
    "beam_search",
    "classifier",
    "classify",
    "encode",
    "generate",
    "label_words",
    "rate",
    "run",
    "score",
    "score_choices",
    "stream",
    "taught",
]


make_callable(__name__)
