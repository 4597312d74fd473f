"""What a model costs, without memory for it: parameters, FLOPs, bytes of weights and state."""

from phylon.account.account import Account, account

__all__ = ["Account", "account"]
