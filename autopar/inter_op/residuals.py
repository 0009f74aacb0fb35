"""What a stage keeps between its forward and its backward pass.

In:     the equations of one stage's forward pass, and the forward values its backward pass reads.
Out:    `Kept`: the values to keep, and the forward equations to run again, which need only those.
Method: minimum cut. A value is kept, which costs its bytes, or made again from values that are; what is heavy (products,
        convolutions, loops, random bits) is never made again. Among cuts of equal bytes the one with the least to
        run again. The idea is that of the min-cut partitioner of PyTorch (Chen and others, "min-cut rematerialization").
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from autopar._jax import JaxprEqn, Literal, Var
from autopar.ir.rules import rule_for
from autopar.ir.structure import inputs_of, is_structured
from autopar.ir.work import num_bytes, num_elements_of

_HEAVY = frozenset(
    "dot_general ragged_dot conv_general_dilated threefry2x32 philox2x32 philox4x32 threefry4x32 sort cumsum cumprod "
    "cummax cummin cumlogsumexp fft gather scatter scatter_add scatter_mul scatter_min scatter_max top_k "
    "reduce_window_sum reduce_window_max reduce_window select_and_scatter_add erf_inv".split()
)
_UNIT = 16
"""Capacities are counted in units of so many bytes: the flow solver takes 32-bit integers."""


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """What passes from a stage's forward to its backward.

    Attributes:
        values: Kept per microbatch in flight.
        again: Forward equations that the backward runs again, in order.
    """

    values: tuple[Var, ...]
    again: tuple[JaxprEqn, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all kept values, whole."""
        return sum(map(num_bytes, self.values))


def choose_residuals(
    eqns: Sequence[JaxprEqn], wanted: Sequence[Var], free: Collection[Var], received: Collection[Var] = ()
) -> Kept:
    """Choose what to keep.

    Args:
        eqns: Forward equations of the stage, in order.
        wanted: Forward values that the backward reads.
        free: Values that are at hand in both passes at no cost: parameters and what is made of next to nothing.
        received: Values that come from other stages; they can be kept, not made again.
    """
    free = set(free)
    made_by = {var: eqn for eqn in eqns for var in eqn.outvars}
    nodes = _ancestors([v for v in wanted if v not in free], made_by, free)
    if not nodes:
        return Kept((), ())
    index = {var: k for k, var in enumerate(nodes)}
    source, sink = 2 * len(nodes), 2 * len(nodes) + 1
    total = sum(_capacity(var) for var in nodes) + 1
    # The solver's integers have 32 bits: coarser units for larger programs.
    scale = max(1, -(-total // (1 << 29)))
    infinite = total // scale + len(nodes) + 1
    rows, columns, capacities = [], [], []

    def connect(a: int, b: int, capacity: int) -> None:
        rows.append(a)
        columns.append(b)
        capacities.append(capacity)

    for var, k in index.items():
        connect(2 * k, 2 * k + 1, max(1, _capacity(var) // scale))
        eqn = made_by.get(var)
        if eqn is None or not can_run_again(eqn):
            connect(source, 2 * k, infinite)
        else:
            for operand in dict.fromkeys(inputs_of(eqn)):
                if operand in index:
                    connect(2 * index[operand] + 1, 2 * k, infinite)
    for var in dict.fromkeys(wanted):
        if var in index:
            connect(2 * index[var] + 1, sink, infinite)
    size = 2 * len(nodes) + 2
    graph = csr_array((np.array(capacities, np.int32), (rows, columns)), shape=(size, size))
    flow = maximum_flow(graph, source, sink).flow
    behind = _reaches(graph - flow, sink)
    values = [var for var, k in index.items() if not behind[2 * k] and behind[2 * k + 1]]
    kept = dict.fromkeys(values)
    return Kept(tuple(values), _again(eqns, wanted, kept, free, made_by))


def can_run_again(eqn: JaxprEqn) -> bool:
    """Whether an operation is cheap enough to be done twice."""
    if is_structured(eqn):
        return eqn.primitive.name == "optimization_barrier"
    if eqn.primitive.name in _HEAVY or eqn.effects:
        return False
    elements = sum(num_elements_of(v) for v in (*eqn.outvars, *(inputs_of(eqn))))
    return rule_for(eqn).flops <= 4 * elements


def _capacity(var: Var) -> int:
    return -(-num_bytes(var) // _UNIT)


def _ancestors(wanted: Sequence[Var], made_by: Mapping[Var, JaxprEqn], free: Collection[Var]) -> list[Var]:
    """The wanted values and what they could be made of, as far as making again is allowed."""
    found: dict[Var, None] = {}
    waiting = list(wanted)
    while waiting:
        var = waiting.pop()
        if var in found or var in free:
            continue
        found[var] = None
        eqn = made_by.get(var)
        if eqn is not None and can_run_again(eqn):
            waiting += inputs_of(eqn)
    return list(found)


def _reaches(residual: csr_array, sink: int) -> np.ndarray:
    """Nodes from which the sink can be reached where capacity is left."""
    backward = residual.T.tocsr()
    found = np.zeros(residual.shape[0], bool)
    found[sink] = True
    waiting = [sink]
    while waiting:
        at = waiting.pop()
        start, stop = backward.indptr[at], backward.indptr[at + 1]
        for other, left in zip(backward.indices[start:stop], backward.data[start:stop], strict=True):
            if left > 0 and not found[other]:
                found[other] = True
                waiting.append(int(other))
    return found


def _again(
    eqns: Sequence[JaxprEqn],
    wanted: Sequence[Var],
    kept: Collection[Var],
    free: Collection[Var],
    made_by: Mapping[Var, JaxprEqn],
) -> tuple[JaxprEqn, ...]:
    needed: dict[int, None] = {}
    waiting = [v for v in wanted if v not in kept and v not in free]
    while waiting:
        eqn = made_by[waiting.pop()]
        if id(eqn) not in needed:
            needed[id(eqn)] = None
            waiting += [a for a in eqn.invars if not isinstance(a, Literal) and a not in kept and a not in free]
    return tuple(eqn for eqn in eqns if id(eqn) in needed)
