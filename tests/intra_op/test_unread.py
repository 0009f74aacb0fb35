"""Conversions that nothing reads go, whatever hides them: later ones that alone read them, loops, copies made again."""

import jax
import jax.numpy as jnp
import pytest

from autopar._jax import new_var, shaped
from autopar.cost.steps import AllGather, Slice
from autopar.intra_op.build_graph import build_graph
from autopar.intra_op.lower import lower
from autopar.intra_op.sharded import Body, Gate, Move, Region
from autopar.intra_op.unread import drop_unread
from autopar.ir.trace.trace import trace_step
from autopar.mesh import LogicalMesh, Sharding
from tests.draw import draw_choices

X = new_var(shaped(jax.ShapeDtypeStruct((8,), jnp.float32)))
WHOLE, BY_X, BY_Y = Sharding(((),)), Sharding((("x",),)), Sharding((("y",),))
BOTH = Sharding((("x", "y"),))


def move(source, target, **how):
    axes = tuple(a for a in ("x", "y") if (a in source.dims[0]) != (a in target.dims[0]))
    step = Slice(axes, 0) if len(target.dims[0]) > len(source.dims[0]) else AllGather(axes, 0)
    return Move(X, source, target, step, **how)


def left(*instructions, result=WHOLE):
    return drop_unread(Body(((X, WHOLE),), instructions, ((X, result),))).instructions


def test_what_nothing_reads_goes():
    first, second = move(WHOLE, BY_X), move(BY_X, BOTH)
    assert left(first, second) == ()
    assert left(first, second, result=BY_X) == (first,)
    assert left(first, second, result=BOTH) == (first, second)


def test_what_is_only_waited_for_stays():
    first, second = move(WHOLE, BY_X), move(WHOLE, BY_Y, earlier=(X, BY_X))
    assert left(first, second, result=BY_Y) == (first, second)
    gate = Gate((X, BY_X), ((X, WHOLE),))
    assert left(first, gate) == (first, gate)


def test_a_copy_that_is_made_again_hides_the_first():
    first, again = move(WHOLE, BY_X), move(WHOLE, BY_X, reader="b")
    assert left(first, again, result=BY_X) == (again,)


def test_a_program_without_any_is_the_same_object():
    body = Body(((X, WHOLE),), (move(WHOLE, BY_X),), ((X, BY_X),))
    assert drop_unread(body) is body


def step(w, x):
    def layer(x, w):
        return jnp.tanh(x @ w), jnp.sum(x)

    return jax.lax.scan(layer, x, w)


def unread(body):
    """Moves whose copies nothing needs behind them, in loops too."""
    found, needed = 0, set(body.outputs)
    for instruction in reversed(body.instructions):
        if isinstance(instruction, Move):
            found += needed.isdisjoint(instruction.makes)
        if isinstance(instruction, Region):
            found += sum(map(unread, instruction.bodies))
        needed -= set(instruction.makes)
        needed.update(instruction.needs)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_lowered_programs_have_none(seed):
    arguments = jax.ShapeDtypeStruct((4, 8, 8), jnp.float32), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    graph = build_graph(trace_step(step, arguments).jaxpr, LogicalMesh((2, 2)), {})
    body = lower(graph, draw_choices(graph, seed))
    assert any(isinstance(i, Region) for i in body.instructions) and unread(body) == 0
    assert drop_unread(body) is body
