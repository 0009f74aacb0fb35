"""Tells through which operands of an operation partial sums may pass: its linear groups, less those that a dtype forbids.

In:     an equation and the groups of operands in which it is mathematically linear.
Out:    the groups through which partial sums may pass.
Method: a partial sum is an array whose sum over some mesh axes is the value. It passes `f` if `f(u) + f(v)` equals
        `f(u + v)` in machine arithmetic: never for booleans, keys or tokens; into another dtype only if that is at least as
        wide in range and precision, since addends may be large where their sum is small (for integers, 24 bits are enough:
        counts have no sign); not from floats to integers (rounding); not from integers to wider ones or from unsigned ones
        to floats, since addends may have wrapped around where their sum has not; not for 8-bit floats, whose range is too
        small. Through a product it passes only if the other factor is finite: a sum times infinity is infinite, but one of
        its addends may be 0 and give NaN, or two give infinities of both signs.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from autopar._jax import Atom, JaxprEqn, Literal
from autopar.ir.split.placement import Reduction


def linear_groups(eqn: JaxprEqn, *groups: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Those of the `groups` whose partial sums give partial sums of every result.

    `groups`: operand numbers: the operation is linear in the operands of a group together, the others held fixed.
    """
    results = [var.aval.dtype for var in eqn.outvars]
    return tuple(
        tuple(group)
        for group in groups
        if not all(isinstance(eqn.invars[operand], Literal) for operand in group)  # a literal is never a partial sum
        and all(sums_survive(eqn.invars[operand].aval.dtype, result) for operand in group for result in results)
    )


def survives_infinity(eqn: JaxprEqn, group: tuple[int, ...]) -> bool:
    """Whether partial sums pass through this group even with infinities and zeros.

    Then each float operand outside the group, which may multiply or divide them, must be a finite, nonzero literal.
    """
    others = [atom for k, atom in enumerate(eqn.invars) if k not in group]
    return all(_is_harmless(atom) for atom in others if jnp.issubdtype(atom.aval.dtype, jnp.inexact))


def _is_harmless(factor: Atom) -> bool:
    return isinstance(factor, Literal) and bool(np.isfinite(factor.val)) and bool(factor.val != 0)


def sums_survive(source: np.dtype, target: np.dtype) -> bool:
    """Whether partial sums in `source` are still partial sums after each addend is converted to `target`."""
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
    """Whether an array of this dtype may be a partial maximum or minimum: all but complex numbers and 8-bit floats.

    The 8-bit formats differ in their NaN, or have none.
    """
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.dtype(dtype).itemsize >= 2
    return dtype == np.bool_ or jnp.issubdtype(dtype, jnp.integer)


def identity_of(kind: Reduction, dtype: np.dtype) -> bool | int | float:
    """The identity of a reduction in this dtype."""
    if kind == "sum":
        return 0
    if dtype == np.bool_:
        return kind == "min"
    if jnp.issubdtype(dtype, jnp.floating):
        return -math.inf if kind == "max" else math.inf
    limits = jnp.iinfo(dtype)
    return int(limits.min if kind == "max" else limits.max)
