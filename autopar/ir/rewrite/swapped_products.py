"""Swaps the operands of products whose results are only read transposed.

In:     a flat program.
Out:    the same function: `jax.grad` writes the gradient of a weight as a product, transposed; here it is one product.
Method: within one program compilers do the same. But a sum over microbatches stands between the two, in a loop of its own or in
        another program than the update: added up is what the product makes, and all of the sum would be transposed.
"""

from __future__ import annotations

from autopar._jax import Jaxpr, JaxprEqn, Var, primitives, replace_eqn
from autopar.ir.dataflow import readers_of, variables
from autopar.ir.rewrite.dead_code import with_equations


def swap_products(jaxpr: Jaxpr) -> Jaxpr:
    """Swap the operands of products that one transpose alone reads, which then is not needed; loops and branches stay."""
    readers, results = readers_of(jaxpr.eqns), set(variables(jaxpr.outvars))
    swapped = {
        eqn: reader
        for eqn in jaxpr.eqns
        if eqn.primitive is primitives.dot_general_p
        for reader in readers.get(eqn.outvars[0], ())[:1]
        if len(readers[eqn.outvars[0]]) == 1 and eqn.outvars[0] not in results and _swaps(reader, eqn)
    }
    if not swapped:
        return jaxpr
    gone = set(swapped.values())
    eqns = [_swapped(eqn, swapped[eqn].outvars[0]) if eqn in swapped else eqn for eqn in jaxpr.eqns if eqn not in gone]
    return with_equations(jaxpr, eqns)


def _swaps(reader: JaxprEqn, product: JaxprEqn) -> bool:
    """Whether an equation is a transpose that brings the rows of a product's second operand before those of its first.

    Products of many matrices (experts) do not swap: XLA for GPUs then transposes an operand of theirs.
    """
    if reader.primitive is not primitives.transpose_p or product.params.get("out_sharding") is not None:
        return False
    (summed, _), (batch, _) = product.params["dimension_numbers"]
    ndim, first = product.outvars[0].aval.ndim, product.invars[0].aval.ndim - len(summed)
    return not batch and tuple(reader.params["permutation"]) == (*range(first, ndim), *range(first))


def _swapped(product: JaxprEqn, result: Var) -> JaxprEqn:
    numbers = tuple(dims[::-1] for dims in product.params["dimension_numbers"])
    params = {**product.params, "dimension_numbers": numbers}
    if isinstance(params["precision"], tuple):
        params["precision"] = params["precision"][::-1]
    return replace_eqn(product, invars=product.invars[::-1], outvars=[result], params=params)
