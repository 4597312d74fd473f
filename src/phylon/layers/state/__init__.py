"""What mixers keep between steps."""

from phylon.layers.state.chunk import Chunk, positions_from_segments
from phylon.layers.state.index import FIRST_CAPACITY
from phylon.layers.state.kv import CrossKV, FullKV, KVState, RollingKV
from phylon.layers.state.part import StatePart
from phylon.layers.state.recurrent import RecurrentState, boundaries
from phylon.layers.state.state import State

__all__ = [
    "FIRST_CAPACITY",
    "Chunk",
    "CrossKV",
    "FullKV",
    "KVState",
    "RecurrentState",
    "RollingKV",
    "State",
    "StatePart",
    "boundaries",
    "positions_from_segments",
]
