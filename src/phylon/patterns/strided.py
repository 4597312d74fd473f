"""Every ``stride``-th earlier token: the long half of the Sparse Transformer's strided attention."""

from torch import Tensor

from phylon.patterns.base import Pattern, Records
from phylon.spec.base import Mechanism
from phylon.spec.errors import UserError
from phylon.spec.registry import register


class Strided(Mechanism, Pattern, frozen=True, kw_only=True):
    """A query sees itself and each ``stride``-th token before it: ``(query - key) mod stride = 0``.

    Sparse Transformer, Child et al. (arXiv:1904.10509), section 4.3, the set A(2); its A(1) is the band, a ``Window``.
    Merged heads see ``Window(size=l) | Strided(stride=l)``. Positions count within the document. Cost of a query over n
    keys: n / stride of them count, though a backend without block maps reads all.
    """

    stride: int

    def __post_init__(self) -> None:
        if self.stride < 1:
            raise UserError(f"stride must be at least 1, got {self.stride}")

    def allowed(self, query: Records, key: Records) -> Tensor:
        distance = query.positions - key.positions
        return (distance >= 0) & (distance % self.stride == 0)

    @property
    def streams(self) -> bool:
        return True


register(Strided, paper="arXiv:1904.10509 §4.3", cases=lambda: [Strided(stride=1), Strided(stride=3)])
