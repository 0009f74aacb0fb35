"""Loops that keep less for their gradients.

In:     a flat program, in which a scan stacks values of each trip that a later scan, its backward pass, reads.
Out:    the same program; of these values only some are stacked, and the backward scan makes the others again, trip by
        trip.
Method: JAX keeps all that a gradient reads. Of the forward scan's body the minimum cut of `residuals.py` is kept: what
        enters and what is heavy. Weights and whatever else both scans read anyway are at hand in both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar._jax import Jaxpr, JaxprEqn, Literal, Var, make_jaxpr, new_var, replace_eqn, scan_params, shaped
from autopar.inter_op.residuals import Kept, choose_residuals
from autopar.ir.rewrite.dead_code import remove_dead_code
from autopar.ir.structure import ScanParts, inputs_of, scan_parts, trip_count, variables
from autopar.ir.trace.flatten import inline_from
from autopar.ir.work import num_bytes


def lean_scans(jaxpr: Jaxpr) -> Jaxpr:
    """The program, over the same inputs and results, with the stacks between its scans as small as can be without running
    anything heavy again."""
    eqns = list(jaxpr.eqns)
    given = set(jaxpr.invars)
    for pair in _pairs(jaxpr):
        forward, backward = eqns[pair.forward], eqns[pair.backward]
        eqns[pair.forward], eqns[pair.backward] = _lean(forward, backward, pair.stacks, given)
    return remove_dead_code(make_jaxpr(jaxpr.invars, jaxpr.outvars, eqns))


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two scans by their places in the program, and stacks of the one that only the other reads, trip by trip."""

    forward: int
    backward: int
    stacks: tuple[Var, ...]


def _pairs(jaxpr: Jaxpr) -> Iterator[_Pair]:
    read_by: dict[Var, set[int]] = {}
    for k, eqn in enumerate(jaxpr.eqns):
        for var in inputs_of(eqn):
            read_by.setdefault(var, set()).add(k)
    results = set(variables(jaxpr.outvars))
    scans = {k: scan_parts(eqn) for k, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == "scan"}
    for at, parts in scans.items():
        found: dict[int, list[Var]] = {}
        for _, stack in parts.ys:
            readers = read_by.get(stack, set())
            if stack in results or len(readers) != 1:
                continue
            (reader,) = readers
            if reader in scans and trip_count(jaxpr.eqns[reader]) == trip_count(jaxpr.eqns[at]):
                elsewhere = [*(c for c, _ in scans[reader].consts), *(c for c, *_ in scans[reader].carries)]
                if stack not in variables(elsewhere):
                    found.setdefault(reader, []).append(stack)
        for reader, stacks in found.items():
            yield _Pair(at, reader, tuple(stacks))


def _lean(
    forward: JaxprEqn, backward: JaxprEqn, stacks: Sequence[Var], given: Collection[Var]
) -> tuple[JaxprEqn, JaxprEqn]:
    """Both scans, of which the second makes again what it can. What is then not read any more is dead code."""
    first, second = scan_parts(forward), scan_parts(backward)
    value_of = {stack: value for value, stack in first.ys if stack in stacks and not isinstance(value, Literal)}
    stack_of = {value: stack for stack, value in value_of.items()}
    kept = _kept(first, second, list(stack_of), given)
    if kept.num_bytes >= sum(map(num_bytes, stack_of)):
        return forward, backward
    made = {var for eqn in kept.again for var in eqn.outvars}
    read = dict.fromkeys([*(var for eqn in kept.again for var in inputs_of(eqn)), *stack_of])
    consts = {inner: outer for outer, inner in first.consts if inner in read}
    xs = {inner: outer for outer, inner in first.xs if inner in read}
    stacked = [var for var in read if var not in made and var not in consts and var not in xs]
    length = trip_count(forward)
    rows = {var: stack_of.get(var) or new_var(_rows_of(var, length)) for var in stacked}
    leaner = _with_stacks(forward, first, {var: row for var, row in rows.items() if var not in stack_of})
    return leaner, _made_again(backward, second, kept, value_of, consts, xs | rows)


def _kept(first: ScanParts, second: ScanParts, wanted: Sequence[Var], given: Collection[Var]) -> Kept:
    """What the backward scan needs to make values of the forward's body again; arguments of the step are there anyway."""
    at_hand = {*given, *(outer for outer, _ in second.xs if not isinstance(outer, Literal))}
    shared = [inner for outer, inner in first.xs if isinstance(outer, Literal) or outer in at_hand]
    return choose_residuals(first.body.eqns, wanted, [*shared, *(inner for _, inner in first.consts)])


def _rows_of(var: Var, length: int) -> Any:
    return shaped(jax.ShapeDtypeStruct((length, *var.aval.shape), var.aval.dtype))


def _with_stacks(eqn: JaxprEqn, parts: ScanParts, rows: Mapping[Var, Var]) -> JaxprEqn:
    """A scan that stacks these values of its body too."""
    body = make_jaxpr(parts.body.invars, [*parts.body.outvars, *rows], parts.body.eqns)
    params = scan_params(eqn.params, body, len(parts.consts), len(parts.carries))
    return replace_eqn(eqn, outvars=[*eqn.outvars, *rows.values()], params=params)


def _made_again(
    eqn: JaxprEqn,
    parts: ScanParts,
    kept: Kept,
    value_of: Mapping[Var, Var],
    consts: Mapping[Var, Any],
    xs: Mapping[Var, Any],
) -> JaxprEqn:
    """The backward scan, whose body begins with equations of the forward's.

    Args:
        eqn: The backward scan.
        parts: Its parts.
        kept: What is made again.
        value_of: Stacks that the backward scan reads, and the values of the forward's body that are in them.
        consts: Values of the forward's body that are the same in all trips, and what they are outside.
        xs: Those that are not, and the stacks that hold them.
    """
    entering = [*consts, *xs]
    inner = {var: new_var(var.aval) for var in (*entering, *parts.body.invars)}
    again = make_jaxpr(entering, list(value_of.values()), kept.again)
    eqns, values = inline_from(again, [inner[var] for var in entering])
    made = dict(zip(value_of, values, strict=True))
    replaced = {var: made[outer] for outer, var in parts.xs if outer in made}
    more, outvars = inline_from(parts.body, [replaced.get(var, inner[var]) for var in parts.body.invars])
    invars = [inner[var] for var in (*consts, *parts.body.invars, *xs)]
    body = make_jaxpr(invars, outvars, [*eqns, *more])
    return replace_eqn(
        eqn,
        invars=[*consts.values(), *eqn.invars, *xs.values()],
        params=scan_params(eqn.params, body, len(consts) + len(parts.consts), len(parts.carries)),
    )
