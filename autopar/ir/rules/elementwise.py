"""Rules of elementwise operations: every result element depends on the operand elements at its own position.

In:     equations such as `mul`, `exp`, `clamp`, `threefry2x32` (two results), `convert_element_type`.
Out:    `ab,ab->ab`. An operand dim of length 1 that meets a longer one is written `1`, and operands of lower rank
        (clamp's bounds, the words of a random key) are aligned to the right, as in NumPy.
Method: all dims may be split. Linear operations pass partial sums (`linearity.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from autopar._jax import JaxprEqn, Primitive, bind_eqn, copies_to_or_from_host, find_primitives, on_host
from autopar.ir.rules.registry import register
from autopar.ir.rules.rule import LocalProgram, Shard, ShardingRule, factor_names, num_elements
from autopar.ir.rules.terms import new_term, rule_of

_NONLINEAR = find_primitives(
    *"abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil clz cos cosh digamma erf erf_inv".split(),
    *"erfc exp exp2 expm1 floor integer_pow is_finite lgamma log log1p log2 logistic not one_minus_square".split(),
    *"population_count reduce_precision round rsqrt sign sin sinh sqrt square tan tanh".split(),
    # of several operands
    *"and atan2 clamp eq eq_to ge gt igamma igamma_grad_a igammac le le_to lt lt_to max min mulhi ne".split(),
    *"nextafter or polygamma pow regularized_incomplete_beta rem shift_left shift_right_arithmetic".split(),
    *"shift_right_logical xor zeta".split(),
    # random bits from counters, with several results
    *"philox2x32 philox4x32 threefry2x32 threefry4x32".split(),
)
_OPERATIONS = {"erf_inv": 25, "threefry2x32": 110, "threefry4x32": 190, "philox2x32": 60, "philox4x32": 110}
"""Operations per element where they are many: two polynomials of degree 8; rounds of a block cipher. Others count as one."""
_LINEAR_IN_ALL_TOGETHER = find_primitives("add", "add_any", "complex", "conj", "imag", "neg", "real", "sub")
_COPIES = find_primitives("convert_element_type", "copy", "copy_p", "name", "stop_gradient", "zeros_like")
_ANNOTATIONS = find_primitives(
    *"device_put layout_constraint relayout reshard sharding_constraint with_memory_space_constraint".split()
)


_ARITHMETIC = frozenset((*_NONLINEAR, *_LINEAR_IN_ALL_TOGETHER, *find_primitives("mul", "div", "convert_element_type")))


def is_arithmetic(primitive: Primitive) -> bool:
    """Whether a primitive computes elementwise; annotations and copies do not."""
    return primitive in _ARITHMETIC


@register(*_NONLINEAR)
def elementwise(eqn: JaxprEqn) -> ShardingRule:
    """Not linear: partial sums do not pass."""
    operations = _OPERATIONS.get(eqn.primitive.name, 1)
    return _elementwise(eqn, operations=operations)


@register(*_LINEAR_IN_ALL_TOGETHER)
def sum_like(eqn: JaxprEqn) -> ShardingRule:
    """Linear in all operands together: f(x, y) + f(u, v) = f(x + u, y + v)."""
    return _elementwise(eqn, [tuple(range(len(eqn.invars)))])


@register(*find_primitives("mul"))
def product(eqn: JaxprEqn) -> ShardingRule:
    """Linear in either operand, the other held fixed."""
    return _elementwise(eqn, [(0,), (1,)])


@register(*find_primitives("div"))
def quotient(eqn: JaxprEqn) -> ShardingRule:
    """Linear in the numerator; not for integers, which are rounded."""
    is_integer = np.issubdtype(eqn.outvars[0].aval.dtype, np.integer)
    return _elementwise(eqn, [] if is_integer else [(0,)])


@register(*_COPIES)
def copy(eqn: JaxprEqn) -> ShardingRule:
    """The operand, perhaps in another dtype; no arithmetic."""
    return _elementwise(eqn, [(0,)], operations=0, moves_data=True)


@register(*_ANNOTATIONS)
def annotation(eqn: JaxprEqn) -> ShardingRule:
    """The operands passed through: their placement is for the planner; the per-device program ignores it.

    Except copies to or from host memory, which each device does for its shard.
    """
    return passed_through(eqn, _copied if copies_to_or_from_host(eqn) else lambda eqn, shard, *operands: operands)


def passed_through(eqn: JaxprEqn, local: LocalProgram | None = None) -> ShardingRule:
    """The rule of an operation that returns its operands."""
    fresh = factor_names()
    terms = [new_term(var.aval.shape, fresh) for var in eqn.invars]
    return rule_of(eqn, terms, terms, [tuple(range(len(terms)))], moves_data=True, local=local)


def _copied(eqn: JaxprEqn, shard: Shard, *operands: jax.Array) -> Sequence[jax.Array]:
    spaces = tuple(jax.memory.Space.Host if on_host(v.aval) else jax.memory.Space.Device for v in eqn.outvars)
    return bind_eqn(eqn, *operands, params={**eqn.params, "devices": spaces, "srcs": (None,) * len(spaces)})


def _elementwise(
    eqn: JaxprEqn, linear: Sequence[tuple[int, ...]] = (), operations: int = 1, moves_data: bool = False
) -> ShardingRule:
    """An elementwise rule; `operations`: FLOPs per element."""
    shape = eqn.outvars[0].aval.shape
    result = new_term(shape)
    operands = []
    for var in eqn.invars:
        dims = zip(result[len(shape) - len(var.aval.shape) :], var.aval.shape, strict=True)
        operands.append(tuple(() if size == 1 else dim for dim, size in dims))
    return rule_of(
        eqn, operands, [result], linear, moves_data=moves_data, flops=float(operations * num_elements(shape))
    )
