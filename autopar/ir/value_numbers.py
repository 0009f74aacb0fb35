"""Which values of a program are equal: made by equal equations of equal values.

In:     equations, in order.
Out:    `ValueNumbers`: a name for each value; equal values have one.
Method: value numbering. A barrier's results are its operands; what a loop or branch makes, or has an effect, is equal to
        nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from autopar._jax import Atom, JaxprEqn, Literal, Var
from autopar.ir.region import is_region, kind_of
from autopar.ir.signature import equation_signature


@dataclass(slots=True, eq=False)
class ValueNumbers:
    """Attributes:
    name: Of values that are equal to others before them, or the same wherever they are made; others are their own.
    known: The first equation that makes each.
    """

    name: dict[Var, Hashable] = field(default_factory=dict)
    known: dict[Hashable, JaxprEqn] = field(default_factory=dict)

    def of(self, atom: Atom) -> Hashable:
        """The name of a value."""
        return (str(atom.val), str(atom.aval)) if isinstance(atom, Literal) else self.name.get(atom, atom)

    def visit(self, eqn: JaxprEqn) -> JaxprEqn | None:
        """Name what an equation makes; the one before it that makes the same, if there is one."""
        if kind_of(eqn) == "barrier":
            self.name.update(zip(eqn.outvars, map(self.of, eqn.invars), strict=True))
        if is_region(eqn) or eqn.effects:
            return None
        operands = tuple(map(self.of, eqn.invars))
        key = equation_signature(eqn), operands
        first = self.known.setdefault(key, eqn)
        if first is not eqn:
            self.name.update(zip(eqn.outvars, map(self.of, first.outvars), strict=True))
            return first
        if not any(isinstance(operand, Var) for operand in operands):  # the same wherever it stands
            self.name.update((var, (key, k)) for k, var in enumerate(eqn.outvars))
        return None
