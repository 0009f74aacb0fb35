"""Splits a `cond` into several: one per group of results that share no array work, and two around a gradient.

In:     a flat program. A `cond` is indivisible: all its operands and results are on one pipeline stage and in one phase of
        the step.
Out:    the same function. `cut_after_gradients`: a `cond` whose branch takes a gradient and uses it becomes two, up to the
        gradients and after them, so that microbatches accumulate gradients in the first and run the second once.
        `fission`: then a `cond` around an update (`optax.apply_if_finite`, a loss scale that was too large) becomes one per
        parameter and its moments, and one for the step counter.
Method: two results are of one group if some equation on arrays is an ancestor of both. Scalars that groups share (a norm, a
        bias correction) are hoisted before the conditions if cheap, and so are scalars reduced from arrays, so that the
        arrays need not be together. Where a `cond` is cut, a branch passes zeros for values that only another branch makes.
        Loops are not split.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import compress

import jax.numpy as jnp

from autopar._jax import Atom, Jaxpr, JaxprEqn, Var, make_jaxpr, new_var
from autopar.grouping import grouped
from autopar.ir.build import Equations, rebuilt_apart
from autopar.ir.dataflow import ancestors, descendants, inputs_of, makers, needed, read_by, variables
from autopar.ir.gradient import after_gradients, is_ahead, is_backward, is_of_inner_gradient
from autopar.ir.region import Binding, Region, bodies_of, is_region, kind_of, region_of
from autopar.ir.rewrite.dead_code import with_equations
from autopar.ir.work import Work, num_bytes, num_elements_of
from autopar.tuning import TUNING


def fission(jaxpr: Jaxpr) -> Jaxpr:
    """Cut conditions behind gradients, then split them by results; over the same inputs and results."""
    work = Work()
    jaxpr = cut_after_gradients(jaxpr)
    pieces = [_split_by_results(eqn, work) if _is_pure_cond(eqn) else [eqn] for eqn in jaxpr.eqns]
    return with_equations(jaxpr, [eqn for eqns in pieces for eqn in eqns])


def cut_after_gradients(jaxpr: Jaxpr) -> Jaxpr:
    """Cut conditions behind the gradients that they take; over the same inputs and results."""
    pieces = [_cut(eqn) if _is_pure_cond(eqn) and not is_backward(eqn) else [eqn] for eqn in jaxpr.eqns]
    return with_equations(jaxpr, [eqn for eqns in pieces for eqn in eqns])


def _is_pure_cond(eqn: JaxprEqn) -> bool:
    return kind_of(eqn) == "cond" and not eqn.effects


# The cut behind gradients.


def _cut(eqn: JaxprEqn) -> list[JaxprEqn]:
    region = region_of(eqn)
    halves = [_halves(branch, is_ahead(eqn)) for branch in region.bodies]
    if not any(second for _, second in halves):
        return [eqn]
    firsts = [Equations(first) for first, _ in halves]
    before: list[Binding] = [b for b in region.bindings if b.role != "result"]
    between: list[Binding] = []
    for k, (branch, (first, second)) in enumerate(zip(region.bodies, halves, strict=True)):
        for var in _passed_values(first, second, branch):
            passed = new_var(var.aval)
            zeros = partial(jnp.zeros, var.aval.shape, var.aval.dtype)
            made = tuple(
                var if at == k else eqns.call_one(zeros, [], eqn.source_info) for at, eqns in enumerate(firsts)
            )
            arriving = tuple(var if at == k else None for at in range(len(firsts)))
            before.append(Binding("result", None, (None,) * len(firsts), made, passed))
            between.append(Binding("const", passed, arriving, (None,) * len(firsts)))
    return [
        rebuilt_apart(region, before, firsts),
        rebuilt_apart(region, [*region.bindings, *between], [second for _, second in halves]),
    ]


def _halves(branch: Jaxpr, in_loss: bool) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """The branch's equations up to its gradients, and those that follow them.

    A branch that takes the derivative of a gradient, and no gradient of that (`jax.jvp(jax.grad(f))`, a product with the
    Hessian), ends behind it; `in_loss`: a gradient of it is taken outside.
    """
    only_derived = not in_loss and not any(map(is_backward, branch.eqns))
    behind = after_gradients(branch, is_of_inner_gradient if only_derived else is_backward)
    return list(compress(branch.eqns, (not is_behind for is_behind in behind))), list(compress(branch.eqns, behind))


def _passed_values(first: Sequence[JaxprEqn], second: Sequence[JaxprEqn], branch: Jaxpr) -> list[Var]:
    """The values of the first half that the second half or the branch's results read."""
    made = makers(first)
    return [var for var in read_by(second, branch.outvars) if var in made]


# One condition per group of results.


