"""`autopar.mark_stage`: the user's own border between two pipeline stages.

In:     an array or a pytree of arrays, in the forward pass of a step.
Out:    the same values; the operations that compute them belong to one stage, those that follow to the next.
Method: an identity primitive, which differentiation and batching pass through.
"""

from __future__ import annotations

from typing import TypeVar

import jax
from jax.interpreters import ad, batching, mlir

from autopar._jax import JaxprEqn, Primitive
from autopar.ir.rules.registry import register
from autopar.ir.rules.rule import ShardingRule
from autopar.ir.rules.terms import new_term, rule_of

Tree = TypeVar("Tree")

mark_stage_p = Primitive("mark_stage")
mark_stage_p.def_impl(lambda x: x)
mark_stage_p.def_abstract_eval(lambda aval: aval)
ad.deflinear2(mark_stage_p, lambda cotangent, _: [cotangent])
batching.primitive_batchers[mark_stage_p] = lambda args, dims: (mark_stage_p.bind(*args), dims[0])
mlir.register_lowering(mark_stage_p, lambda _, x: [x])


def mark_stage(x: Tree) -> Tree:
    """End a pipeline stage here: the operations that compute `x` are the last of the stage.

    Obeyed by `PipelineParallel()`, which then makes one stage more than there are marks. Elsewhere it is an identity.

    `x`: the value that one stage passes to the next: an array or a pytree; the mark is put on its last array.
    """
    leaves, tree = jax.tree.flatten(x)
    marked = [*leaves[:-1], *(mark_stage_p.bind(leaf) for leaf in leaves[-1:])]
    return jax.tree.unflatten(tree, marked)


@register(mark_stage_p)
def mark(eqn: JaxprEqn) -> ShardingRule:
    """`ab->ab`, a copy."""
    term = new_term(eqn.outvars[0].aval.shape)
    return rule_of(eqn, [term], [term], [(0,)])
