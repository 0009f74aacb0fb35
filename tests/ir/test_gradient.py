"""Which pass an equation belongs to, and what waits for which pass."""

import jax
import jax.numpy as jnp

from autopar.ir.build import flat_function
from autopar.ir.gradient import after_gradients, feeds_backward, is_ahead, is_backward, is_recomputed, made_by_backward
from autopar.ir.trace.trace import trace_step

X = jnp.ones((4, 4))


def descent(x):
    """A gradient, a value that is made of it, and one that is made of the loss alone."""
    value, gradient = jax.value_and_grad(lambda x: jnp.sin(x).sum())(x)
    return x - gradient, jnp.exp(value)


def by_name(jaxpr, flags):
    return dict(zip([eqn.primitive.name for eqn in jaxpr.eqns], flags, strict=True))


def test_a_gradient_in_the_loss_is_forward():
    """Forces, gradient penalties, inner steps: of these only what differentiates them again is the backward pass."""

    def loss(w, x):
        energy = lambda row: jnp.tanh(row @ w).sum()  # noqa: E731
        return jnp.sin(jax.vmap(jax.grad(energy))(x)).sum()

    eqns = trace_step(jax.value_and_grad(loss), (X.T @ X, X)).jaxpr.eqns
    backward = [is_backward(eqn) for eqn in eqns]
    names = [eqn.primitive.name for eqn in eqns]
    assert [names[k] for k in range(len(eqns)) if not backward[k]].count("dot_general") == 2
    assert backward == sorted(backward) and not backward[names.index("sin")] and backward[-1]


def test_what_gradients_wait_for():
    """All that the loss is made of, but no update; and what waits for them is the update alone."""
    jaxpr = flat_function(descent, X)
    matters, behind = by_name(jaxpr, feeds_backward(jaxpr)), by_name(jaxpr, after_gradients(jaxpr))
    assert matters["cos"] and matters["mul"] and not matters["sub"] and not matters["exp"]
    assert behind["sub"] and not behind["exp"] and not behind["mul"]


def test_what_is_made_behind():
    """What the backward pass makes, and what is made of that."""
    jaxpr = flat_function(descent, X)
    made = {eqn.primitive.name for eqn in jaxpr.eqns for var in eqn.outvars if var in made_by_backward(jaxpr)}
    assert {"mul", "sub"} <= made and made.isdisjoint({"sin", "exp"})


def test_what_remat_computes_again():
    """The second run of a body is of neither pass by its own name; JAX's scope tells it."""

    def loss(w):
        return jax.checkpoint(lambda w: jnp.sin(jnp.tanh(w)))(w).sum()

    eqns = trace_step(jax.value_and_grad(loss), (X,)).jaxpr.eqns
    tanhs = [eqn for eqn in eqns if eqn.primitive.name == "tanh"]
    assert [is_recomputed(eqn) for eqn in tanhs] == [False, True]
    assert is_ahead(tanhs[0]) and any(is_backward(eqn) for eqn in eqns)
