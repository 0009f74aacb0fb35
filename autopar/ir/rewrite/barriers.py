"""Takes barriers out of loops in which they hold nothing back.

In:     a flat program. `jax.checkpoint` stands behind a barrier in the backward pass, so that what runs again is not taken
        from the forward pass and not begun before its time.
Out:    the same program. In the backward scan over layers the forward pass is in another loop, and all that a layer reads
        is there when its trip begins: its barrier only keeps weights from being cast to 16 bits, and gathered, a trip ahead.
Method: a barrier goes if all that passes it is given to the trip, and nothing else reads that: no equation before it can be
        equal to one behind it. What enters all trips alike stays behind it, or compilers would take out of the loop what is
        made of that alone. A scan of one trip is no loop to a compiler, and keeps its barrier.
"""

from __future__ import annotations

from collections import Counter

from autopar._jax import Atom, Jaxpr, JaxprEqn, Var, make_jaxpr, replace_eqn
from autopar.ir.dataflow import known_as, reading, variables
from autopar.ir.region import Region, in_bodies, kind_of, region_of
from autopar.ir.rewrite.dead_code import with_equations


def drop_barriers(jaxpr: Jaxpr) -> Jaxpr:
    """The program without barriers that hold nothing back in its loops; over the same inputs and results."""
    return with_equations(jaxpr, [_inside(eqn) for eqn in jaxpr.eqns])


def _inside(eqn: JaxprEqn) -> JaxprEqn:
    if kind_of(eqn) == "scan" and (scan := region_of(eqn)).trips > 1:
        return in_bodies(eqn, lambda body: _without(drop_barriers(body), scan))
    return in_bodies(eqn, drop_barriers)


def _without(body: Jaxpr, scan: Region) -> Jaxpr:
    """The body of a scan without such barriers."""
    constant = {b.var for b in scan.consts}
    times_read = Counter([*variables(body.outvars), *(a for eqn in body.eqns for a in variables(eqn.invars))])
    given = {b.var for b in (*scan.carries, *scan.xs) if times_read[b.var] == 1}
    passed: dict[Var, Atom] = {}
    eqns: list[JaxprEqn] = []
    for eqn in body.eqns:
        if kind_of(eqn) != "barrier" or not constant.union(given).issuperset(variables(eqn.invars)):
            eqns.append(reading(eqn, passed))
            continue
        through = list(zip(eqn.invars, eqn.outvars, strict=True))
        passed.update((var, atom) for atom, var in through if atom not in constant)
        stay = [(atom, var) for atom, var in through if atom in constant]
        if stay:
            operands, results = map(list, zip(*stay, strict=True))
            eqns.append(replace_eqn(eqn, invars=operands, outvars=results))
    return make_jaxpr(body.invars, [known_as(atom, passed) for atom in body.outvars], eqns) if passed else body
