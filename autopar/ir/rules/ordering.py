"""Rules of operations that order elements: `sort`, `top_k`.

In:     `sort` of any number of arrays by the first of them, `top_k`, `approx_top_k`.
Out:    the dim along which elements are ordered is whole, the others may be split.
"""

from __future__ import annotations

import math

from autopar._jax import JaxprEqn, find_primitives
from autopar.ir.rules.registry import register
from autopar.ir.rules.rule import ShardingRule, factor_names, num_elements
from autopar.ir.rules.terms import new_term, rule_of


@register(*find_primitives("sort"))
def sort(eqn: JaxprEqn) -> ShardingRule:
    """`ab,ab->ab,ab {whole b}`."""
    shape = eqn.invars[0].aval.shape
    term, along, count = new_term(shape), eqn.params["dimension"], len(eqn.invars)
    flops = count * num_elements(shape) * math.log2(max(shape[along], 2))
    return rule_of(eqn, [term] * count, [term], whole=term[along], flops=flops)


@register(*find_primitives("top_k", "approx_top_k"))
def top_k(eqn: JaxprEqn) -> ShardingRule:
    """`ab->ac,ac {whole b c}`: the largest elements of each row, and their indices."""
    source, target = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    along = eqn.params.get("axis", eqn.params.get("reduction_dimension", -1)) % len(source)
    fresh = factor_names()
    operand = new_term(source, fresh)
    own = () if target[along] == 1 else (next(fresh),)
    result = (*operand[:along], own, *operand[along + 1 :])
    return rule_of(eqn, [operand], [result], whole=(*operand[along], *own), flops=float(num_elements(source)))
