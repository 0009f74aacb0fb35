"""The door to JAX's internals: what differs between releases looks the same behind it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from autopar import _jax


def test_find_primitives():
    (dot,) = _jax.find_primitives("dot_general")
    assert dot is _jax.primitives.dot_general_p
    assert _jax.find_primitives("no_such_primitive") == ()
    assert {p.name for p in _jax.find_primitives("sin", "iota_2x32_shape")} == {"sin", "iota_2x32_shape"}


def test_open_and_close():
    closed = jax.make_jaxpr(lambda x: x + jnp.arange(3.0))(1.0)
    jaxpr, consts = _jax.open_jaxpr(closed)
    assert len(jaxpr.constvars) == len(consts) and len(jaxpr.invars) == 1
    flat = _jax.make_jaxpr(jaxpr.invars, jaxpr.invars, [])
    again, none = _jax.open_jaxpr(_jax.close_jaxpr(flat))
    assert again.invars == flat.invars and none == []


def test_scan_counts_and_params():
    def step(w, x):
        return lax.scan(lambda c, row: (c + w, row * 2), w, x)

    jaxpr, _ = _jax.open_jaxpr(jax.make_jaxpr(step)(jnp.ones(4), jnp.ones((3, 4))))
    (eqn,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    assert _jax.scan_counts(eqn.params) == (1, 1)
    body, _ = _jax.open_jaxpr(eqn.params["jaxpr"])
    assert _jax.scan_counts(_jax.scan_params(eqn.params, body, 0, 1)) == (0, 1)


def test_keys():
    key = jax.random.split(jax.random.key(0), 3)
    aval = jax.typeof(key)
    assert _jax.is_key(aval) and not _jax.is_key(jax.typeof(jnp.ones(3)))
    assert _jax.key_impl_name(aval) == "threefry2x32" and _jax.physical_aval(aval).shape == (3, 2)
    assert (_jax.key_data(key) == jax.random.key_data(key)).all()


def test_bind():
    jaxpr, _ = _jax.open_jaxpr(jax.make_jaxpr(lambda x: lax.reduce_sum(x, (0,)))(jnp.ones((3, 4))))
    (eqn,) = jaxpr.eqns
    assert _jax.bind_eqn(eqn, jnp.ones((3, 4)))[0].shape == (4,)
    assert _jax.bind_eqn(eqn, jnp.ones((3, 4)), params={**eqn.params, "axes": (1,)})[0].shape == (3,)


def test_equations_are_keys():
    """Passes keep what they know of an equation under the equation itself: each is equal to itself alone."""
    (first, second) = jax.make_jaxpr(lambda x: (jnp.sin(x), jnp.sin(x)))(1.0).eqns
    assert len({first: 1, second: 2}) == 2 and {first: 1}[first] == 1