def _split_by_results(eqn: JaxprEqn, work: Work) -> list[JaxprEqn]:
    """One condition per group of results, after the hoisted scalars."""
    region = region_of(eqn)
    branches = [_Branch(body, work) for body in region.bodies]
    groups = _groups(region, branches)
    hoisted = Equations()
    entering = [b for b in region.bindings if b.role != "result"]
    for k, branch in enumerate(branches):
        readers: dict[Var, dict[int, None]] = {}
        for number, group in enumerate(groups):
            _, numbers = branch.made_of(branch.body.outvars[at] for at in group)
            for var in numbers:
                readers.setdefault(var, {})[number] = None
        shared = [var for var, of in readers.items() if len(of) > 1 or branch.is_of_arrays(var)]
        operands = [b.operand for b in region.of_role("const") if b.inputs[k] is not None]
        alone = make_jaxpr(branch.body.invars, shared, needed(branch.body.eqns, shared))
        made = hoisted.substitute(alone, operands)
        branch.given = set(shared)
        for var, outer in zip(shared, made, strict=True):
            inner = tuple(var if at == k else None for at in range(len(branches)))
            entering.append(Binding("const", outer, inner, (None,) * len(branches)))
    if len(groups) < 2 and not hoisted:
        return [eqn]
    results = region.of_role("result")
    return hoisted + [
        rebuilt_apart(region, [*entering, *(results[at] for at in group)], [branch.rest() for branch in branches])
        for group in groups
    ]


class _Branch:
    """One branch: the equation of each value, and which scalars are cheap.

    `given`: values hoisted before the conditions.
    """

    def __init__(self, body: Jaxpr, work: Work):
        self.body, self.given = body, set[Var]()
        self.made_by = makers(body.eqns)
        dear = descendants(body.eqns, lambda eqn: not _is_cheap(eqn, work))
        single = {eqn.outvars[0] for eqn in body.eqns if len(eqn.outvars) == 1}
        self.numbers = {var for var in single if num_elements_of(var) <= 1 and var not in dear}

    def made_of(self, results: Iterable[Atom]) -> tuple[dict[JaxprEqn, None], dict[Var, None]]:
        """The equations that results need, back to cheap scalars; and those scalars."""
        made_of = {var: inputs_of(eqn) for var, eqn in self.made_by.items() if var not in self.numbers}
        found = ancestors(variables(results), lambda var: made_of.get(var, ()))
        eqns = dict.fromkeys(self.made_by[var] for var in found if var in made_of)
        return eqns, {var: None for var in found if var in self.numbers}

    def is_of_arrays(self, number: Var) -> bool:
        """Whether a scalar is computed from arrays."""
        return any(num_elements_of(a) > 1 for eqn in needed(self.body.eqns, [number]) for a in eqn.invars)

    def rest(self) -> list[JaxprEqn]:
        """The equations without those that were hoisted."""
        return [eqn for eqn in self.body.eqns if not any(var in self.given for var in eqn.outvars)]


def _groups(region: Region, branches: Sequence[_Branch]) -> list[list[int]]:
    """Group the results, by position: those that share equations on arrays; and one group of all cheap scalars."""
    group_of = list(range(len(region.eqn.outvars)))
    first: dict[object, int] = {}
    for branch in branches:
        for at, atom in enumerate(branch.body.outvars):
            eqns, _ = branch.made_of([atom])
            is_number = num_elements_of(region.eqn.outvars[at]) <= 1 and not eqns
            for key in [*eqns, *(["number"] if is_number else [])]:
                other = group_of[first.setdefault(key, at)]
                group_of = [group_of[at] if group == other else group for group in group_of]
    return list(grouped((group, at) for at, group in enumerate(group_of)).values())


def _is_cheap(eqn: JaxprEqn, work: Work) -> bool:
    if eqn.effects:
        return False
    if is_region(eqn):
        inner = [inner for body in bodies_of(eqn) for inner in body.eqns]
        return kind_of(eqn) in ("cond", "barrier") and all(_is_cheap(e, work) for e in inner)
    elements = sum(num_elements_of(atom) for atom in (*eqn.invars, *eqn.outvars))
    return work.of(eqn) <= TUNING.fission_operations * elements


# Merging.


def merge_conditions(eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """Merge conditions on the same index that do not depend on each other, as long as the merged one's results are small.

    A condition's results are live beside its operands, so merged results are held to `fission_room` times the bytes of the
    largest condition's.
    """
    place = {var: k for k, eqn in enumerate(eqns) for var in eqn.outvars}
    conditions = [eqn for eqn in eqns if _is_pure_cond(eqn)]
    most = TUNING.fission_room * max(map(_made_bytes, conditions), default=0)
    made: list[JaxprEqn] = []
    open_at: dict[Var, list[tuple[int, int]]] = {}
    for k, eqn in enumerate(eqns):
        before = open_at.setdefault(eqn.invars[0], []) if _is_pure_cond(eqn) and isinstance(eqn.invars[0], Var) else []
        for at, number in before:
            is_there = all(place.get(var, -1) < at for var in inputs_of(eqn))
            if is_there and _made_bytes(made[number]) + _made_bytes(eqn) <= most:
                made[number] = _merged(region_of(made[number]), region_of(eqn))
                break
        else:
            before.append((k, len(made)))
            made.append(eqn)
    return made


def _made_bytes(eqn: JaxprEqn) -> int:
    return sum(map(num_bytes, eqn.outvars))


def _merged(one: Region, other: Region) -> JaxprEqn:
    """Merge two conditions on the same index."""
    equations = [[*a.eqns, *b.eqns] for a, b in zip(one.bodies, other.bodies, strict=True)]
    return rebuilt_apart(one, [*one.bindings, *(b for b in other.bindings if b.role != "test")], equations)
