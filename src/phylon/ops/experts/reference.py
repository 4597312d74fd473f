"""The oracle: every expert that got a token computes its feed-forward network, one after the other."""

import torch
from torch import Tensor
from torch.nn import functional as F

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
        token, place, counts = call.sorted()
        sizes = counts.tolist()
        token, place = token[: sum(sizes)], place[: sum(sizes)]
        # Unbound once: a slice per expert would give each a gradient as large as the whole stack.
        weights = [_unbound(t, call.n_experts) for t in (call.weights.up, call.weights.gate, call.weights.down)]
        biases = [_unbound(t, call.n_experts) for t in call.weights.biases]
        # Selected, not indexed: the gradient of that is a plain sum by rows.
        routed, outs = call.x.index_select(0, token), []
        for e, rows in enumerate(routed.split(sizes)):
            if len(rows) == 0:
                continue
            (up, gate, down), (up_bias, gate_bias, down_bias) = ([t[e] for t in ts] for ts in (weights, biases))
            gated = None if gate is None else F.linear(rows, gate, gate_bias)
            outs.append(F.linear(call.hidden(F.linear(rows, up, up_bias), gated), down, down_bias))
        out = torch.cat(outs) if outs else routed
        return call.combine(out, token, place)


def _unbound(stacked: Tensor | None, count: int) -> tuple[Tensor | None, ...]:
    return (None,) * count if stacked is None else stacked.unbind(0)
