"""What a model costs, without memory for it: parameters, FLOPs, bytes of weights and state."""

from phylon.account.account import Account, account
from phylon.spec.package import make_callable

__all__ = ["Account", "account"]

make_callable(__name__)
