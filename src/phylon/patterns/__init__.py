"""Who may look at whom."""

from phylon.patterns.base import And, Or, Pattern, Records, aligned
from phylon.patterns.basic import Causal, Document, Full, SymmetricWindow, Window
from phylon.patterns.strided import Strided

__all__ = [
    "And",
    "Causal",
    "Document",
    "Full",
    "Or",
    "Pattern",
    "Records",
    "Strided",
    "SymmetricWindow",
    "Window",
    "aligned",
]
