"""What equations need, read, and are needed by."""

import jax
import jax.numpy as jnp

from autopar._jax import eval_jaxpr, make_jaxpr
from autopar.ir.build import flat_function
from autopar.ir.dataflow import ancestors, inputs_of, makers, needed, read_by, readers_of, with_makers

X = jax.ShapeDtypeStruct((3,), jnp.float32)


def program():
    """`sin`, `cos` of it, `exp` of the input, `add` of the last two, `tan` of nothing that anyone reads."""

    def function(x):
        a = jnp.cos(jnp.sin(x))
        return a + jnp.exp(x), jnp.tan(a)

    return flat_function(function, X)


def names(eqns):
    return [eqn.primitive.name for eqn in eqns]


def by_name(jaxpr):
    return {eqn.primitive.name: eqn for eqn in jaxpr.eqns}


def test_needed():
    jaxpr, eqn = program(), by_name(program())
    assert names(needed(jaxpr.eqns, [jaxpr.outvars[0]])) == ["sin", "cos", "exp", "add"]
    at_hand = [by_name(jaxpr)["cos"].outvars[0]]
    assert names(needed(jaxpr.eqns, [jaxpr.outvars[0]], given=at_hand)) == ["exp", "add"]
    assert names(needed(jaxpr.eqns, [])) == [] and set(eqn) == {"sin", "cos", "exp", "add", "tan"}


def test_readers():
    jaxpr = program()
    eqn, readers = by_name(jaxpr), readers_of(jaxpr.eqns)
    assert readers[jaxpr.invars[0]] == [eqn["sin"], eqn["exp"]]
    assert readers[eqn["cos"].outvars[0]] == [eqn["add"], eqn["tan"]]
    assert eqn["tan"].outvars[0] not in readers
    assert list(read_by([eqn["add"]])) == inputs_of(eqn["add"])


def test_ancestors():
    jaxpr = program()
    made_by = makers(jaxpr.eqns)
    behind = ancestors([jaxpr.outvars[1]], lambda var: inputs_of(made_by[var]) if var in made_by else ())
    assert jaxpr.invars[0] in behind and by_name(jaxpr)["exp"].outvars[0] not in behind


def test_with_makers():
    """Equations with those that make what they read, in the order of the program; those that have run are left out."""
    jaxpr = program()
    eqn, order = by_name(jaxpr), {eqn: k for k, eqn in enumerate(jaxpr.eqns)}
    made = with_makers([eqn["add"]], [], makers(jaxpr.eqns), order)
    assert names(made) == ["sin", "cos", "exp", "add"]
    assert names(with_makers([eqn["add"]], [], makers(jaxpr.eqns), order, made[:2])) == ["exp", "add"]
    x = jnp.arange(3.0)
    (value,) = eval_jaxpr(make_jaxpr(jaxpr.invars, jaxpr.outvars[:1], made), (), x)
    assert jnp.allclose(value, jnp.cos(jnp.sin(x)) + jnp.exp(x))
