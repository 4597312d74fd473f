"""The distances of a call's tokens, by which kernels read a bias from a table never much longer than the call."""

from phylon.ops.attention.bias import AlibiBias, BucketBias
from phylon.ops.attention.call import AttentionCall
from phylon.patterns import Records

_LEAST, _TIMES = 2**14, 4
"""A table may hold so many distances, or so many a token."""


def too_far(call: AttentionCall) -> str | None:
    """Why the positions of ``call`` are too far apart for a table of its bias."""
    if call.bias is None or (call.query is None and call.key is None):
        return None
    first, last = distances(call)
    if last - first < max(_LEAST, _TIMES * (call.q.shape[1] + call.k.shape[1])):
        return None
    return f"positions are up to {max(last, -first):,} apart, too far for a table of {type(call.bias).__name__}"


def distances(call: AttentionCall) -> tuple[int, int]:
    """The least and the greatest distance ``query - key``; beyond them the bias is what it is there."""
    assert isinstance(call.bias, AlibiBias | BucketBias)
    holder = call.query or call.key
    if holder is None:
        return 1 - call.q.shape[1], call.k.shape[1] - 1
    # Both sides stay alive with the answer, so that their identities cannot be reused.
    name = ("distances", id(call.query), id(call.key), call.q.shape[1], call.k.shape[1])
    other = None if call.key is holder else call.key
    first, last = holder.memo(name, lambda: (_measured(*call.records()), other))[0]
    reach = call.bias.reach
    return (first, last) if reach is None else (_within(first, reach), _within(last, reach))


def _measured(query: Records, key: Records) -> tuple[int, int]:
    q, k = query.positions, key.positions
    return int((q.amin(1) - k.amax(1)).min()), int((q.amax(1) - k.amin(1)).max())


def _within(distance: int, reach: int) -> int:
    return max(-reach, min(distance, reach))
