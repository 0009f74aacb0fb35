"""Which operands of an operation may stay partial sums: its linear groups, less those that a dtype forbids.

In:     an equation and the groups of operands in which its mathematics is linear.
Out:    the groups through which partial sums may be carried.
Method: a partial sum is an array whose sum over some mesh axes is the value. It passes `f` when `f(u) + f(v)` equals
        `f(u + v)` for the numbers the machine has: never for booleans, keys or tokens; into another dtype only if it is
        at least as wide in range and precision, for parts may be large where their sum is small (of integers, 24 bits
        are enough: what is counted has no sign); not from floats to integers (rounding); not from integers to wider
        ones or from unsigned ones to floats, since parts may have wrapped around where their sum has not; not for 8-bit
        floats, which have no range to spare. In a product it holds only of a finite factor: a sum times infinity is
        infinite, but of its parts one may be 0 and give NaN, or two give infinities of both signs.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from autopar._jax import Atom, JaxprEqn, Literal


def linear_groups(eqn: JaxprEqn, *groups: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Those `groups` of operands whose partial sums give partial sums of every result.

    `groups`: for each, operand numbers: the operation is linear in these operands together, the others held fixed.
    """
    results = [var.aval.dtype for var in eqn.outvars]
    return tuple(
        tuple(group)
        for group in groups
        if not all(isinstance(eqn.invars[operand], Literal) for operand in group)  # a number is no sum worth keeping
        and all(sums_survive(eqn.invars[operand].aval.dtype, result) for operand in group for result in results)
    )


def survives_infinity(eqn: JaxprEqn, group: tuple[int, ...]) -> bool:
    """Whether partial sums through this linear group give what the sum gives also where there are infinities and zeros.

    What may multiply or divide them, any float that is not in the group, must then be a number that stands in the program.
    """
    others = [atom for k, atom in enumerate(eqn.invars) if k not in group]
    return all(_is_harmless(atom) for atom in others if jnp.issubdtype(atom.aval.dtype, jnp.inexact))


def _is_harmless(factor: Atom) -> bool:
    return isinstance(factor, Literal) and bool(np.isfinite(factor.val)) and bool(factor.val != 0)


def sums_survive(source: np.dtype, target: np.dtype) -> bool:
    """Whether partial sums in `source` are still partial sums when each part is converted to `target`."""
    if not (may_be_partial(source) and may_be_partial(target)):
        return False
    if jnp.issubdtype(target, jnp.inexact):
        to = jnp.finfo(target)
        if jnp.issubdtype(source, jnp.inexact):
            return to.nmant >= jnp.finfo(source).nmant and to.maxexp >= jnp.finfo(source).maxexp
        return jnp.issubdtype(source, jnp.signedinteger) and to.nmant + 1 >= min(jnp.iinfo(source).bits - 1, 24)
    if jnp.issubdtype(source, jnp.inexact):
        return False
    return np.dtype(target).itemsize <= np.dtype(source).itemsize


def may_be_partial(dtype: np.dtype) -> bool:
    """Whether an array of this dtype may be a partial sum: integers, and floats of at least 16 bits."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.dtype(dtype).itemsize >= 2
    return jnp.issubdtype(dtype, jnp.integer)


def may_be_extreme(dtype: np.dtype) -> bool:
    """Whether the largest or smallest of such numbers can be found in parts: all but complex ones and 8-bit floats.

    The formats of 8 bits do not agree on where NaN is, or have none.
    """
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.dtype(dtype).itemsize >= 2
    return dtype == np.bool_ or jnp.issubdtype(dtype, jnp.integer)


def identity_of(kind: str, dtype: np.dtype) -> bool | int | float:
    """The number that changes no sum, maximum or minimum: what a rule calls these, for arrays of this dtype."""
    if kind == "sum":
        return 0
    if dtype == np.bool_:
        return kind == "min"
    if jnp.issubdtype(dtype, jnp.floating):
        return -math.inf if kind == "max" else math.inf
    limits = jnp.iinfo(dtype)
    return int(limits.min if kind == "max" else limits.max)
