"""Parity is a matter of the maths: both sides compute with PyTorch's own operations.

The C++ kernels round otherwise, which ill-conditioned tiny models amplify; they are held against the reference ops in
``tests/contract`` and ``tests/ops``.
"""

from collections.abc import Iterator

import pytest

from phylon.ops import native


@pytest.fixture(autouse=True)
def plain_kernels() -> Iterator[None]:
    with native.without():
        yield
