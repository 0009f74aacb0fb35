"""Regroups joins over several stages: first within each stage, then of the stages' results.

In:     equations of the update, and the stage of each value.
Out:    the same equations, where the scalars of each stage are joined (added, compared) before those of others.
Method: joins of one kind that are read by the next alone are one join of all their leaves, which are grouped by stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar._jax import Atom, Jaxpr, JaxprEqn, Var, new_var, replace_eqn
from autopar.grouping import grouped
from autopar.ir.dataflow import makers, times_read
from autopar.ir.work import num_elements_of
from autopar.tuning import TUNING

JOINS = frozenset({"add", "add_any", "and", "or", "max", "min", "mul"})
"""Primitives that join scalars, in any order."""


def join_locally(
    jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], stage_of: Mapping[Var, int], after_pass: Mapping[Var, int]
) -> tuple[list[JaxprEqn], dict[Var, int]]:
    """The equations with their joins over several stages regrouped; and `after_pass`, with the values that this adds.

    `after_pass`: value made between passes of the loop -> the pass after which it is made.
    """
    replaced: dict[JaxprEqn, list[JaxprEqn]] = {}
    after_pass = dict(after_pass)
    for join in _find_joins(jaxpr, eqns):
        groups = grouped((stage_of.get(part, -1) if isinstance(part, Var) else -1, part) for part in join.parts)
        if len(join.parts) > 2 and len(groups.keys() - {-1}) > 1 and join.is_of_one_type():
            root, *gone = join.eqns
            chains = _chains(root, groups)
            replaced |= {eqn: [] for eqn in gone} | {root: chains}
            if root.outvars[0] in after_pass:
                after_pass |= dict.fromkeys(makers(chains), after_pass[root.outvars[0]])
    return [each for eqn in eqns for each in replaced.get(eqn, [eqn])], after_pass


def _find_joins(jaxpr: Jaxpr, eqns: Sequence[JaxprEqn]) -> Iterable[_Join]:
    """The joins of scalars among the equations, each as large as can be."""
    reads = times_read(eqns, jaxpr.outvars)
    joins: dict[Atom, _Join] = {}
    for eqn in eqns:
        if eqn.primitive.name in JOINS and len(eqn.invars) == 2 and all(map(is_scalar, eqn.invars)):
            join = joins[eqn.outvars[0]] = _Join([eqn], [])
            for atom in eqn.invars:
                inner = joins.get(atom) if isinstance(atom, Var) and reads[atom] == 1 else None
                if inner is not None and inner.is_like(eqn):
                    join.eqns.extend(joins.pop(atom).eqns)
                    join.parts.extend(inner.parts)
                else:
                    join.parts.append(atom)
    return joins.values()


@dataclass(frozen=True, slots=True, eq=False)
class _Join:
    """A maximal tree of joins of one kind, each read by the next alone: its equations, the last first, and its leaves."""

    eqns: list[JaxprEqn]
    parts: list[Atom]

    def is_like(self, eqn: JaxprEqn) -> bool:
        """Whether an equation is of the join's primitive and type."""
        return self.eqns[0].primitive is eqn.primitive and self.eqns[0].outvars[0].aval == eqn.outvars[0].aval

    def is_of_one_type(self) -> bool:
        """Whether all leaves are of the result's type."""
        wanted = self.eqns[0].outvars[0].aval
        return all(p.aval.shape == wanted.shape and p.aval.dtype == wanted.dtype for p in self.parts)


def is_scalar(atom: Var) -> bool:
    """Whether a value is small enough to be sent to the stage that joins it."""
    return num_elements_of(atom) <= TUNING.joined_elements


def _chains(root: JaxprEqn, groups: Mapping[int, Sequence[Atom]]) -> list[JaxprEqn]:
    """The same join, first within each stage, then of the stages' results."""
    made: list[JaxprEqn] = []

    def chain(parts: Sequence[Atom]) -> Atom:
        so_far = parts[0]
        for part in parts[1:]:
            made.append(replace_eqn(root, invars=[so_far, part], outvars=[new_var(root.outvars[0].aval)]))
            so_far = made[-1].outvars[0]
        return so_far

    chain([chain(groups[stage]) for stage in sorted(groups)])
    return [*made[:-1], replace_eqn(made[-1], outvars=root.outvars)]
