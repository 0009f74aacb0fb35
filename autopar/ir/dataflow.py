"""Dataflow of a list of equations: operands, definitions, uses, slices, and substitution of operands.

In:     equations, in program order.
Out:    the variables among atoms; the equation that defines each; its readers; ancestors, descendants, backward slices.
Method: one walk over the equations, or a worklist.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from autopar._jax import Atom, JaxprEqn, Literal, Var, replace_eqn
from autopar.grouping import grouped


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """The variables among the atoms, in order; literals are left out."""
    return [a for a in atoms if not isinstance(a, Literal)]


def inputs_of(eqn: JaxprEqn) -> list[Var]:
    """The operands of an equation that are variables."""
    return [a for a in eqn.invars if not isinstance(a, Literal)]


def makers(eqns: Iterable[JaxprEqn]) -> dict[Var, JaxprEqn]:
    """Map each value to the equation that defines it."""
    return {var: eqn for eqn in eqns for var in eqn.outvars}


def read_by(eqns: Iterable[JaxprEqn], results: Iterable[Atom] = ()) -> dict[Var, None]:
    """The variables that equations or `results` read, in order, each once."""
    return dict.fromkeys([*(a for eqn in eqns for a in inputs_of(eqn)), *variables(results)])


def times_read(eqns: Iterable[JaxprEqn], results: Iterable[Atom]) -> Counter[Var]:
    """How often equations and `results` read each variable, every operand counted."""
    return Counter([*(a for eqn in eqns for a in inputs_of(eqn)), *variables(results)])


def readers_of(eqns: Iterable[JaxprEqn]) -> dict[Var, list[JaxprEqn]]:
    """Map each value to the equations that read it, in order."""
    return grouped((var, eqn) for eqn in eqns for var in dict.fromkeys(inputs_of(eqn)))


def known_as(atom: Atom, names: Mapping[Var, Atom]) -> Atom:
    """The substitute for a value in `names`; the value itself if it has none."""
    return atom if isinstance(atom, Literal) else names.get(atom, atom)


def reading(eqn: JaxprEqn, names: Mapping[Var, Atom]) -> JaxprEqn:
    """The equation with its operands substituted by `names`; the same object if none is."""
    if not any(var in names for var in inputs_of(eqn)):
        return eqn
    return replace_eqn(eqn, invars=[known_as(atom, names) for atom in eqn.invars])


def needed(
    eqns: Sequence[JaxprEqn], wanted: Iterable[Var], effects: bool = True, given: Collection[Var] = ()
) -> list[JaxprEqn]:
    """The equations that compute the wanted values (their backward slice), in order.

    `effects`: whether to keep equations with side effects too. `given`: values already available, where the slice ends.
    """
    alive = {var for var in wanted if var not in given}
    kept = []
    for eqn in reversed(eqns):
        if (effects and eqn.effects) or any(var in alive for var in eqn.outvars):
            kept.append(eqn)
            alive.update(a for a in inputs_of(eqn) if a not in given)
    return kept[::-1]


def ancestors(wanted: Iterable[Var], made_of: Callable[[Var], Iterable[Var]]) -> dict[Var, None]:
    """The wanted values and all their ancestors; `made_of` gives the operands of each value, none where to stop."""
    found: dict[Var, None] = {}
    waiting = list(wanted)
    while waiting:
        var = waiting.pop()
        if var not in found:
            found[var] = None
            waiting += made_of(var)
    return found


def descendants(
    eqns: Iterable[JaxprEqn], begins: Callable[[JaxprEqn], bool] = lambda _: False, given: Iterable[Var] = ()
) -> dict[Var, None]:
    """The `given` values, the results of equations for which `begins` holds, and everything computed from either."""
    found = dict.fromkeys(given)
    for eqn in eqns:
        if begins(eqn) or any(a in found for a in inputs_of(eqn)):
            found.update(dict.fromkeys(eqn.outvars))
    return found


def with_makers(
    eqns: Iterable[JaxprEqn],
    wanted: Iterable[Var],
    maker_of: Mapping[Var, JaxprEqn],
    order: Mapping[JaxprEqn, int],
    done: Collection[JaxprEqn] = (),
) -> list[JaxprEqn]:
    """The equations, and those of `maker_of` that they and the wanted values need, transitively; in program order.

    Args:
        maker_of: For values that are recomputed wherever they are read, the equation that defines each.
        order: Position of each equation.
        done: Equations that have run already, which are not added.
    """
    found = dict.fromkeys(eqns)
    waiting = [*(a for eqn in found for a in inputs_of(eqn)), *wanted]
    while waiting:
        maker = maker_of.get(waiting.pop())
        if maker is not None and maker not in found and maker not in done:
            found[maker] = None
            waiting += inputs_of(maker)
    return sorted(found, key=lambda eqn: order[eqn])
