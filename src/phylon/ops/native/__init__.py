"""C++ kernels: compiled by the machine's own compiler, beside the run, and used once they are checked."""

from phylon.ops.native.library import Library, floats, pointer, strided
from phylon.ops.native.ready import limit, names, refresh, start, wait, without

__all__ = ["Library", "floats", "limit", "names", "pointer", "refresh", "start", "strided", "wait", "without"]
