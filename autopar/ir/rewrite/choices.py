"""Turns small conditions on a trip's number into choices between values, as where the first trip of a loop begins a sum.

In:     a scan; what is known of the program's values.
Out:    the same scan. A condition of its body whose index is known for all trips, and whose branches do a few operations per
        element, becomes its branches and one `select_n` for each result.
Method: inlining. Whether a branch may cost something is told by its work (`ir/work.py`).
"""

from __future__ import annotations

from jax import lax

from autopar._jax import Atom, Jaxpr, JaxprEqn, Var, make_jaxpr
from autopar.ir.build import Equations
from autopar.ir.dataflow import known_as, reading
from autopar.ir.known_values import KnownValues
from autopar.ir.region import Region, equations_within, is_region, kind_of, region_of
from autopar.ir.work import Work, num_elements_of

_OPERATIONS = 4
"""Per element of the results, in a branch that is computed even where it is not chosen."""


def with_choices(eqn: JaxprEqn, known: KnownValues) -> JaxprEqn:
    """The scan with choices in place of small conditions on the trip's number; the same object if it has none."""
    scan = region_of(eqn)
    (body,) = scan.bodies
    small = [inner for inner in body.eqns if kind_of(inner) == "cond" and _is_small(inner, scan, known)]
    return scan.with_bodies([_chosen(body, small)]) if small else eqn


def _is_small(eqn: JaxprEqn, scan: Region, known: KnownValues) -> bool:
    """Whether a condition is on the trip's number, and its branches are small."""
    if eqn.effects or known.in_trips(eqn.invars[0], scan) is None:
        return False
    branches, most = region_of(eqn).bodies, _OPERATIONS * sum(map(num_elements_of, eqn.outvars))
    if any(is_region(inner) for branch in branches for inner, _ in equations_within(branch)):
        return False
    return all(sum(Work().of_equations(branch.eqns)) <= most for branch in branches)


def _chosen(body: Jaxpr, conditions: list[JaxprEqn]) -> Jaxpr:
    """The body with these conditions as choices."""
    eqns, same = Equations(), dict[Var, Atom]()
    for eqn in body.eqns:
        read = reading(eqn, same)
        if eqn not in conditions:
            eqns.append(read)
            continue
        index, *operands = read.invars
        branches = [eqns.substitute(branch, operands) for branch in region_of(read).bodies]
        for var, *cases in zip(eqn.outvars, *branches, strict=True):
            same[var] = eqns.call_one(lax.select_n, [index, *cases], eqn.source_info)
    return make_jaxpr(body.invars, [known_as(a, same) for a in body.outvars], eqns)
