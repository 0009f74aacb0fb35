"""Tells whether two equations are the same operation, two values equal, or two programs equal but for their variables' names.

In:     an equation; equations, in program order; a flat program.
Out:    `equation_signature(eqn)`: equal for equations with the same rule, so that what follows from it is computed once.
        `ValueNumbers`: a name for each value; equal values share one. `canonical_key(jaxpr)`: hashable, equal for programs
        with the same dataflow graph.
Method: a signature is the primitive, its parameters, and the types of operands and results. Two values are equal if equal
        operations compute them from equal values. A barrier's results equal its operands; the results of loops, branches
        and effects equal nothing else. In a program's key variables are numbered in order of appearance, in bodies of loops
        and branches too. Source lines do not count; whether an equation is of the backward pass does, since plans treat it
        differently.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, field

from autopar._jax import Atom, DropVar, Jaxpr, JaxprEqn, Literal, Params, Var
from autopar.ir.gradient import is_backward
from autopar.ir.region import is_region, kind_of, region_of


def equation_signature(eqn: JaxprEqn) -> object:
    """A key, equal for equations with the same rule: primitive, parameters, types of operands and results.

    For a Pallas kernel also which results are read: the unread ones may serve as scratch between steps of its grid.
    """
    avals = tuple([(v.aval.shape, v.aval.dtype, isinstance(v, Literal)) for v in eqn.invars])
    results = tuple([(v.aval.shape, v.aval.dtype) for v in eqn.outvars])
    params: object = tuple(sorted([(k, _hashable(v)) for k, v in eqn.params.items()]))
    if "grid_mapping" in eqn.params and hasattr(eqn.params["grid_mapping"], "block_mappings"):
        params = _kernel(eqn.params), tuple(isinstance(var, DropVar) for var in eqn.outvars)
    return eqn.primitive, params, avals, results


def _kernel(params: Params) -> object:
    """The parameters of a Pallas kernel; its jaxprs as text, since each call traces new ones."""
    mapping = params["grid_mapping"]
    blocks = tuple(
        (_text(each.index_map_jaxpr), str(each.block_shape), str(each.array_aval)) for each in mapping.block_mappings
    )
    others = {name: value for name, value in params.items() if name not in ("jaxpr", "grid_mapping")}
    return _text(params["jaxpr"]), mapping.grid, mapping.vmapped_dims, blocks, repr(sorted(others.items()))


@functools.lru_cache(maxsize=1024)
def _text(program: object) -> str:
    return str(program)


def _hashable(value: object) -> object:
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


@dataclass(slots=True, eq=False)
class ValueNumbers:
    """Value numbers of the equations visited so far.

    Attributes:
        name: The name of each value that equals an earlier one, or that depends on literals alone; other values are their
            own names.
        known: Signature and operands' names -> the first such equation.
        numbers: Of results that depend on literals alone; what has one table has one name for equal ones.
    """

    name: dict[Var, Hashable] = field(default_factory=dict)
    known: dict[Hashable, JaxprEqn] = field(default_factory=dict)
    numbers: dict[Hashable, int] = field(default_factory=dict)

    def of(self, atom: Atom) -> Hashable:
        """The name of a value."""
        return (str(atom.val), str(atom.aval)) if isinstance(atom, Literal) else self.name.get(atom, atom)

    def visit(self, eqn: JaxprEqn) -> JaxprEqn | None:
        """Number an equation's results; the earlier equation that computes the same, or None."""
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
        if not any(isinstance(operand, Var) for operand in operands):  # depends on literals alone
            for k, var in enumerate(eqn.outvars):
                self.name[var] = self.numbers.setdefault((key, k), len(self.numbers))
        return None


def canonical_key(jaxpr: Jaxpr) -> Hashable:
    """A key that is equal for equal programs."""
    return _key(jaxpr, {})


def _key(jaxpr: Jaxpr, number: dict[Var, int]) -> Hashable:
    def name(atom: Atom) -> Hashable:
        if isinstance(atom, Literal):
            return "literal", str(atom.val), str(atom.aval)
        return number.setdefault(atom, len(number))

    inputs = tuple((name(var), tuple(var.aval.shape), str(var.aval.dtype)) for var in jaxpr.invars)
    eqns = tuple(
        (_what(eqn, number), tuple(map(name, eqn.invars)), tuple(map(name, eqn.outvars)), is_backward(eqn))
        for eqn in jaxpr.eqns
    )
    return inputs, eqns, tuple(map(name, jaxpr.outvars))


def _what(eqn: JaxprEqn, number: dict[Var, int]) -> Hashable:
    if not is_region(eqn):
        return equation_signature(eqn)
    region, reverse = region_of(eqn), eqn.params.get("reverse", False)
    roles = tuple(b.role for b in region.bindings)
    return region.kind, region.trips, reverse, roles, tuple(_key(body, number) for body in region.bodies)
