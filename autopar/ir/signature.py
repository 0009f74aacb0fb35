"""When two equations are the same operation, and when two values are the same.

In:     an equation; equations, in order.
Out:    `equation_signature(eqn)`: equal for equations with the same rule, so that what follows from it is computed once.
        `ValueNumbers`: a name for each value; equal values have one.
Method: primitive, parameters, types of operands and results; which values they are does not matter. Values are numbered: equal
        are those that equal equations make of equal values. A barrier's results are its operands; what a loop or branch
        makes, or has an effect, is equal to nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, field

from autopar._jax import Atom, DropVar, JaxprEqn, Literal, Params, Var
from autopar.ir.region import is_region, kind_of


def equation_signature(eqn: JaxprEqn) -> object:
    """Equal for equations with the same rule: primitive, parameters, types of operands and results.

    Of a kernel also which results are read: others may be where it keeps what one step leaves for the next.
    """
    avals = tuple([(v.aval.shape, v.aval.dtype, isinstance(v, Literal)) for v in eqn.invars])
    results = tuple([(v.aval.shape, v.aval.dtype) for v in eqn.outvars])
    params: object = tuple(sorted([(k, _hashable(v)) for k, v in eqn.params.items()]))
    if "grid_mapping" in eqn.params and hasattr(eqn.params["grid_mapping"], "block_mappings"):
        params = _kernel(eqn.params), tuple(isinstance(var, DropVar) for var in eqn.outvars)
    return eqn.primitive, params, avals, results


def _kernel(params: Params) -> object:
    """The parameters of a Pallas kernel, its programs by their text: each call traces them anew."""
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
