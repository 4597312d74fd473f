"""LayerNorm and RMSNorm."""

import torch
from torch import Tensor, nn

from phylon.layers.part import InitContext, Part, parameter
from phylon.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from phylon.spec.base import Mechanism, Norm
from phylon.spec.errors import check_finite
from phylon.spec.registry import register


class LayerNorm(Mechanism, Norm, frozen=True, kw_only=True):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last dimension.

    Ba, Kiros and Hinton (arXiv:1607.06450), section 3. ``x`` (..., D); ``weight``, ``bias`` (D,). ``bias`` says whether
    the bias exists. Cost: O(D) a token.
    """

    eps: float = 1e-5
    bias: bool = True

    def __post_init__(self) -> None:
        check_finite("eps", self.eps, above=0)


class RMSNorm(Mechanism, Norm, frozen=True, kw_only=True):
    """``x / sqrt(mean(x^2) + eps) * (offset + weight)`` over the last dimension.

    Zhang and Sennrich (arXiv:1910.07467), equation 4. ``x`` (..., D); ``weight`` (D,). ``offset`` is the convention of
    what the weight counts from: 0, or 1 in Gemma (arXiv:2403.08295, released code), where adding it before storing
    would not round back. Cost: O(D) a token.
    """

    eps: float = 1e-6
    offset: float = 0.0

    def __post_init__(self) -> None:
        check_finite("eps", self.eps, above=0)
        check_finite("offset", self.offset)


class ResidualNorm(Part):
    """A norm that can take the residual sum before it along.

    ``norm(x)`` is the normed ``x``; ``norm(x, added)`` gives the sum ``x + added`` (``x`` for ``None``) and its norm.
    """


class LayerNormModule(ResidualNorm):
    def __init__(self, spec: LayerNorm, width: int) -> None:
        super().__init__()
        self.eps = spec.eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if spec.bias else None

    def init_parameters(self, init: InitContext) -> None:
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, *added: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        weight, bias = parameter(self, "weight"), parameter(self, "bias")
        if added:
            return add_layer_norm(x, added[0], weight, bias, self.eps)
        return layer_norm(x, weight, bias, self.eps)


class RMSNormModule(ResidualNorm):
    def __init__(self, spec: RMSNorm, width: int) -> None:
        super().__init__()
        self.eps, self.offset = spec.eps, spec.offset
        self.weight = nn.Parameter(torch.empty(width))

    def init_parameters(self, init: InitContext) -> None:
        nn.init.constant_(self.weight, 1 - self.offset)

    def forward(self, x: Tensor, *added: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        weight = parameter(self, "weight")
        if self.offset:
            weight = weight.to(torch.promote_types(weight.dtype, torch.float32)) + self.offset
        return add_rms_norm(x, added[0], weight, self.eps) if added else rms_norm(x, weight, self.eps)


register(
    LayerNorm,
    module=LayerNormModule,
    paper="arXiv:1607.06450 §3",
    cases=lambda: [LayerNorm(), LayerNorm(eps=1e-12, bias=False)],
    flops=lambda spec, width, n_keys: 0,
)
register(
    RMSNorm,
    module=RMSNormModule,
    paper="arXiv:1910.07467 eq. 4",
    cases=lambda: [RMSNorm(), RMSNorm(eps=1e-5), RMSNorm(offset=1.0)],
    flops=lambda spec, width, n_keys: 0,
)
