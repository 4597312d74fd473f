"""Speed and memory by named cases: correct first, then medians of interleaved pairs on a machine that is left alone."""

from phylon.bench.case import Case, Cell, Key, Planned, all_cases, case, find
from phylon.bench.run import run

__all__ = ["Case", "Cell", "Key", "Planned", "all_cases", "case", "find", "run"]
