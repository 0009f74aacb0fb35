"""Shrinks the residuals of scans: the backward scan recomputes cheap values.

In:     a flat program in which a scan stacks residuals that a later scan, its backward pass, reads.
Out:    the same program; fewer values are stacked, and the backward scan recomputes the others in each trip.
Method: JAX stacks everything that a gradient reads. Here the forward scan stacks the minimum cut of its body
        (`residuals.py`): values that enter the body and results of heavy equations. Weights, and whatever else both scans
        read anyway, cost nothing to keep.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from autopar._jax import Jaxpr, JaxprEqn, Literal, Var, make_jaxpr, new_var
from autopar.inter_op.residuals import Kept, choose_residuals
from autopar.ir.build import Equations
from autopar.ir.dataflow import makers, read_by, readers_of, variables
from autopar.ir.region import Binding, Region, kind_of, region_of, rows_in, rows_out
from autopar.ir.rewrite.dead_code import remove_dead_code
from autopar.ir.work import device_bytes


def rematerialize_residuals(jaxpr: Jaxpr) -> Jaxpr:
    """Make the stacks between forward and backward scans as small as possible without recomputing anything heavy."""
    eqns = list(jaxpr.eqns)
    given = set(jaxpr.invars)
    for first, second, stacks in _pairs(jaxpr):
        eqns[first], eqns[second] = _lean(eqns[first], eqns[second], stacks, given)
    return remove_dead_code(make_jaxpr(jaxpr.invars, jaxpr.outvars, eqns))


def _pairs(jaxpr: Jaxpr) -> Iterator[tuple[int, int, list[Var]]]:
    """Pairs of scans, by position, and the stacks of the first that only the second reads, row by row."""
    readers, results = readers_of(jaxpr.eqns), set(variables(jaxpr.outvars))
    place = {eqn: k for k, eqn in enumerate(jaxpr.eqns)}
    scans = {k: region_of(eqn) for eqn, k in place.items() if kind_of(eqn) == "scan"}
    for at, scan in scans.items():
        found: dict[int, list[Var]] = {}
        for stack in (b.result for b in scan.ys if b.result not in results and len(readers.get(b.result, ())) == 1):
            reader = place[readers[stack][0]]
            if reader in scans and scans[reader].trips == scan.trips:
                if not any(b.operand is stack for b in scans[reader].of_role("const", "carry")):
                    found.setdefault(reader, []).append(stack)
        yield from ((at, reader, stacks) for reader, stacks in found.items())


def _lean(
    forward: JaxprEqn, backward: JaxprEqn, stacks: Sequence[Var], given: Collection[Var]
) -> tuple[JaxprEqn, JaxprEqn]:
    """Rewrite both scans so that the second recomputes cheap residuals; values no longer read are left as dead code."""
    first, second = region_of(forward), region_of(backward)
    value_of = {b.result: b.value for b in first.ys if b.result in stacks and not isinstance(b.value, Literal)}
    stack_of = {value: stack for stack, value in value_of.items()}
    # Stacks that the backward scan reads anyway, and arguments of the step, cost nothing to keep.
    available = {*given, *variables(b.operand for b in second.xs)}
    shared = [b.var for b in first.xs if isinstance(b.operand, Literal) or b.operand in available]
    free = [*shared, *(b.var for b in first.consts)]
    kept = choose_residuals(first.bodies[0].eqns, list(stack_of), free)
    if kept.num_bytes >= sum(map(device_bytes, stack_of)):
        return forward, backward
    read = read_by(kept.again, stack_of)
    entering = [b for b in first.of_role("const", "xs") if b.var in read]
    inside = {*makers(kept.again), *(b.var for b in entering)}
    rows = {var: stack_of.get(var) or first.new_stack(var) for var in read if var not in inside}
    new = [rows_out(var, row) for var, row in rows.items() if var not in stack_of]
    leaner = first.rebuild([*first.bindings, *new], [first.bodies[0].eqns])
    arriving = [rows_in(row, var) for var, row in rows.items()]
    return leaner, _recomputing(second, kept, value_of, [*entering, *arriving])


def _recomputing(second: Region, kept: Kept, value_of: Mapping[Var, Var], entering: Sequence[Binding]) -> JaxprEqn:
    """The backward scan, its body preceded by the recomputed equations of the forward body.

    `value_of`: stack that the backward scan reads -> the value of the forward body that it stacks.
    `entering`: bindings by which values of the forward body enter the backward scan.
    """
    fresh = [replace(b, inputs=(new_var(b.var.aval),)) for b in entering]
    again = make_jaxpr([b.var for b in entering], list(value_of.values()), kept.again)
    eqns = Equations()
    made = dict(zip(value_of, eqns.substitute(again, [b.var for b in fresh]), strict=True))
    (body,) = second.bodies
    inputs = [new_var(var.aval) for var in body.invars]
    replaced = {b.var: made[b.operand] for b in second.xs if b.operand in made}
    outvars = eqns.substitute(body, [replaced.get(var, new) for var, new in zip(body.invars, inputs, strict=True)])
    consts, xs = ([b for b in fresh if b.role == role] for role in ("const", "xs"))
    return second.rebuild([*consts, *second.rebound(inputs=[inputs], outputs=[outvars]), *xs], [eqns])
