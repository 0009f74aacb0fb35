"""Removes or splits optimization barriers that delay weights, so that these can be cast and gathered ahead of their layer.

In:     a flat program. `jax.checkpoint` puts a barrier before recomputation in the backward pass, so that compilers neither
        merge it with the forward pass nor start it early.
Out:    the same program. Parameters, and views or casts of them, pass a barrier of their own, which waits for nothing else.
        In a scan over layers barriers that nothing needs are removed: the forward pass is in another loop, and all that a
        layer reads is available when its trip begins.
Method: a barrier in a scan's body is removed if all its operands are inputs of the body that nothing else reads: then no
        equation before it can equal one after it. Constants of the loop stay behind a barrier, or compilers would hoist
        what depends on them alone. A scan of one trip is no loop to a compiler, and keeps its barrier.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autopar._jax import Atom, Jaxpr, JaxprEqn, Var, make_jaxpr, replace_eqn
from autopar.ir.dataflow import inputs_of, known_as, reading, times_read, variables
from autopar.ir.region import Region, in_bodies, is_region, kind_of, region_of
from autopar.ir.rewrite.dead_code import with_equations
from autopar.ir.rules import has_rule, rule_for


def drop_barriers(jaxpr: Jaxpr, batch: Collection[int] = ()) -> Jaxpr:
    """Remove or split the barriers that need not hold values back; over the same inputs and results.

    `batch`: positions of the inputs that hold samples.
    """
    given = {var for k, var in enumerate(jaxpr.invars) if k not in batch}
    eqns: list[JaxprEqn] = []
    for eqn in map(_in_eqn, jaxpr.eqns):
        if not is_region(eqn) and given.issuperset(inputs_of(eqn)) and _moves_one_array(eqn):
            given.update(eqn.outvars)
        eqns += _split(eqn, given) if kind_of(eqn) == "barrier" else [eqn]
    return with_equations(jaxpr, eqns)


def _moves_one_array(eqn: JaxprEqn) -> bool:
    """Whether an equation sums nothing and reads one array: it moves, casts or maps it."""
    return len(inputs_of(eqn)) == 1 and has_rule(eqn.primitive) and not rule_for(eqn).summed and not eqn.effects


def _split(barrier: JaxprEqn, given: set[Var]) -> list[JaxprEqn]:
    """Split a barrier in two: one for literals and the `given` values, which are available at once, and one for the rest."""
    through = list(zip(barrier.invars, barrier.outvars, strict=True))
    sides = [[pair for pair in through if given.issuperset(variables(pair[:1])) is side] for side in (True, False)]
    return [_barrier(barrier, side) for side in sides if side] if all(sides) else [barrier]


def _barrier(like: JaxprEqn, through: Sequence[tuple[Atom, Var]]) -> JaxprEqn:
    operands, results = map(list, zip(*through, strict=True))
    return replace_eqn(like, invars=operands, outvars=results)


def _in_eqn(eqn: JaxprEqn) -> JaxprEqn:
    if kind_of(eqn) == "scan" and (scan := region_of(eqn)).trips > 1:
        return in_bodies(eqn, lambda body: _without_barriers(_in_body(body), scan))
    return in_bodies(eqn, _in_body)


def _in_body(jaxpr: Jaxpr) -> Jaxpr:
    return with_equations(jaxpr, [*map(_in_eqn, jaxpr.eqns)])


def _without_barriers(body: Jaxpr, scan: Region) -> Jaxpr:
    """Remove the unneeded barriers of a scan's body."""
    constant = {b.var for b in scan.consts}
    reads = times_read(body.eqns, body.outvars)
    given = {b.var for b in (*scan.carries, *scan.xs) if reads[b.var] == 1}
    passed: dict[Var, Atom] = {}
    eqns: list[JaxprEqn] = []
    for eqn in body.eqns:
        if kind_of(eqn) != "barrier" or not constant.union(given).issuperset(variables(eqn.invars)):
            eqns.append(reading(eqn, passed))
            continue
        stay: list[tuple[Atom, Var]] = []
        for atom, var in zip(eqn.invars, eqn.outvars, strict=True):
            if constant.isdisjoint(variables([atom])):
                passed[var] = atom
            else:
                stay.append((atom, var))
        eqns += [_barrier(eqn, stay)] if stay else []
    return make_jaxpr(body.invars, [known_as(atom, passed) for atom in body.outvars], eqns) if passed else body
