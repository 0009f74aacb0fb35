"""Source lines: the user's own, through the jits of libraries, which are traced once and called from many lines."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar._jax import new_eqn, open_jaxpr, primitives
from autopar.ir.source import UNKNOWN, name_scope, source_line
from autopar.ir.trace.trace import trace_step

X = np.ones((3, 4), np.float32)


def lines(fn, *args):
    """`{primitive: lines relative to the first of fn}` of the flat program."""
    found = {}
    first = inspect.getsourcelines(fn)[1]
    for eqn in trace_step(fn, args).jaxpr.eqns:
        file, rest = source_line(eqn).split(":")
        assert file == "test_source.py"
        found.setdefault(eqn.primitive.name, []).append(int(rest.split(" ")[0]) - first)
    return found


def test_library_jits_point_to_their_caller():
    def step(x):
        a = jax.nn.softmax(x)
        b = jax.nn.softmax(x + 1)
        return jnp.where(a > b, a, b)

    found = lines(step, X)
    assert found["exp"] == [1, 2] and found["select_n"] == [3]


def test_own_jits_point_inside():
    @jax.jit
    def layer(x):
        return jnp.sin(x)

    def step(x):
        return layer(layer(x))

    assert lines(step, X)["sin"] == [inspect.getsourcelines(layer)[1] + 2 - inspect.getsourcelines(step)[1]] * 2


def test_random_bits_point_to_their_caller():
    def step(key, x):
        first = jax.random.bernoulli(key, 0.5, x.shape)
        return first & jax.random.bernoulli(jax.random.fold_in(key, 1), 0.5, x.shape)

    assert set(lines(step, jax.random.key(0), X)["threefry2x32"]) == {1, 2}


def test_bodies_and_gradients():
    def step(w, x):
        def body(x, w):
            return jnp.tanh(x @ w), None

        return jax.grad(lambda w: lax.scan(body, x, w)[0].sum())(w)

    program = trace_step(step, (np.ones((2, 4, 4), np.float32), X))
    forward, backward = [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "scan"]
    for eqn in (forward, backward):
        for inner in open_jaxpr(eqn.params["jaxpr"])[0].eqns:
            assert source_line(inner).endswith("(body)"), inner
    assert name_scope(backward).startswith("transpose(jvp(")


def test_bodies_that_jax_wraps():
    def step(x):
        x = lax.map(lambda row: jnp.sin(row), x)
        return lax.fori_loop(
            0,
            3,
            lambda i, x: jnp.sort(x),
            x,
        )

    bodies = {}
    for eqn in trace_step(step, (X,)).jaxpr.eqns:
        for inner in open_jaxpr(eqn.params["jaxpr"])[0].eqns:
            bodies[inner.primitive.name] = source_line(inner)
    first = inspect.getsourcelines(step)[1]
    assert bodies["sin"] == f"test_source.py:{first + 1} (<lambda>)"
    assert bodies["sort"] == f"test_source.py:{first + 5} (<lambda>)"


def test_of_a_library_the_own_call():
    def step(params, grads):
        updates, _ = optax.sgd(0.1).update(grads, optax.sgd(0.1).init(params))
        return optax.apply_updates(params, updates)

    import optax

    assert lines(step, X, X)["mul"] == [1]


def test_typed_at_a_prompt():
    space = {}
    exec(compile("import jax.numpy as jnp\ndef step(x):\n    return jnp.sin(x)", "<stdin>", "exec"), space)
    (eqn,) = trace_step(space["step"], (X,)).jaxpr.eqns
    assert source_line(eqn) == "<stdin>:3 (step)"


def test_unknown():
    assert source_line(new_eqn(primitives.sin_p, [], [], {})) == UNKNOWN
