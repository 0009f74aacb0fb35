"""What else is a microbatch's own where one sum over the batch is: the loss that is returned is the one that is differentiated.

In:     a program, the shares found so far (`share_analysis.py`), and a value that samples wait for.
Out:    the sums over samples that it is made of, as often as they are computed.
Method: backwards through what is linear in sums; a sum that `remat` computes again in the backward pass is that of the
        forward pass, found by equal equations on equal operands.
"""

from __future__ import annotations

from collections.abc import Hashable

from autopar._jax import Jaxpr, JaxprEqn, Literal, Var
from autopar.ir.signature import equation_signature
from autopar.ir.split.pieces import SUM
from autopar.ir.split.shares import Shares
from autopar.ir.structure import Atom, is_structured, variables


def sums_behind(jaxpr: Jaxpr, shares: Shares, var: Var) -> list[Var]:
    """The sums over samples that a value is linear in, or the value itself; and those that are computed alike.

    Args:
        jaxpr: The step.
        shares: Of its equations, up to the one that waits for the value.
        var: The value, a sum or an extreme of all samples; of a body, or of the step itself.
    """
    made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    roots: dict[Var, None] = {}
    waiting = [var]
    while waiting:
        var = waiting.pop()
        eqn = made_by.get(var)
        way = shares.way_of.get(id(eqn))
        if eqn is not None and eqn.primitive.name == "optimization_barrier":
            waiting.append(eqn.invars[eqn.outvars.index(var)])
        elif eqn is not None and way is not None and way.factor is None:
            pairs = zip(eqn.invars, way.operands, strict=True)
            waiting += variables(a for a, want in pairs if want == SUM and shares.share(a) == SUM)
        else:
            roots[var] = None
    return _with_twins(jaxpr, roots)


def _with_twins(jaxpr: Jaxpr, wanted: dict[Var, None]) -> list[Var]:
    """The wanted values, and all that are equal to one of them."""
    number: dict[Var, Hashable] = {}
    known: dict[Hashable, int] = {}

    def name(atom: Atom) -> Hashable:
        return (str(atom.val), str(atom.aval)) if isinstance(atom, Literal) else number.setdefault(atom, id(atom))

    def key(eqn: JaxprEqn) -> Hashable:
        return equation_signature(eqn), tuple(map(name, eqn.invars))

    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "optimization_barrier":
            number.update(zip(eqn.outvars, map(name, eqn.invars), strict=True))
        elif not is_structured(eqn) and not eqn.effects:
            first = known.setdefault(key(eqn), len(known))
            number.update((var, (first, k)) for k, var in enumerate(eqn.outvars))
    meant = {name(var) for var in wanted}
    made = [var for eqn in jaxpr.eqns for var in eqn.outvars if var not in wanted and name(var) in meant]
    return [*wanted, *made]
