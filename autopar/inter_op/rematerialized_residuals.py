"""Makes the residuals of scans smaller: the backward scan computes again what is cheap.

In:     a flat program, in which a scan stacks values of each trip that a later scan, its backward pass, reads.
Out:    the same program; of these values only some are stacked, and the backward scan makes the others again, trip by
        trip.
Method: JAX keeps all that a gradient reads. Of the forward scan's body the minimum cut of `residuals.py` is kept: what
        enters and what is heavy. Weights and whatever else both scans read anyway are at hand in both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from autopar._jax import Jaxpr, JaxprEqn, Literal, Var, make_jaxpr, new_var
from autopar.inter_op.residuals import Kept, choose_residuals
from autopar.ir.build import Equations
from autopar.ir.dataflow import inputs_of, makers, read_by, variables
from autopar.ir.region import Binding, Region, kind_of, region_of, rows_in, rows_out
from autopar.ir.rewrite.dead_code import remove_dead_code
from autopar.ir.work import device_bytes


def rematerialize_residuals(jaxpr: Jaxpr) -> Jaxpr:
    """The program, over the same inputs and results, with the stacks between its scans as small as can be without running
    anything heavy again."""
    eqns = list(jaxpr.eqns)
    given = set(jaxpr.invars)
    for first, second, stacks in _pairs(jaxpr):
        eqns[first], eqns[second] = _lean(eqns[first], eqns[second], stacks, given)
    return remove_dead_code(make_jaxpr(jaxpr.invars, jaxpr.outvars, eqns))


def _pairs(jaxpr: Jaxpr) -> Iterator[tuple[int, int, list[Var]]]:
    """Two scans by their places in the program, and stacks of the one that only the other reads, trip by trip."""
    readers_of: dict[Var, set[int]] = {}
    for k, eqn in enumerate(jaxpr.eqns):
        for var in inputs_of(eqn):
            readers_of.setdefault(var, set()).add(k)
    results = set(variables(jaxpr.outvars))
    scans = {k: region_of(eqn) for k, eqn in enumerate(jaxpr.eqns) if kind_of(eqn) == "scan"}
    for at, scan in scans.items():
        found: dict[int, list[Var]] = {}
        for stack in (b.result for b in scan.ys):
            readers = readers_of.get(stack, set())
            if stack in results or len(readers) != 1:
                continue
            (reader,) = readers
            if reader in scans and scans[reader].trips == scan.trips:
                if not any(b.outer is stack for b in scans[reader].of_role("const", "carry")):
                    found.setdefault(reader, []).append(stack)
        yield from ((at, reader, stacks) for reader, stacks in found.items())


def _lean(
    forward: JaxprEqn, backward: JaxprEqn, stacks: Sequence[Var], given: Collection[Var]
) -> tuple[JaxprEqn, JaxprEqn]:
    """Both scans, of which the second recomputes what it can. What is then not read any more is dead code."""
    first, second = region_of(forward), region_of(backward)
    value_of = {b.result: b.value for b in first.ys if b.result in stacks and not isinstance(b.value, Literal)}
    stack_of = {value: stack for stack, value in value_of.items()}
    # What the backward scan reads row by row, and arguments of the step, are there anyway.
    at_hand = {*given, *variables(b.outer for b in second.xs)}
    shared = [b.var for b in first.xs if isinstance(b.outer, Literal) or b.outer in at_hand]
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
    return leaner, _made_again(second, kept, value_of, [*entering, *arriving])


def _made_again(second: Region, kept: Kept, value_of: Mapping[Var, Var], entering: Sequence[Binding]) -> JaxprEqn:
    """The backward scan, whose body begins with equations of the forward's.

    `value_of`: stacks that the backward scan reads, and the values of the forward's body that are in them.
    `entering`: how values of the forward's body enter here.
    """
    fresh = [replace(b, inner=(new_var(b.var.aval),)) for b in entering]
    again = make_jaxpr([b.var for b in entering], list(value_of.values()), kept.again)
    eqns = Equations()
    made = dict(zip(value_of, eqns.substitute(again, [b.var for b in fresh]), strict=True))
    (body,) = second.bodies
    inputs = [new_var(var.aval) for var in body.invars]
    replaced = {b.var: made[b.outer] for b in second.xs if b.outer in made}
    outvars = eqns.substitute(body, [replaced.get(var, new) for var, new in zip(body.invars, inputs, strict=True)])
    consts, xs = ([b for b in fresh if b.role == role] for role in ("const", "xs"))
    return second.rebuild([*consts, *second.rebound(inputs=[inputs], outputs=[outvars]), *xs], [eqns])
