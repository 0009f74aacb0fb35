"""Tracing: names, trees, weak types, static arguments, and what cannot be traced."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar._jax import eval_jaxpr
from autopar.errors import TraceError
from autopar.ir.check import check_program
from autopar.ir.trace.parameters import parameters_of, static_of
from autopar.ir.trace.trace import trace_step

F32 = jnp.float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: jax.Array
    bias: jax.Array


class State(NamedTuple):
    params: dict
    step: jax.Array


def layer(n=4):
    return Layer(jax.ShapeDtypeStruct((n, n), F32), jax.ShapeDtypeStruct((n,), F32))


def train_step(state, batch, *, scale=1.0):
    x = batch["x"] @ state.params["layers"][0].kernel + state.params["layers"][0].bias
    return state._replace(step=state.step + 1), {"loss": x.sum() * scale}


def test_names_and_trees():
    state = State({"layers": [layer()]}, jax.ShapeDtypeStruct((), jnp.int32))
    program = trace_step(train_step, (state, {"x": jax.ShapeDtypeStruct((8, 4), F32)}), {"scale": 2.0})
    check_program(program.jaxpr)
    assert program.name == "train_step"
    assert program.in_paths == (
        "state/params/layers/0/kernel", "state/params/layers/0/bias", "state/step", "batch/x", "scale",
    )  # fmt: skip
    assert program.out_paths == (
        "result/0/params/layers/0/kernel", "result/0/params/layers/0/bias", "result/0/step", "result/1/loss",
    )  # fmt: skip
    assert program.num_args == len(program.in_avals) == 5
    assert program.in_avals[-1].weak_type and not program.in_avals[0].weak_type
    assert program.jaxpr.outvars[0] is program.jaxpr.invars[0]


def test_values_and_captured_constants():
    table, other = np.arange(6, dtype=np.float32), jnp.arange(6, dtype=F32)

    def step(x, n):
        return x * table + other - table, n * 2

    program = trace_step(step, (jnp.ones(6), 3))
    check_program(program.jaxpr)
    assert program.num_args == 2 and len(program.consts) == 2 == len(program.jaxpr.invars) - 2
    values = eval_jaxpr(program.jaxpr, (), *program.flatten_inputs([jnp.ones(6), 3]))
    x, n = program.unflatten_outputs(values)
    np.testing.assert_array_equal(x, other)
    assert n == 6


def test_static_arguments():
    def step(x, mode, *rest, act):
        return (act(x) if mode == "train" else x) + sum(rest)

    of = parameters_of(step)
    program = trace_step(step, (jnp.ones(3), "train", 1.0), {"act": jnp.tanh}, static_of(of, 1, "act"))
    assert program.in_paths == ("x", "rest/0")
    assert program.static[0] == ("mode", "'train'") and program.static[1][0] == "act"
    named = trace_step(step, (jnp.ones(3), "eval"), {"act": jnp.tanh}, static_of(of, (), ("mode", "act")))
    assert named.in_paths == ("x",)
    by_name = trace_step(step, (jnp.ones(3),), {"mode": "eval", "act": jnp.tanh}, static_of(of, (1,), "act"))
    assert by_name.in_paths == ("x",) and [name for name, _ in by_name.static] == ["act", "mode"]


def test_static_position_counted_from_the_end():
    step = lambda x, mode: x * len(mode)  # noqa: E731
    program = trace_step(step, (jnp.ones(3), "train"), static=static_of(parameters_of(step), -1))
    assert program.in_paths == ("x",)


def test_callables():
    class Step:
        def __init__(self, scale):
            self.scale = scale

        def __call__(self, x):
            return x * self.scale

        __hash__ = None

    assert trace_step(functools.partial(train_step, scale=2.0), _arguments()).name == "train_step"
    program = trace_step(Step(jnp.ones(3)), (jnp.ones(3),))
    assert program.name == "Step" and program.in_paths == ("x",)


def _arguments():
    return State({"layers": [layer()]}, jax.ShapeDtypeStruct((), jnp.int32)), {"x": jax.ShapeDtypeStruct((8, 4), F32)}


NO_ARRAYS = {"text": "adam", "function": print, "object": object(), "text array": np.array(["a"]), "large": 2**40}


@pytest.mark.parametrize("leaf", NO_ARRAYS.values(), ids=NO_ARRAYS)
def test_leaf_that_is_no_array(leaf):
    with pytest.raises(TraceError, match=r"argument `state/opt/1` of `step` is not an array") as info:
        trace_step(_step_of_anything(), ({"opt": [1.0, leaf]}, 3))
    assert "static_argnums" in str(info.value) and info.value.path == "state/opt/1"


def _step_of_anything():
    def step(state, n):
        return n

    return step


def test_argument_under_trace():
    with pytest.raises(TraceError, match="argument `n` of `step` is being traced.*\n(.*\n)*.*outside of other"):
        jax.jit(lambda x: trace_step(_step_of_anything(), ({}, x)).num_args)(1.0)
    with pytest.raises(TraceError, match=r"given:  n = a \w+ of float32\[100\]\n"):  # its type, not its numbers
        jax.vmap(lambda x: trace_step(_step_of_anything(), ({}, x)).num_args)(jnp.ones((3, 100)))


def test_without_jit():
    with jax.disable_jit(), pytest.raises(TraceError, match="`step` cannot run without jit(.*\n)*.*__wrapped__"):
        trace_step(_step_of_anything(), ({}, 1.0))


def test_closing_over_a_tracer():
    def outer(x):
        trace_step(lambda y: y * x, (1.0,))

    with pytest.raises(TraceError, match="closes over a traced value(.*\n)*.*as an argument"):
        jax.jit(outer)(2.0)
    with pytest.raises(TraceError, match="closes over a traced value"):
        jax.vmap(outer)(jnp.ones(3))


def test_leaked_tracer():
    leaked = []
    jax.jit(lambda x: leaked.append(x) or x)(1.0)
    with pytest.raises(TraceError, match="closes over a traced value|left over from another trace"):
        trace_step(lambda y: y * leaked[0], (1.0,))
    with pytest.raises(TraceError, match="closes over a traced value|left over from another trace"):
        trace_step(lambda y: jax.grad(jax.jit(lambda y: y * leaked[0]))(y), (1.0,))


def test_own_exceptions_pass_through():
    class MyError(Exception):
        pass

    def step(x):
        raise MyError("mine")

    with pytest.raises(MyError, match="mine"):
        trace_step(step, (1.0,))
    with pytest.raises(jax.errors.TracerBoolConversionError):
        trace_step(lambda x: 1 if x > 0 else 2, (1.0,))
    with pytest.raises(TypeError, match="missing 1 required|missing a required"):
        trace_step(lambda x, y: x, (1.0,))


def test_frameworks():
    equinox = pytest.importorskip("equinox")
    nnx = pytest.importorskip("flax.nnx")
    model = equinox.nn.Linear(3, 4, key=jax.random.key(0))
    program = trace_step(lambda model, x: model(x), (model, jnp.ones(3)))
    assert program.in_paths == ("model/weight", "model/bias", "x")
    graph, state = nnx.split(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
    program = trace_step(lambda state, x: nnx.merge(graph, state)(x), (state, jnp.ones((2, 3))))
    assert program.in_paths == ("state/bias", "state/kernel", "x")


def test_memory_of_the_device_needs_no_warning(recwarn):
    trace_step(lambda x: jax.device_put(x, jax.memory.Space.Device) * 2, (jnp.eye(4),))
    assert not recwarn.list
