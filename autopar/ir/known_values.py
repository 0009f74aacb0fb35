"""What is known of values before a program runs: that all elements are one number, count 0, 1, 2, ..., or follow from others.

In:     a flat program.
Out:    `KnownValues`: of each value of the program, or of a body in it, what it is made of, and what it is.
Method: back through the equations that made it, out of the bodies that it entered as a constant; computed in NumPy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np

from autopar._jax import Atom, Jaxpr, JaxprEqn, Literal, Var
from autopar.ir.region import bodies_of, is_region, region_of
from autopar.ir.rules.index_map import OPERATIONS

RESHAPES = "convert_element_type reshape squeeze expand_dims broadcast_in_dim copy stop_gradient".split()
"""What leaves numbers as they are, in another shape or type."""


class KnownValues:
    """What is known of the values of one program.

    Attributes:
        maker: The equation that makes each.
        outside: What those are that enter a body as constants.
        rows: What those are rows of that enter a loop one by one, or, of stacks that leave one, their rows.
    """

    def __init__(self, jaxpr: Jaxpr):
        self.maker: dict[Var, JaxprEqn] = {}
        self.outside: dict[Var, Atom] = {}
        self.rows: dict[Var, Atom] = {}
        self._visit(jaxpr)

    def _visit(self, jaxpr: Jaxpr) -> None:
        for eqn in jaxpr.eqns:
            self.maker.update(dict.fromkeys(eqn.outvars, eqn))
            if is_region(eqn):
                region = region_of(eqn)
                for b in region.of_role("const"):
                    self.outside.update(dict.fromkeys(b.variables, b.outer))
                for b in region.of_role("xs"):
                    self.rows.update(dict.fromkeys(b.variables, b.outer))
                self.rows.update({b.result: b.value for b in region.of_role("ys") if b.result is not None})
            for body in bodies_of(eqn):
                self._visit(body)

    def made(self, atom: Atom) -> tuple[Atom, JaxprEqn | None]:
        """A value, followed out of the bodies that it enters as a constant, and what makes it."""
        while isinstance(atom, Var) and atom in self.outside:
            atom = self.outside[atom]
        return atom, self.maker.get(atom) if isinstance(atom, Var) else None

    def origin(self, atom: Atom) -> Atom:
        """The integers of which this is another shape or type."""
        atom, eqn = self.made(atom)
        while eqn is not None and eqn.primitive.name in RESHAPES:
            before = eqn.invars[0].aval
            if before.size != atom.aval.size or not np.issubdtype(before.dtype, np.integer):
                break
            atom, eqn = self.made(eqn.invars[0])
        return atom

    def parts(self, atom: Atom, whole: Collection[Var]) -> Iterator[tuple[Atom, JaxprEqn | None]]:
        """What a value is computed of, element by element, and by what; None: a leaf. `whole` are not taken apart."""
        atom, eqn = self.made(self.origin(atom))
        if eqn is None or atom in whole or eqn.primitive.name not in (*OPERATIONS, *RESHAPES):
            yield atom, None
            return
        yield atom, eqn
        for operand in eqn.invars:
            yield from self.parts(operand, whole)

    def function(self, atom: Atom, values: Mapping[Var, np.ndarray]) -> np.ndarray | None:
        """What a value is, element by element, where its leaves have these values; None: it is not known."""
        atom, eqn = self.made(self.origin(atom))
        if isinstance(atom, Literal):
            return np.asarray(atom.val)
        if atom in values:
            return values[atom]
        if atom in self.rows:  # equal, if all of the stack are
            return self.constant(self.rows[atom])
        if eqn is None or eqn.primitive.name not in (*OPERATIONS, *RESHAPES):
            return None
        operands = [self.function(operand, values) for operand in eqn.invars]
        known = [operand for operand in operands if operand is not None]
        if len(known) < len(operands):
            return None
        if eqn.primitive.name not in OPERATIONS:
            return known[0]
        with np.errstate(all="ignore"):
            return np.asarray(OPERATIONS[eqn.primitive.name](eqn.params, *known)).astype(atom.aval.dtype)

    def constant(self, atom: Atom) -> np.ndarray | None:
        """The number that all elements of a value are; None: it is not known, or they differ."""
        made = self.function(atom, {})
        return made if made is not None and made.ndim == 0 else None

    def is_count(self, atom: Atom) -> bool:
        """Whether a value is 0, 1, 2, ... to its end."""
        atom, eqn = self.made(atom)
        if eqn is not None and eqn.primitive.name in RESHAPES and len(atom.aval.shape) == 1:
            return self.is_count(eqn.invars[0]) and eqn.invars[0].aval.shape == atom.aval.shape
        return eqn is not None and eqn.primitive.name == "iota" and len(atom.aval.shape) == 1

    def is_uniform(self, atom: Atom, dim: int) -> bool:
        """Whether all rows of a value along a dim are equal."""
        atom, eqn = self.made(atom)
        if eqn is not None and eqn.primitive.name == "broadcast_in_dim":
            return dim not in eqn.params["broadcast_dimensions"] or eqn.invars[0].aval.ndim == 0
        return self.constant(atom) is not None
