"""What equations read, or read instead, and which of them a value needs.

In:     equations, in order.
Out:    the variables among atoms; equations that read other values; the equations behind wanted values, and what these are
        made of.
Method: walks backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from autopar._jax import Atom, JaxprEqn, Literal, Var, replace_eqn


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """Those of the atoms that are no literals, in order."""
    return [a for a in atoms if not isinstance(a, Literal)]


def inputs_of(eqn: JaxprEqn) -> list[Var]:
    """The variables that an equation reads."""
    return [a for a in eqn.invars if not isinstance(a, Literal)]


def makers(eqns: Iterable[JaxprEqn]) -> dict[Var, JaxprEqn]:
    """The equation that makes each value."""
    return {var: eqn for eqn in eqns for var in eqn.outvars}


def read_by(eqns: Iterable[JaxprEqn], results: Iterable[Atom] = ()) -> dict[Var, None]:
    """The variables that equations read, and those of results, in order."""
    return dict.fromkeys([*(a for eqn in eqns for a in inputs_of(eqn)), *variables(results)])


def readers_of(eqns: Iterable[JaxprEqn]) -> dict[Var, list[JaxprEqn]]:
    """The equations that read each value, in order."""
    found: dict[Var, list[JaxprEqn]] = {}
    for eqn in eqns:
        for var in dict.fromkeys(inputs_of(eqn)):
            found.setdefault(var, []).append(eqn)
    return found


def known_as(atom: Atom, names: Mapping[Var, Atom]) -> Atom:
    """What stands for a value; itself, if nothing does."""
    return atom if isinstance(atom, Literal) else names.get(atom, atom)


def reading(eqn: JaxprEqn, names: Mapping[Var, Atom]) -> JaxprEqn:
    """The equation, which reads what stands for its operands; itself, if nothing does."""
    if not any(var in names for var in inputs_of(eqn)):
        return eqn
    return replace_eqn(eqn, invars=[known_as(atom, names) for atom in eqn.invars])


def needed(
    eqns: Sequence[JaxprEqn], wanted: Iterable[Var], effects: bool = True, given: Collection[Var] = ()
) -> list[JaxprEqn]:
    """Those equations that wanted values need, in order.

    `effects`: whether what does something beside is needed too. `given`: values that are at hand.
    """
    alive = {var for var in wanted if var not in given}
    kept = []
    for eqn in reversed(eqns):
        if (effects and eqn.effects) or any(var in alive for var in eqn.outvars):
            kept.append(eqn)
            alive.update(a for a in inputs_of(eqn) if a not in given)
    return kept[::-1]


def ancestors(wanted: Iterable[Var], made_of: Callable[[Var], Iterable[Var]]) -> dict[Var, None]:
    """Values and all that they are made of, as far as `made_of` tells."""
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
    """Values that are given, what equations make that begin something, and whatever is made of any of these."""
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
    """Equations and the makers of what they and wanted values read, in order.

    Args:
        maker_of: Of values that are made wherever they are read, the equations.
        order: Position of each equation.
        done: Makers that have run.
    """
    found = dict.fromkeys(eqns)
    waiting = [*(a for eqn in found for a in inputs_of(eqn)), *wanted]
    while waiting:
        maker = maker_of.get(waiting.pop())
        if maker is not None and maker not in found and maker not in done:
            found[maker] = None
            waiting += inputs_of(maker)
    return sorted(found, key=lambda eqn: order[eqn])
