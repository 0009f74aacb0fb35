"""Joins the elementwise operations that update one array of the state: one decision instead of twenty or thirty.

In:     a flat program.
Out:    the same function; behind its gradients, connected elementwise operations on arrays of one shape are one `update`
        (`ir/rules/update.py`), if they make a result of the program.
Method: an operation's level is the number of other operations, such as reductions, on the longest way to it. Operations that
        are joined are of one shape, of one level and connected, so that no way leads out of an update and back into it: on
        such a way the shape changes, which takes another operation. An update stands where its last operation stood, and what
        reads it behind it. Programs that copy to or from host memory keep their order, and their operations.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence

from autopar._jax import Atom, Jaxpr, JaxprEqn, Literal, Var, copies_to_or_from_host, new_eqn
from autopar.grouping import grouped
from autopar.ir.dataflow import inputs_of, read_by, variables
from autopar.ir.gradient import holds_backward, is_backward
from autopar.ir.rewrite.dead_code import with_equations
from autopar.ir.rules.update import Steps, may_be_step, update_p
from autopar.ir.signature import equation_signature


def join_updates(jaxpr: Jaxpr) -> Jaxpr:
    """Join the operations of each update; the same object if there are none to join."""
    if any(map(copies_to_or_from_host, jaxpr.eqns)):
        return jaxpr
    results = set(variables(jaxpr.outvars))
    groups = [group for group in _groups(jaxpr.eqns) if _makes_any(group, jaxpr.eqns, results)]
    return with_equations(jaxpr, _joined(jaxpr, groups)) if groups else jaxpr


def _makes_any(group: Sequence[int], eqns: Sequence[JaxprEqn], results: set[Var]) -> bool:
    return len(group) > 1 and any(not results.isdisjoint(eqns[at].outvars) for at in group)


def _groups(eqns: Sequence[JaxprEqn]) -> list[list[int]]:
    """Positions of connected elementwise operations of one shape and level, behind the first gradients."""
    level: dict[Var, int] = {}
    made_at: dict[Var, int] = {}
    leader: dict[int, int] = {}

    def led(at: int) -> int:
        while leader[at] != at:
            leader[at] = at = leader[leader[at]]
        return at

    is_behind = False
    for at, eqn in enumerate(eqns):
        is_behind = is_behind or holds_backward(eqn)
        read = inputs_of(eqn)
        own = max([level.get(var, 0) for var in read], default=0)
        if not (is_behind and may_be_step(eqn) and not is_backward(eqn)):
            level.update(dict.fromkeys(eqn.outvars, own + 1))
            continue
        (made,) = eqn.outvars
        level[made] = own
        if not made.aval.shape:
            continue
        leader[at] = made_at[made] = at
        for var in read:
            before = made_at.get(var)
            if before is not None and level[var] == own and var.aval.shape == made.aval.shape:
                leader[led(at)] = led(before)
    return list(grouped((led(at), at) for at in leader).values())


def _joined(jaxpr: Jaxpr, groups: Sequence[Sequence[int]]) -> list[JaxprEqn]:
    """The program's equations with each group as one, in an order in which all are known before they are read."""
    eqns, stands_at = jaxpr.eqns, {at: group[-1] for group in groups for at in group}
    outside = read_by((eqn for at, eqn in enumerate(eqns) if at not in stands_at), jaxpr.outvars)
    for group in groups:
        own = {var for at in group for var in eqns[at].outvars}
        outside.update(dict.fromkeys(var for at in group for var in inputs_of(eqns[at]) if var not in own))
    forms: dict[Hashable, Hashable] = {}
    units = {at: eqn for at, eqn in enumerate(eqns) if at not in stands_at}
    units.update((group[-1], _as_one([eqns[at] for at in group], outside, forms)) for group in groups)
    return _in_order(units)


def _as_one(eqns: Sequence[JaxprEqn], outside: Mapping[Var, None], forms: dict[Hashable, Hashable]) -> JaxprEqn:
    """The equations as one update; `outside`: what is read elsewhere; `forms`: those known: equal ones are one object."""
    number: dict[Var, int] = {}

    def name(atom: Atom) -> Hashable:
        if isinstance(atom, Literal):
            return "literal", str(atom.val), atom.aval.dtype
        return number.setdefault(atom, len(number))

    made = [var for eqn in eqns for var in eqn.outvars]
    same = tuple([(equation_signature(e), tuple(map(name, e.invars)), tuple(map(name, e.outvars))) for e in eqns])
    own = set(made)
    given, results = [var for var in number if var not in own], [var for var in made if var in outside]
    form = same, tuple([number[var] for var in results])
    steps = Steps(forms.setdefault(form, form), tuple(eqns), tuple(given), tuple(results))
    return new_eqn(update_p, given, results, {"steps": steps}, source_info=eqns[-1].source_info)


def _in_order(units: Mapping[int, JaxprEqn]) -> list[JaxprEqn]:
    """The equations by position, each behind those that it reads."""
    made_at = {var: at for at, eqn in units.items() for var in eqn.outvars}
    before = {at: {made_at[var] for var in inputs_of(eqn) if var in made_at} for at, eqn in units.items()}
    readers = grouped((maker, at) for at, makers in before.items() for maker in makers)
    missing = {at: len(makers) for at, makers in before.items()}
    ready = [at for at, count in missing.items() if not count]
    heapq.heapify(ready)
    found: list[JaxprEqn] = []
    while ready:
        at = heapq.heappop(ready)
        found.append(units[at])
        for reader in readers.get(at, ()):
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, reader)
    assert len(found) == len(units), "updates wait for each other"
    return found
