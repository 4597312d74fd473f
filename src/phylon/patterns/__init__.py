"""Who may look at whom."""

from phylon.patterns.base import And, Or, Pattern, Records, aligned, measured
from phylon.patterns.basic import Causal, Document, Full, SymmetricWindow, Window
from phylon.patterns.bigbird import BigBird
from phylon.patterns.bounds import Bounds, Span, Tiles
from phylon.patterns.marked import Global, Prefix
from phylon.patterns.strided import SameBlock, Strided, Summary

__all__ = [
    "And",
    "BigBird",
    "Bounds",
    "Causal",
    "Document",
    "Full",
    "Global",
    "Or",
    "Pattern",
    "Prefix",
    "Records",
    "SameBlock",
    "Span",
    "Strided",
    "Summary",
    "SymmetricWindow",
    "Tiles",
    "Window",
    "aligned",
    "measured",
]
