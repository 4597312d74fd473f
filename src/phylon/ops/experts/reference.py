"""The oracle: every expert that got a token computes its feed-forward network, one after the other."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from phylon.ops.checks import transformed
from phylon.ops.experts.call import ExpertCall


class Reference:
    """A loop over the experts that got a token; one expert is its plain FFN bit for bit. Supports everything."""

    name = "reference"

    def available(self) -> str | None:
        return None

    def supports(self, call: ExpertCall) -> str | None:
        return None

    def run(self, call: ExpertCall) -> Tensor:
        if call.x.is_meta:
            return torch.empty_like(call.x)
        network = _networks(call)
        if transformed():
            return _everywhere(call, network)
        token, place, counts = call.sorted()
        sizes = counts.tolist()
        token, place = token[: sum(sizes)], place[: sum(sizes)]
        # Selected, not indexed: the gradient of that is a plain sum by rows.
        routed = call.x.index_select(0, token)
        outs = [network(e, rows) for e, rows in enumerate(routed.split(sizes)) if len(rows)]
        out = torch.cat(outs) if outs else routed
        return call.combine(out, token, place)


def _networks(call: ExpertCall) -> Callable[[int, Tensor], Tensor]:
    """What expert ``e`` makes of rows (M, D)."""
    # Unbound once: a slice per expert would give each a gradient as large as the whole stack.
    up, down = call.weights.up.unbind(0), call.weights.down.unbind(0)
    gate = _unbound(call.weights.gate, call.n_experts)
    up_bias, gate_bias, down_bias = (_unbound(bias, call.n_experts) for bias in call.weights.biases)

    def network(e: int, rows: Tensor) -> Tensor:
        w = gate[e]
        gated = None if w is None else F.linear(rows, w, gate_bias[e])
        return F.linear(call.hidden(F.linear(rows, up[e], up_bias[e]), gated), down[e], down_bias[e])

    return network


def _everywhere(call: ExpertCall, network: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Every expert on every token: ``torch.func.vmap`` does not tell how many tokens each one got."""
    summed = call.gates.new_zeros(call.x.shape)
    for e in range(call.n_experts):
        sent = (call.chosen == e).any(-1, keepdim=True)
        gate = call.gates.masked_fill(call.chosen != e, 0).sum(-1, keepdim=True)
        summed = summed + (network(e, call.x.masked_fill(~sent, 0)) * gate).masked_fill(~sent, 0)
    return summed.to(call.x.dtype)


def _unbound(stacked: Tensor | None, count: int) -> tuple[Tensor | None, ...]:
    return (None,) * count if stacked is None else stacked.unbind(0)
