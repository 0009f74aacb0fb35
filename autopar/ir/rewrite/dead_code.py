"""Dead code: drop what no output and no effect needs, inside loops and branches too.

In:     a flat jaxpr.
Out:    the same program without equations, loop carries, scanned inputs, stacked outputs and barrier operands that
        nothing reads. Results that nothing reads of an equation that stays become `DropVar`.
Method: one walk backwards per body; a carry of a loop is alive if its result is, or if the body needs it for one that
        is (fixed point).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from autopar._jax import (
    DropVar,
    Jaxpr,
    JaxprEqn,
    Var,
    close_jaxpr,
    make_jaxpr,
    open_jaxpr,
    replace_eqn,
    scan_counts,
    scan_params,
)


def remove_dead_code(jaxpr: Jaxpr, keep_inputs: int | None = None) -> Jaxpr:
    """`jaxpr` without what nothing needs.

    Args:
        jaxpr: A flat program.
        keep_inputs: How many of the first invars stay even if nothing reads them; None: all.

    Returns:
        The smaller program, over the same variables.
    """
    eqns, alive = _trim(jaxpr, [True] * len(jaxpr.outvars))
    keep_inputs = len(jaxpr.invars) if keep_inputs is None else keep_inputs
    invars = [var for i, var in enumerate(jaxpr.invars) if i < keep_inputs or alive[i]]
    return make_jaxpr(invars, jaxpr.outvars, eqns)


def _trim(jaxpr: Jaxpr, wanted: Sequence[bool]) -> tuple[list[JaxprEqn], list[bool]]:
    """Equations needed for the wanted outputs, and which invars they need."""
    alive = {atom for atom, want in zip(jaxpr.outvars, wanted, strict=True) if want and isinstance(atom, Var)}
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        results = [var in alive for var in eqn.outvars]
        if not any(results) and not eqn.effects:
            continue
        kept = _TRIMMERS.get(eqn.primitive.name, _drop_results)(eqn, results)
        alive.update(atom for atom in kept.invars if isinstance(atom, Var))
        eqns.append(kept)
    return eqns[::-1], [var in alive for var in jaxpr.invars]


def _drop_results(eqn: JaxprEqn, wanted: Sequence[bool]) -> JaxprEqn:
    if all(wanted):
        return eqn
    outvars = [var if want else DropVar(var.aval) for var, want in zip(eqn.outvars, wanted, strict=True)]
    return replace_eqn(eqn, outvars=outvars)


def _barrier(eqn: JaxprEqn, wanted: Sequence[bool]) -> JaxprEqn:
    return replace_eqn(eqn, invars=list(compress(eqn.invars, wanted)), outvars=list(compress(eqn.outvars, wanted)))


def _scan(eqn: JaxprEqn, wanted: Sequence[bool]) -> JaxprEqn:
    body = open_jaxpr(eqn.params["jaxpr"])[0]
    num_consts, num_carry = scan_counts(eqn.params)
    carries, stacked = list(wanted[:num_carry]), list(wanted[num_carry:])
    while True:
        eqns, needed = _trim(body, [*carries, *stacked])
        grown = [a or b for a, b in zip(carries, needed[num_consts : num_consts + num_carry], strict=True)]
        if grown == carries:
            break
        carries = grown
    consts, scanned = needed[:num_consts], needed[num_consts + num_carry :]
    inputs, outputs = [*consts, *carries, *scanned], [*carries, *stacked]
    body = make_jaxpr(list(compress(body.invars, inputs)), list(compress(body.outvars, outputs)), eqns)
    kept = replace_eqn(
        eqn,
        invars=list(compress(eqn.invars, inputs)),
        outvars=list(compress(eqn.outvars, outputs)),
        params=scan_params(eqn.params, body, sum(consts), sum(carries)),
    )
    return _drop_results(kept, list(compress(wanted, outputs)))


def _while(eqn: JaxprEqn, wanted: Sequence[bool]) -> JaxprEqn:
    test, body = open_jaxpr(eqn.params["cond_jaxpr"])[0], open_jaxpr(eqn.params["body_jaxpr"])[0]
    num_test, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    test_eqns, test_needs = _trim(test, [True])
    carries = [a or b for a, b in zip(wanted, test_needs[num_test:], strict=True)]
    while True:
        body_eqns, body_needs = _trim(body, carries)
        grown = [a or b for a, b in zip(carries, body_needs[num_body:], strict=True)]
        if grown == carries:
            break
        carries = grown
    test_inputs, body_inputs = [*test_needs[:num_test], *carries], [*body_needs[:num_body], *carries]
    test = make_jaxpr(list(compress(test.invars, test_inputs)), test.outvars, test_eqns)
    outvars = list(compress(body.outvars, carries))
    body = make_jaxpr(list(compress(body.invars, body_inputs)), outvars, body_eqns)
    params = {
        **eqn.params,
        "cond_jaxpr": close_jaxpr(test),
        "body_jaxpr": close_jaxpr(body),
        "cond_nconsts": sum(test_needs[:num_test]),
        "body_nconsts": sum(body_needs[:num_body]),
    }
    inputs = [*test_needs[:num_test], *body_needs[:num_body], *carries]
    kept = replace_eqn(
        eqn,
        invars=list(compress(eqn.invars, inputs)),
        outvars=list(compress(eqn.outvars, carries)),
        params=params,
    )
    return _drop_results(kept, list(compress(wanted, carries)))


def _cond(eqn: JaxprEqn, wanted: Sequence[bool]) -> JaxprEqn:
    bodies = [open_jaxpr(branch)[0] for branch in eqn.params["branches"]]
    trimmed = [_trim(body, wanted) for body in bodies]
    inputs = [any(needs) for needs in zip(*(alive for _, alive in trimmed), strict=True)]
    branches = tuple(
        close_jaxpr(make_jaxpr(list(compress(body.invars, inputs)), list(compress(body.outvars, wanted)), eqns))
        for body, (eqns, _) in zip(bodies, trimmed, strict=True)
    )
    return replace_eqn(
        eqn,
        invars=[eqn.invars[0], *compress(eqn.invars[1:], inputs)],
        outvars=list(compress(eqn.outvars, wanted)),
        params={**eqn.params, "branches": branches},
    )


_TRIMMERS = {"optimization_barrier": _barrier, "scan": _scan, "while": _while, "cond": _cond}
