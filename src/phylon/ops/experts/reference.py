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
        up, down = call.weights.up.unbind(0), call.weights.down.unbind(0)
        gate = _unbound(call.weights.gate, call.n_experts)
        up_bias, gate_bias, down_bias = (_unbound(bias, call.n_experts) for bias in call.weights.biases)
        # Selected, not indexed: the gradient of that is a plain sum by rows.
        routed, outs = call.x.index_select(0, token), []
        for e, rows in enumerate(routed.split(sizes)):
            if len(rows) == 0:
                continue
            w = gate[e]
            gated = None if w is None else F.linear(rows, w, gate_bias[e])
            hidden = call.hidden(F.linear(rows, up[e], up_bias[e]), gated)
            outs.append(F.linear(hidden, down[e], down_bias[e]))
        out = torch.cat(outs) if outs else routed
        return call.combine(out, token, place)


def _unbound(stacked: Tensor | None, count: int) -> tuple[Tensor | None, ...]:
    return (None,) * count if stacked is None else stacked.unbind(0)
