"""When two equations are the same operation.

In:     an equation.
Out:    `equation_signature(eqn)`: equal for equations with the same rule, so that what follows from it is computed once.
Method: primitive, parameters, types of operands and results; which values they are does not matter.
"""

from __future__ import annotations

from autopar._jax import JaxprEqn, Literal


def equation_signature(eqn: JaxprEqn) -> object:
    """Equal for equations with the same rule: primitive, parameters, types of operands and results."""
    avals = tuple((v.aval.shape, v.aval.dtype, isinstance(v, Literal)) for v in eqn.invars)
    results = tuple((v.aval.shape, v.aval.dtype) for v in eqn.outvars)
    params = tuple(sorted((k, _hashable(v)) for k, v in eqn.params.items()))
    return eqn.primitive, params, avals, results


def _hashable(value: object) -> object:
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value
