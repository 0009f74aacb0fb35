"""What every array of ours that is no `jax.Array` tells of itself.

In:     its shape and dtype.
Out:    `Shaped`, to be derived from.
"""

from __future__ import annotations

import math

import numpy as np


class Shaped:
    """Something with the shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return self.size * self.dtype.itemsize
