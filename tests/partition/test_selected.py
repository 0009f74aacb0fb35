"""The gradient of max pooling, as GPUs run it: the same numbers, and nothing begins before there is something to add."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar._jax import bind_eqn
from autopar.partition.selected import add_to_selected


@pytest.mark.parametrize("sides", ["SAME", "VALID", ((0, 0), (2, 1), (1, 0), (0, 0))], ids=str)
@pytest.mark.parametrize("reduce, first", [(jax.lax.max, -jnp.inf), (jax.lax.min, jnp.inf)], ids=["max", "min"])
def test_added_to_what_windows_select(reduce, first, sides):
    """Also where windows hold nothing but what is beyond the border."""

    def pool(x):
        return jax.lax.reduce_window(x, first, reduce, (1, 3, 3, 1), (1, 2, 2, 1), sides)

    x = jax.random.normal(jax.random.key(0), (2, 9, 8, 3))
    x = jnp.where(x * jnp.sign(first) > 1, first, x)
    source = jax.random.normal(jax.random.key(1), pool(x).shape)
    program = jax.make_jaxpr(lambda x, source: jax.vjp(pool, x)[1](source))(x, source)
    (eqn,) = (eqn for eqn in program.eqns if eqn.primitive.name == "select_and_scatter_add")
    np.testing.assert_array_equal(add_to_selected(eqn, source, x), bind_eqn(eqn, source, x)[0])

    run = jax.make_jaxpr(lambda source, x: add_to_selected(eqn, source, x))(source, x)
    waiting = {run.jaxpr.invars[0]}
    for step in run.eqns:
        if step.primitive.name in ("pad", "select_and_scatter"):
            assert step.invars[-1] in waiting  # the scalar that it begins with
        if not waiting.isdisjoint(v for v in step.invars if isinstance(v, type(run.jaxpr.invars[0]))):
            waiting.update(step.outvars)
