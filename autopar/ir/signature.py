"""When two equations are the same operation.

In:     an equation.
Out:    `equation_signature(eqn)`: equal for equations with the same rule, so that what follows from it is computed once.
Method: primitive, parameters, types of operands and results; which values they are does not matter.
"""

from __future__ import annotations

import functools
from typing import Any

from autopar._jax import JaxprEqn, Literal


def equation_signature(eqn: JaxprEqn) -> object:
    """Equal for equations with the same rule: primitive, parameters, types of operands and results."""
    avals = tuple((v.aval.shape, v.aval.dtype, isinstance(v, Literal)) for v in eqn.invars)
    results = tuple((v.aval.shape, v.aval.dtype) for v in eqn.outvars)
    params: object = tuple(sorted((k, _hashable(v)) for k, v in eqn.params.items()))
    if hasattr(eqn.params.get("grid_mapping"), "block_mappings"):
        params = _kernel(eqn.params)
    return eqn.primitive, params, avals, results


def _kernel(params: Any) -> object:
    """The parameters of a Pallas kernel, its programs by their text: each call traces them anew."""
    mapping = params["grid_mapping"]
    blocks = tuple(
        (_text(each.index_map_jaxpr), str(each.block_shape), str(each.array_aval)) for each in mapping.block_mappings
    )
    others = {name: value for name, value in params.items() if name not in ("jaxpr", "grid_mapping")}
    return _text(params["jaxpr"]), mapping.grid, mapping.vmapped_dims, blocks, repr(sorted(others.items()))


@functools.lru_cache(maxsize=1024)
def _text(program: Any) -> str:
    return str(program)


def _hashable(value: object) -> object:
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value
