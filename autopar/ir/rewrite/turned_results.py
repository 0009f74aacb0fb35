"""Products make their results as they are read: `(a b)'` is `b' a'`, a product of the same operands, and turns nothing.

In:     a flat program. JAX differentiates `x @ w` by a product whose result it then turns.
Out:    the same function. Products that only a transpose reads, which puts the second operand's dims before the first's, have
        their operands the other way round, and the transpose is gone.
Method: compilers do the same within a program (XLA's algebraic simplifier). But where samples are taken in parts, the
        product belongs to the loop and what reads the sum of its results comes behind it: the update would turn every
        gradient.
"""

from __future__ import annotations

from collections import Counter

from autopar._jax import Jaxpr, JaxprEqn, Literal, Var, make_jaxpr, primitives, replace_eqn
from autopar.ir.dataflow import inputs_of, variables
from autopar.ir.region import in_bodies


def results_in_order(jaxpr: Jaxpr) -> Jaxpr:
    """The program with such products; over the same inputs and results."""
    eqns = [in_bodies(eqn, results_in_order) for eqn in jaxpr.eqns]
    reads = Counter([*(var for eqn in eqns for var in inputs_of(eqn)), *variables(jaxpr.outvars)])
    products = {eqn.outvars[0]: eqn for eqn in eqns if eqn.primitive is primitives.dot_general_p}
    swapped: dict[Var, Var] = {}
    gone: set[int] = set()
    for number, eqn in enumerate(eqns):
        if eqn.primitive.name != "transpose" or isinstance(eqn.invars[0], Literal):
            continue
        product = products.get(eqn.invars[0])
        if product is not None and reads[eqn.invars[0]] == 1 and _swaps(product, eqn.params["permutation"]):
            swapped[product.outvars[0]] = eqn.outvars[0]
            gone.add(number)
    made = []
    for number, eqn in enumerate(eqns):
        result = next((swapped[var] for var in eqn.outvars if var in swapped), None)
        if number not in gone:
            made.append(eqn if result is None else _swapped(eqn, result))
    unchanged = len(made) == len(jaxpr.eqns) and all(a is b for a, b in zip(made, jaxpr.eqns, strict=True))
    return jaxpr if unchanged else make_jaxpr(jaxpr.invars, jaxpr.outvars, made)


def _swaps(product: JaxprEqn, order: tuple[int, ...]) -> bool:
    """Whether this order of a product's dims is that of the same product with its operands the other way round."""
    (left, _), (batch, _) = product.params["dimension_numbers"]
    own = product.invars[0].aval.ndim - len(left) - len(batch)
    dims = range(product.outvars[0].aval.ndim)
    is_plain = product.params.get("out_sharding") is None
    return is_plain and tuple(order) == (
        *dims[: len(batch)],
        *dims[len(batch) + own :],
        *dims[len(batch) : len(batch) + own],
    )


def _swapped(product: JaxprEqn, result: Var) -> JaxprEqn:
    """The product with its operands the other way round, which makes `result`."""
    summed, batch = product.params["dimension_numbers"]
    params = {**product.params, "dimension_numbers": (summed[::-1], batch[::-1])}
    if isinstance(params["precision"], tuple):
        params["precision"] = params["precision"][::-1]
    return replace_eqn(product, invars=product.invars[::-1], outvars=[result], params=params)
