"""Which of several groups of inputs holds the samples: the one along whose first dim the step can be worked through.

In:     a flat program, groups of inputs of one leading dim each.
Out:    the groups whose rows can be taken a part at a time, exactly (`phases.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar._jax import Jaxpr
from autopar.errors import MicrobatchError
from autopar.ir.split.phases import find_phases
from autopar.ir.split.waiting import SamplesWaitError


def rows_are_samples(jaxpr: Jaxpr, groups: Mapping[int, Sequence[int]]) -> list[int]:
    """Leading dims, of `groups`, that the step goes through row by row.

    Args:
        jaxpr: Flat program.
        groups: Leading dim -> positions of the inputs that have it.

    A layer of a stack, a row of a frozen weight are no samples: other rows wait for what comes of them.
    """
    return [size for size, inputs in groups.items() if size > 1 and _goes_apart(jaxpr, size, inputs)]


def _goes_apart(jaxpr: Jaxpr, size: int, inputs: Sequence[int]) -> bool:
    count = next(k for k in range(2, size + 1) if size % k == 0)
    try:
        find_phases(jaxpr, count, inputs)
    except (MicrobatchError, SamplesWaitError):
        return False
    return True
