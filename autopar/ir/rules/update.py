"""Several elementwise operations as one: the update of an array of the state, as `ir/rewrite/joined_updates.py` writes it.

In:     gradients, state and scalars, of the equations' operands; a `Steps`, the operations.
Out:    `update_p`; its rule, `ab,,ab->ab,ab`; what an operation must be to be one of them.
Method: all arrays are of one shape and split alike, since element k of each result depends on elements k and on scalars alone.
        Partial sums do not pass: they are reduced before. A device runs the operations, one after another, on its shard. As
        compilers do for such a kernel, a result takes the memory of an operand of its type that is read for the last time.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir

from autopar._jax import Atom, Aval, JaxprEqn, Literal, Primitive, Var, bind_eqn, on_host
from autopar.ir.rules.elementwise import is_arithmetic
from autopar.ir.rules.registry import register
from autopar.ir.rules.rule import Shard, ShardingRule, num_elements
from autopar.ir.rules.terms import new_term, rule_of


@dataclass(frozen=True, slots=True)
class Steps:
    """The operations of an update.

    Attributes:
        form: Equal for the same operations on the same types, whatever their variables are called.
        eqns: The operations, in order.
        given: The variables that stand for the operands.
        made: Those that are the results.
    """

    form: Hashable
    eqns: tuple[JaxprEqn, ...] = field(compare=False)
    given: tuple[Var, ...] = field(compare=False)
    made: tuple[Var, ...] = field(compare=False)

    def __str__(self) -> str:
        return "+".join(eqn.primitive.name for eqn in self.eqns)


def may_be_step(eqn: JaxprEqn) -> bool:
    """Whether an operation is elementwise, with one result and operands of its shape or scalars, all in device memory."""
    if eqn.effects or len(eqn.outvars) != 1:
        return False
    if not (is_arithmetic(eqn.primitive) or eqn.primitive.name in ("select_n", "broadcast_in_dim")):
        return False
    shape = eqn.outvars[0].aval.shape
    return all(atom.aval.shape in (shape, ()) and not on_host(atom.aval) for atom in (*eqn.invars, *eqn.outvars))


def _run(steps: Steps, shape: Sequence[int], operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Run the operations on arrays of this shape and scalars."""
    arrays = dict(zip(steps.given, operands, strict=True))
    for eqn in steps.eqns:
        read = [_value(atom, arrays) for atom in eqn.invars]
        if eqn.primitive.name == "broadcast_in_dim":
            arrays[eqn.outvars[0]] = lax.broadcast_in_dim(read[0], shape, range(len(shape) - read[0].ndim, len(shape)))
        else:
            arrays.update(zip(eqn.outvars, bind_eqn(eqn, *read), strict=True))
    return [arrays[var] for var in steps.made]


def _value(atom: Atom, arrays: Mapping[Var, jax.Array]) -> jax.Array:
    return jnp.asarray(atom.val, dtype=atom.aval.dtype) if isinstance(atom, Literal) else arrays[atom]


def _run_whole(*operands: jax.Array, steps: Steps) -> list[jax.Array]:
    return _run(steps, steps.made[0].aval.shape, operands)


def _abstract(*operands: Aval, steps: Steps) -> list[Aval]:
    return [var.aval for var in steps.made]


update_p = Primitive("update")
update_p.multiple_results = True
update_p.def_impl(_run_whole)
update_p.def_abstract_eval(_abstract)
mlir.register_lowering(update_p, mlir.lower_fun(_run_whole, multiple_results=True))


@register(update_p)
def update(eqn: JaxprEqn) -> ShardingRule:
    """`ab,,ab->ab,ab`."""
    shape = eqn.outvars[0].aval.shape
    term = new_term(shape)

    def local(eqn: JaxprEqn, shard: Shard, *operands: jax.Array) -> Sequence[jax.Array]:
        return _run(eqn.params["steps"], [shard.local_dim(dim) for dim in term], operands)

    operands = [term if var.aval.shape == shape else () for var in eqn.invars]
    flops, made = float(num_elements(shape)), {(var.aval.shape, var.aval.dtype) for var in eqn.outvars}
    reused = tuple(k for k, atom in enumerate(eqn.invars) if (atom.aval.shape, atom.aval.dtype) in made)
    return rule_of(eqn, operands, [term], flops=flops, local=local, reused=reused)
