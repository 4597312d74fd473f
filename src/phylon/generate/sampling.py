"""From scores to the next token: pure functions on logits (B, V) in fp32, with settings of their own for every row.

The order is fixed: repetition penalty, temperature, top-k, top-p, min-p, then one draw. The draw is a Gumbel race whose
noise is a pure function of (key of the row and step, token id), so that a row's text depends neither on its neighbours
in the batch nor on anything drawn before.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phylon.spec import Spec, UserError
from phylon.spec.errors import check_number, check_size

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FEW = 1024


class Sampling(Spec, frozen=True, kw_only=True):
    """How one row chooses its tokens. ``temperature`` 0 is greedy: the greatest score, the lowest id on ties.

    ``top_k`` keeps the k best (the lower id on ties; more than the vocabulary keeps all), ``top_p`` the fewest best
    whose probabilities reach p (Holtzman et al., arXiv:1904.09751, section 3.1), ``min_p`` those with at least that
    share of the best one's probability (arXiv:2407.01082, section 3). ``repetition_penalty`` divides the positive
    scores of tokens seen in the row, prompt included, and multiplies negative ones (CTRL, arXiv:1909.05858, section
    4.1). ``seed`` is any integer.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            if name == "temperature" or getattr(self, name) is not None:
                check_number(name, getattr(self, name))
        check_size("seed", self.seed, None)
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature must be at least 0 and finite (0 is greedy), got {self.temperature}")
        if self.top_k is not None:
            check_size("top_k", self.top_k, None)
            if self.top_k < 1:
                raise UserError(f"top_k must be at least 1, got {self.top_k}; leave it out to keep every token")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise UserError(f"min_p must be from 0 to 1, got {self.min_p}")
        if self.repetition_penalty is not None and not 0 < self.repetition_penalty < math.inf:
            raise UserError(f"repetition_penalty must be above 0 (1 is none), got {self.repetition_penalty}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings as columns (B, 1), ``None`` where no row asks for the step; ``most_k`` is the largest top-k."""

    greedy: bool
    temperature: Tensor
    top_k: Tensor | None
    most_k: int
    top_p: Tensor | None
    min_p: Tensor | None
    repetition_penalty: Tensor | None

    @classmethod
    def of(cls, rows: Sequence[Sampling], vocab_size: int, device: torch.device) -> "Settings":
        def column(values: list[float | int | None], neutral: float | int) -> Tensor | None:
            if all(value is None or value == neutral for value in values):
                return None
            filled = [neutral if value is None else value for value in values]
            return torch.tensor(filled, device=device)[:, None]

        top_k = [vocab_size if row.top_k is None else min(row.top_k, vocab_size) for row in rows]
        penalty = column([row.repetition_penalty for row in rows], 1.0)
        return cls(
            greedy=all(row.temperature == 0 for row in rows),
            temperature=torch.tensor([float(row.temperature) for row in rows], device=device)[:, None],
            top_k=column(list(top_k), vocab_size),
            most_k=max(top_k),
            top_p=column([row.top_p for row in rows], 1.0),
            min_p=column([row.min_p for row in rows], 0.0),
            repetition_penalty=penalty,
        )


def sample(logits: Tensor, settings: Settings, keys: Sequence[int], seen: Tensor | None = None) -> Tensor:
    """The next token of every row (B,), from ``logits`` (B, V).

    ``keys`` drive the draws (``draw_key``); ``seen`` (B, V) marks the tokens that the repetition penalty is about.
    """
    scores = shaped(logits, settings, seen)
    if settings.greedy:
        return scores.argmax(-1)
    if settings.most_k < scores.shape[-1]:
        few, ids = scores.topk(settings.most_k)
    else:
        few, ids = scores, torch.arange(scores.shape[-1], device=scores.device)[None]
    winner = (few + gumbel(keys, ids)).argmax(-1, keepdim=True)
    drawn = ids.expand(len(scores), -1).gather(-1, winner)[:, 0]
    return torch.where(settings.temperature[:, 0] == 0, scores.argmax(-1), drawn)


def shaped(logits: Tensor, settings: Settings, seen: Tensor | None = None) -> Tensor:
    """The scores (B, V) whose softmax a token is drawn from; -inf where a filter cut. Greedy rows keep their order."""
    if settings.repetition_penalty is not None:
        assert seen is not None, "the repetition penalty needs the tokens seen so far"
        logits = penalised(logits, seen, settings.repetition_penalty)
    if settings.greedy:
        return logits
    logits = tempered(logits, settings.temperature)
    if settings.top_k is not None:
        logits = top_k_only(logits, settings.top_k, settings.most_k)
    if settings.top_p is not None:
        logits = top_p_only(logits, settings.top_p, settings.most_k)
    return logits if settings.min_p is None else min_p_only(logits, settings.min_p)


def penalised(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Scores of ``seen`` tokens (B, V) made less likely by ``penalty`` (B, 1)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def tempered(logits: Tensor, temperature: Tensor) -> Tensor:
    """``(logits - max) / temperature`` (B, 1), which no small temperature can overflow; 0 counts as 1."""
    shifted = logits - logits.amax(-1, keepdim=True)
    return shifted / torch.where(temperature == 0, 1.0, temperature)


def top_k_only(logits: Tensor, k: Tensor, most: int) -> Tensor:
    """Only the ``k`` (B, 1) best scores of each row, of which none is above ``most``."""
    return _best(logits, logits.topk(most).values, k)


def top_p_only(logits: Tensor, p: Tensor, most: int) -> Tensor:
    """Only the fewest best scores whose probabilities sum to at least ``p`` (B, 1); at most ``most`` are finite."""
    total = logits.logsumexp(-1, keepdim=True)
    # The fewest are nearly always few, and sorting the whole vocabulary is slow.
    for size in (min(_FEW, most), most):
        all_of_them = size == logits.shape[-1]
        ordered = logits.sort(descending=True).values if all_of_them else logits.topk(size).values
        probs = (ordered - total).exp()
        count = (probs.cumsum(-1) - probs < p).sum(-1, keepdim=True).clamp(min=1)
        if size == most or bool(((count < size) & (p < 1)).all()):
            break
    return _best(logits, ordered, torch.where(p < 1, count, size))


def min_p_only(logits: Tensor, p: Tensor) -> Tensor:
    """Only scores with a probability of at least ``p`` (B, 1) times that of the best."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + p.log(), -math.inf)


def _best(logits: Tensor, ordered: Tensor, count: Tensor) -> Tensor:
    """The ``count`` (B, 1) best of each row, lower ids first; ``ordered`` are its scores, greatest first."""
    edge = ordered.gather(-1, count - 1)
    above, tied = logits > edge, logits == edge
    room = count - above.sum(-1, keepdim=True)
    return logits.masked_fill(~(above | (tied & (tied.cumsum(-1) <= room))), -math.inf)


def gumbel(keys: Sequence[int], ids: Tensor) -> Tensor:
    """Gumbel noise (B, n) in fp32 for ``ids`` (B or 1, n): of id ``i``, number ``i`` of SplitMix64 seeded with the key.

    Steele, Lea and Flood (OOPSLA 2014), figure 16. The same in every batch and for every selection of ids.
    """
    key = torch.tensor([_signed(key) for key in keys], dtype=torch.int64, device=ids.device)[:, None]
    z = (ids + 1) * _signed(_GOLDEN) + key
    z = z.bitwise_xor_(_shifted(z, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    z = z.bitwise_xor_(_shifted(z, 27)).mul_(_signed(0x94D049BB133111EB))
    z = z.bitwise_xor_(_shifted(z, 31))
    uniform = _shifted(z, 11).float().add_(0.5).mul_(2.0**-53).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def draw_key(seed: int, stream: int, step: int) -> int:
    """The key of one draw: row seed, number of the stream under that seed, number of the draw in the stream."""
    key = 0
    for part in (seed, stream, step):
        key = _mixed((key + _GOLDEN) ^ (part & _MASK))
    return key


def _mixed(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _shifted(z: Tensor, bits: int) -> Tensor:
    """A logical shift to the right; that of signed tensors is arithmetic."""
    return (z >> bits).bitwise_and_(2 ** (64 - bits) - 1)
