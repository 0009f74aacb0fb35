"""Folds constant scalars (`64.0 - float32(0)` is a literal) and operations that are the identity.

In:     an equation and its operands, some of them scalar literals.
Out:    the literal or operand that equals its result, or None.
Method: only operations whose result is exact or correctly rounded everywhere (IEEE 754), so that folding changes no
        bit, on scalars only; and `select_n` with a known predicate, which library code leaves behind
        (`jnp.var` divides by N - ddof and selects NaN if that is not positive).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar._jax import Atom, Aval, JaxprEqn, Literal
from autopar.ir.rules.index_map import OPERATIONS

_EXACT = frozenset("add sub mul neg and or not eq ne lt le gt ge".split())
_EXACT_ON_INTEGERS = frozenset("clamp max min".split())
"""Not on floats: implementations differ in the sign of a zero."""
_EXACT_DTYPES = ("bool", "int32", "int64", "uint32", "uint64", "float32", "float64")

_MAYBE_IDENTITY = frozenset(
    {"broadcast_in_dim", "convert_element_type", "copy", "copy_p", "reshape", "squeeze", "stop_gradient", "transpose"}
)


def is_identity(eqn: JaxprEqn, operands: Sequence[Atom]) -> bool:
    """Whether the result of `eqn` is its operand: the same elements in the same order."""
    name = eqn.primitive.name
    if name not in _MAYBE_IDENTITY or eqn.outvars[0].aval != operands[0].aval:
        return False
    match name:
        case "transpose":
            return list(eqn.params["permutation"]) == sorted(eqn.params["permutation"])
        case "reshape":
            return eqn.params["dimensions"] is None and len(operands) == 1
        case "broadcast_in_dim":
            return list(eqn.params["broadcast_dimensions"]) == list(range(operands[0].aval.ndim))
    return True


def fold(eqn: JaxprEqn, operands: Sequence[Atom]) -> Atom | None:
    """The literal or operand that equals the result of `eqn`; None: it has to be computed."""
    if len(eqn.outvars) != 1 or not operands or not isinstance(operands[0], Literal):
        return None  # a callback has no result
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    if name == "select_n":
        chosen = operands[1 + int(_value(operands[0]))]
        if chosen.aval == out:
            return chosen
        return _converted(chosen, out) if _is_known(chosen) and chosen.aval.dtype == out.dtype else None
    if getattr(out, "shape", None) != () or not all(_is_known(operand) for operand in operands):
        return None
    if name == "convert_element_type":
        return _converted(operands[0], out)
    if out.dtype.name not in _EXACT_DTYPES:
        return None
    is_float, values = np.issubdtype(out.dtype, np.floating), [_value(operand) for operand in operands]
    with np.errstate(all="ignore"):
        if name == "div" and is_float:  # integers: NumPy and XLA round differently
            return literal_of(np.divide(*values), out)
        if name in _EXACT or (name in _EXACT_ON_INTEGERS and not is_float):
            return literal_of(OPERATIONS[name](eqn.params, *values), out)
    return None


def _is_known(atom: Atom) -> bool:
    return isinstance(atom, Literal) and atom.aval.shape == () and atom.aval.dtype.name in _EXACT_DTYPES


def _value(literal: Atom) -> np.ndarray:
    return np.asarray(literal.val, literal.aval.dtype)


def _converted(operand: Literal, out: Aval) -> Literal | None:
    value = _value(operand)
    if out.dtype.name not in _EXACT_DTYPES:
        return None
    if np.issubdtype(value.dtype, np.floating) and np.issubdtype(out.dtype, np.integer):
        return None  # implementations differ out of range
    with np.errstate(all="ignore"):
        return literal_of(value.astype(out.dtype), out)


def literal_of(value: np.ndarray, aval: Aval) -> Literal:
    """A scalar as a literal of this type."""
    scalar = np.asarray(value, aval.dtype)[()]
    return Literal(scalar.item() if aval.weak_type else scalar, aval)  # JAX reads a Python number as weakly typed
