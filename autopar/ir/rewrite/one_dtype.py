"""Converts the operands of mixed-dtype matrix products to one dtype, as compilers do.

In:     a flat program. A product of bfloat16 with float32 is one equation of JAX, and most compilers have no such kernel.
Out:    the same function, in which both operands of such a product are first converted to the dtype of its result.
Method: what JAX's lowering does for CPUs and GPUs (`lax._handle_dot_precision`), made visible to the planner: the converted
        operand takes memory, and collectives may move the narrow one. A value is converted once per body, as XLA's CSE
        would do, so the converted value is the residual for the backward pass. TPUs compute the same numbers and fuse
        conversions into the product. Left alone: 8-bit floats, whose mixed products exist, and products that name their
        algorithm, which determines the conversions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar._jax import Atom, Jaxpr, JaxprEqn, primitives, replace_eqn
from autopar.ir.build import Equations
from autopar.ir.region import in_bodies, is_region
from autopar.ir.rewrite.dead_code import with_equations


def products_of_one_dtype(jaxpr: Jaxpr) -> Jaxpr:
    """Convert the operands of mixed products to one dtype; over the same inputs and results."""
    eqns, known = Equations(), dict[tuple[Atom, Any], Atom]()
    for eqn in jaxpr.eqns:
        if is_region(eqn):
            eqns.append(in_bodies(eqn, products_of_one_dtype))
        elif _is_mixed(eqn):
            eqns.append(replace_eqn(eqn, invars=[_converted(eqns, known, atom, eqn) for atom in eqn.invars]))
        else:
            eqns.append(eqn)
    return with_equations(jaxpr, eqns)


def _is_mixed(eqn: JaxprEqn) -> bool:
    if eqn.primitive is not primitives.dot_general_p:
        return False
    lhs, rhs = (atom.aval.dtype for atom in eqn.invars)
    names_algorithm = isinstance(eqn.params["precision"], lax.DotAlgorithm | lax.DotAlgorithmPreset)
    both_small = all(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1 for dtype in (lhs, rhs))
    return lhs != rhs and not names_algorithm and not both_small


def _converted(eqns: Equations, known: dict[tuple[Atom, Any], Atom], atom: Atom, eqn: JaxprEqn) -> Atom:
    dtype = eqn.outvars[0].aval.dtype
    if atom.aval.dtype == dtype:
        return atom
    if (atom, dtype) not in known:
        convert = partial(lax.convert_element_type, new_dtype=dtype)
        known[atom, dtype] = eqns.call_one(convert, [atom], eqn.source_info)
    return known[atom, dtype]
