"""Counter-based random bits: a pure function of what is counted, the same in every order and on every device."""

from torch import Tensor


def mix(x: Tensor) -> Tensor:
    """A 32-bit finaliser (the constants of Wellons' ``lowbias32``) on int64 tensors that hold 32-bit values."""
    mask = 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask
    x = ((x ^ (x >> 15)) * 0x846CA68B) & mask
    return x ^ (x >> 16)
