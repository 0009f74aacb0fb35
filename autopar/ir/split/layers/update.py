"""The update of stacks as scans over layers, so that no device needs more than a layer of state that is in host memory.

In:     a flat program with gradients, and which of its results are new values of stacks in host memory.
Out:    the same function. Equations that only these results need, and that work on each layer by itself, are in the trips of a
        scan, which begins when all of its operands are there.
Method: layers are an axis (`demand.py`): rows of the results are made from rows of gradients and state. What else is read,
        such as the norm of all gradients, is computed before, from whole stacks.
"""

from __future__ import annotations

from collections.abc import Collection

import jax
import jax.numpy as jnp
from jax import lax

from autopar._jax import Atom, Jaxpr, SourceInfo, Var, make_jaxpr, new_var, resized, shaped
from autopar.ir.build import Equations
from autopar.ir.dataflow import variables
from autopar.ir.gradient import feeds_backward
from autopar.ir.region import Binding, kind_of, new_scan, rows_in, rows_out, trip_count
from autopar.ir.rewrite.dead_code import remove_dead_code
from autopar.ir.split.demand import Demand, Uses
from autopar.ir.split.placement import REPLICATED, Axis, Placement, Replicated, Split
from autopar.ir.split.solution import Solution, Strategies
from autopar.ir.split.writer import Programs, ShardWriter


def update_by_layer(jaxpr: Jaxpr, results: Collection[int]) -> Jaxpr:
    """The program with these results computed in scans over layers, as far as can be.

    `results`: positions of results; those that are no stacks of as many layers as a scan has trips stay.
    """
    head = feeds_backward(jaxpr)
    trips = [trip_count(e) for e, waits in zip(jaxpr.eqns, head, strict=True) if waits and kind_of(e) == "scan"]
    for count in dict.fromkeys(trips):
        stacks = [
            a for k in results for a in variables([jaxpr.outvars[k]]) if count > 1 and a.aval.shape[:1] == (count,)
        ]
        jaxpr = _in_trips(jaxpr, count, dict.fromkeys(stacks)) if stacks else jaxpr
    return jaxpr


def _in_trips(jaxpr: Jaxpr, count: int, stacks: Collection[Var]) -> Jaxpr:
    """The program with the update of stacks of so many layers in a scan."""
    tail = [eqn for eqn, waits in zip(jaxpr.eqns, feeds_backward(jaxpr), strict=True) if not waits]
    solution = Solution(Axis(count))
    uses: Uses = {var: {REPLICATED: None} for var in variables(jaxpr.outvars)}
    uses.update({var: {Split(0): None} for var in stacks})
    Demand(solution, Strategies(solution.axis)).body(make_jaxpr([], [], tail), uses)
    in_trips = {e: None for e in tail if e in solution.strategy_of}
    made = [var for eqn in in_trips for var in eqn.outvars if var in stacks]
    if not made:
        return jaxpr
    writer = _Trip(solution)
    for eqn in in_trips:
        writer.equation(eqn)
    own = [writer.row_of(var) for var in made]
    before = Equations()
    numbers = before.call_one(lambda: jnp.arange(count, dtype=jnp.int32), [])
    bindings = [
        *(Binding("const", var, (inside,), (None,)) for var, inside in writer.whole.items()),
        *(rows_in(stack, row) for stack, row in [(numbers, writer.first), *writer.rows_read.items()]),
        *(rows_out(row, var) for var, row in zip(made, own, strict=True)),
    ]
    scan = new_scan(count, bindings, writer.eqns)
    others = [eqn for eqn in jaxpr.eqns if eqn not in in_trips]
    return remove_dead_code(make_jaxpr(jaxpr.invars, jaxpr.outvars, [*others, *before, scan]))


class _Trip(ShardWriter):
    """Writes a trip.

    Attributes:
        first: The number of the layer.
        whole: Value that each trip reads whole -> its name in the trip.
        rows_read: Stack of which each trip reads a row -> the row.
    """

    def __init__(self, solution: Solution):
        super().__init__(Programs(solution), number := new_var(shaped(jax.ShapeDtypeStruct((), jnp.int32))))
        self.first = number
        self.whole: dict[Var, Var] = {}
        self.rows_read: dict[Var, Var] = {}

    def outside(self, var: Var, want: Placement, source: SourceInfo | None) -> Atom:
        """A value that is made before, whole or a row of it."""
        if isinstance(want, Replicated):
            return self.whole.setdefault(var, new_var(var.aval))
        assert want == Split(0), f"no trip reads a value that is {want}"
        row = self.rows_read.setdefault(var, new_var(resized(var.aval, var.aval.shape[1:])))
        return self.eqns.call_one(lambda x: lax.expand_dims(x, (0,)), [row], source)

    def row_of(self, stack: Var) -> Atom:
        """The row of a stack that a trip makes."""
        return self.eqns.call_one(lambda x: lax.squeeze(x, (0,)), [self.value(stack, Split(0))])
