"""Splits a backward scan in two: the results that other stages wait for, and the gradients of its weights.

In:     a scan, and the results that are waited for.
Out:    two scans over the same trips. The first makes the awaited results, and stacks the values that the second needs.
Method: the first scan has the carries that the awaited results depend on. The second recomputes cheap equations of the
        first; for the rest, the fewest bytes are stacked (`residuals.py`), such as the cotangents of products. Qi et al.,
        "Zero bubble pipeline parallelism", ICLR 2024, do this by hand for each kind of layer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autopar._jax import JaxprEqn, Var
from autopar.inter_op.residuals import can_run_again, choose_residuals
from autopar.ir.build import rebuilt_apart
from autopar.ir.dataflow import makers, needed, read_by, variables
from autopar.ir.region import Binding, Region, kind_of, region_of, rows_in, rows_out


def scan_halves(eqn: JaxprEqn, waited: Collection[Var]) -> tuple[JaxprEqn, JaxprEqn] | None:
    """Split a scan in two, the first making the results in `waited`; None: `eqn` is no scan, or the second would do
    nothing heavy."""
    if kind_of(eqn) != "scan" or eqn.effects:
        return None
    region = region_of(eqn)
    first, eqns = _waited_for(region, waited)
    second = [b for b in region.bindings if b.result is not None and b not in first]
    done, values = set(eqns), variables(b.value for b in second)
    own = [e for e in needed(region.bodies[0].eqns, values, effects=False) if e not in done]
    if all(map(can_run_again, own)):
        return None
    made = {*makers(eqns), *(b.var for b in first if b.role == "carry")}
    read = [var for var in read_by(own, values) if var in made]
    kept = choose_residuals(eqns, read, {b.var for b in region.of_role("const", "xs")})
    rows = {var: region.new_stack(var) for var in kept.values}
    stacked = [rows_out(var, row) for var, row in rows.items()]
    arriving = [rows_in(row, var) for var, row in rows.items()]
    return _part(region, [*first, *stacked], eqns), _part(region, [*second, *arriving], [*kept.again, *own])


def _waited_for(region: Region, waited: Collection[Var]) -> tuple[list[Binding], list[JaxprEqn]]:
    """The awaited results with all carries they depend on, and the equations of the body that make them."""
    found = [b for b in region.bindings if b.result in waited]
    while True:
        values = variables(b.value for b in found)
        eqns = needed(region.bodies[0].eqns, values, effects=False)
        read = read_by(eqns, values)
        further = [b for b in region.carries if b.var in read and b not in found]
        if not further:
            return found, eqns
        found += further


def _part(region: Region, bindings: Sequence[Binding], eqns: Sequence[JaxprEqn]) -> JaxprEqn:
    """A scan of these results and equations, over the inputs of the whole scan that they read."""
    read = read_by(eqns, [b.value for b in bindings if b.result is not None])
    entering = [b for b in region.of_role("const", "xs") if b.var in read]
    return rebuilt_apart(region, [*entering, *bindings], [eqns])
