"""Random dimension numbers of gathers, and, mirrored, of scatters: what the tests of reading and writing share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

LENGTHS = (2, 4, 8)
MODES = ("clip", "fill", "promise_in_bounds")
KINDS = {  # of a table dim: is it in the index map, is it collapsed, the length of a slice of a dim of this size
    "searched": (True, True, lambda size: 1),
    "searched, kept": (True, False, lambda size: 1),
    "indexed window": (True, False, lambda size: size - 1),
    "indexed, all of it": (True, False, lambda size: size),
    "all of it": (False, False, lambda size: size),
    "start of it": (False, False, lambda size: max(1, size // 2)),
    "first": (False, True, lambda size: 1),
    "batching": (False, False, lambda size: 1),
}


@dataclass(frozen=True)
class Indexed:
    """Shapes, dimension numbers and index values of one gather or scatter."""

    table: tuple[int, ...]
    indices: np.ndarray
    taken: tuple[int, ...]
    slices: tuple[int, ...]
    numbers: lax.GatherDimensionNumbers

    def scatter_numbers(self) -> lax.ScatterDimensionNumbers:
        """Of the scatter that writes where the gather reads."""
        return lax.ScatterDimensionNumbers(
            update_window_dims=self.numbers.offset_dims,
            inserted_window_dims=self.numbers.collapsed_slice_dims,
            scatter_dims_to_operand_dims=self.numbers.start_index_map,
            operand_batching_dims=self.numbers.operand_batching_dims,
            scatter_indices_batching_dims=self.numbers.start_indices_batching_dims,
        )


@st.composite
def indexed(draw: Any) -> Indexed:
    """Any gather or scatter of up to four table dims, with indices in range, below and beyond it."""
    kinds = ["searched", *draw(st.lists(st.sampled_from(sorted(KINDS)), max_size=3))]
    kinds = draw(st.permutations(kinds))
    table = [draw(st.sampled_from(LENGTHS)) for _ in kinds]
    taken = [KINDS[kind][2](size) for kind, size in zip(kinds, table, strict=True)]
    batching = [d for d, kind in enumerate(kinds) if kind == "batching"]
    others = draw(st.lists(st.sampled_from((1, *LENGTHS)), max_size=2))
    positions = draw(st.permutations([*(-1 - d for d in batching), *others]))  # a batching dim d stands as -1 - d
    index_map = draw(st.permutations([d for d, kind in enumerate(kinds) if KINDS[kind][0]]))
    windows = [taken[d] for d, kind in enumerate(kinds) if not KINDS[kind][1] and kind != "batching"]
    at = [table[-1 - size] if size < 0 else size for size in positions]
    order = draw(st.permutations([True] * len(windows) + [False] * len(at)))
    left, right = iter(windows), iter(at)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(d for d, window in enumerate(order) if window),
        collapsed_slice_dims=tuple(d for d, kind in enumerate(kinds) if KINDS[kind][1]),
        start_index_map=tuple(index_map),
        operand_batching_dims=tuple(batching),
        start_indices_batching_dims=tuple(positions.index(-1 - d) for d in batching),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    dtype = draw(st.sampled_from(["int32", "int8", "uint8", "uint32"]))
    last = [table[d] - taken[d] for d in index_map]
    inside = rng.integers(0, np.array(last) + 1, (*at, len(index_map)))
    wild = rng.integers(-10, 10, inside.shape)
    values = np.where(rng.random(inside.shape) < 0.2, wild, inside)
    return Indexed(
        tuple(table),
        np.asarray(values).astype(jnp.dtype(dtype)),
        tuple(taken),
        tuple(next(left if window else right) for window in order),
        numbers,
    )
