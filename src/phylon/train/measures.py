"""What a model's predictions are worth: accuracy, F1, exact match, rank correlation, BLEU. Pure functions of lists."""

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np

from phylon.spec.errors import UserError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = set(string.punctuation)


def accuracy(predictions: Sequence[object], labels: Sequence[object]) -> float:
    """The share of predictions that equal their label."""
    _check(predictions, labels)
    return sum(p == y for p, y in zip(predictions, labels, strict=True)) / len(labels)


def f1_of(predictions: Sequence[object], labels: Sequence[object], positive: object) -> float:
    """``2 TP / (2 TP + FP + FN)`` of one class; 0 where it is neither predicted nor a label."""
    _check(predictions, labels)
    hits = sum(p == positive and y == positive for p, y in zip(predictions, labels, strict=True))
    told = sum(p == positive for p in predictions) + sum(y == positive for y in labels)
    return 2 * hits / told if told else 0.0


def macro_f1(predictions: Sequence[object], labels: Sequence[object], classes: Sequence[object] | None = None) -> float:
    """The mean of ``f1_of`` over ``classes``; left out, over every class that is predicted or a label."""
    _check(predictions, labels)
    classes = list(set(predictions) | set(labels)) if classes is None else classes
    return sum(f1_of(predictions, labels, which) for which in classes) / len(classes)


def normalised_answer(text: str) -> str:
    """An answer as SQuAD compares it: lower case, without punctuation and articles, single spaces.

    Rajpurkar et al. (arXiv:1606.05250), section 6.1 and the released evaluation.
    """
    bare = "".join(letter for letter in text.lower() if letter not in _PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 where the normalised prediction is one of the normalised ``answers``, else 0."""
    return float(normalised_answer(prediction) in map(normalised_answer, answers))


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """The overlap of the words of the prediction and of the answer it fits best; two empty answers agree."""
    return max(_overlap(normalised_answer(prediction).split(), normalised_answer(text).split()) for text in answers)


def _overlap(said: list[str], right: list[str]) -> float:
    if not said or not right:
        return float(said == right)
    return 2 * (Counter(said) & Counter(right)).total() / (len(said) + len(right))


def ranks(values: Sequence[float]) -> np.ndarray:
    """The rank of each value from 1, (n,) float64; equal values share the mean of their ranks."""
    _, which, counts = np.unique(np.asarray(values, np.float64), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[which]


def pearson(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The correlation of two lists; 0 where one of them is constant."""
    _check(xs, ys)
    x, y = (np.asarray(values, np.float64) - np.mean(values) for values in (xs, ys))
    scale = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / scale if scale else 0.0


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The correlation of the ranks. Spearman (1904); STS-B in GLUE (arXiv:1804.07461), section 3.3."""
    _check(xs, ys)
    return pearson(ranks(xs).tolist(), ranks(ys).tolist())


def mean_squared_error(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The mean of the squared differences."""
    _check(xs, ys)
    return float(np.mean((np.asarray(xs, np.float64) - np.asarray(ys, np.float64)) ** 2))


def retrieval_accuracy(queries: np.ndarray, answers: np.ndarray, texts: np.ndarray | None = None) -> float:
    """How often the most similar of all ``answers`` (N, D) is a query's own, by cosine; ``queries`` (N, D).

    ``texts`` (N,) numbers what the answers say: one that says the same as a query's own is its own. A tie is a miss
    unless the query's own answer comes first in it: a model that says the same of all N different texts has 1 / N.
    """
    assert queries.shape == answers.shape, (queries.shape, answers.shape)
    if not len(queries):
        raise UserError("there are no pairs to search among")
    unit = [x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12) for x in (queries, answers)]
    texts = np.arange(len(queries)) if texts is None else texts
    return float(np.mean(texts[(unit[0] @ unit[1].T).argmax(1)] == texts))


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """Corpus BLEU (0 to 100) and its signature, by sacrebleu's defaults. Post (arXiv:1804.08771)."""
    _check(hypotheses, references)
    metric = sacrebleu_metric()
    score = metric.corpus_score(list(hypotheses), [list(references)]).score
    return float(score), str(metric.get_signature())


def sacrebleu_metric():
    """sacrebleu's BLEU, or one line on how to install it."""
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError:
        raise UserError("BLEU needs sacrebleu: pip install 'phylon[translate]'") from None
    return BLEU()


def _check(predictions: Sequence[object], labels: Sequence[object]) -> None:
    if len(predictions) != len(labels):
        raise UserError(f"{len(predictions)} predictions and {len(labels)} labels; there must be one for each")
    if not len(labels):
        raise UserError("there is nothing to measure: no labels")
