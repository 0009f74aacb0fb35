"""Sums over samples are made once, by the forward pass, outside of its loops over layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar._jax import Jaxpr, JaxprEqn, Var
from autopar.ir.region import equations_within, kind_of, region_of
from autopar.ir.signature import ValueNumbers
from autopar.ir.split.rounds.forward_sums import with_forward_sums
from tests.ir.traced import evaluate, traced

LAYERS, ROWS, WIDTH = 3, 4, 2
X = np.linspace(-1, 1, ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
KERNELS = np.linspace(-1, 1, LAYERS * WIDTH * WIDTH, dtype=np.float32).reshape(LAYERS, WIDTH, WIDTH)


def sums_over_rows(jaxpr: Jaxpr):
    """Whether a value is the sum of the rows of an array of samples, as the policy would know."""
    found: set[Var] = set()
    for eqn, _ in equations_within(jaxpr):
        if eqn.primitive.name == "reduce_sum" and eqn.invars[0].aval.shape == (ROWS, WIDTH):
            found.update(eqn.outvars)
    return found.__contains__


def same(one: Jaxpr, other: Jaxpr, *arguments: np.ndarray) -> None:
    for a, b in zip(evaluate(one, *arguments), evaluate(other, *arguments), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def scans(jaxpr: Jaxpr) -> list[JaxprEqn]:
    return [eqn for eqn in jaxpr.eqns if kind_of(eqn) == "scan"]


def layers(x, kernels):
    """The balance of a layer is a product of two sums."""

    def layer(x, kernel):
        x = jnp.tanh(x @ kernel)
        return x, (x.sum(0) * jnp.cos(x).sum(0)).sum()

    x, balance = jax.lax.scan(layer, x, kernels)
    return x, balance


def test_what_is_made_of_sums_alone_is_made_behind_the_scan():
    jaxpr = traced(layers, X, KERNELS)
    better = with_forward_sums(jaxpr, sums_over_rows(jaxpr))
    same(jaxpr, better, X, KERNELS)
    (before,), (after,) = scans(jaxpr), scans(better)
    made = [eqn.primitive.name for eqn in region_of(after).bodies[0].eqns]
    assert "mul" in [eqn.primitive.name for eqn in region_of(before).bodies[0].eqns] and "mul" not in made
    assert sorted(b.result.aval.shape for b in region_of(after).ys) == [(LAYERS, WIDTH)] * 2
    assert "mul" in [eqn.primitive.name for eqn in better.eqns]


def test_a_sum_over_the_trips_ends_behind_the_scan():
    def step(x, kernels):
        def head(total, kernel):
            h = jnp.tanh(x @ kernel)
            return total + h.sum(0) * jnp.cos(h).sum(0), None

        return jax.lax.scan(head, jnp.ones(WIDTH), kernels)[0]

    jaxpr = traced(step, X, KERNELS)
    better = with_forward_sums(jaxpr, sums_over_rows(jaxpr))
    same(jaxpr, better, X, KERNELS)
    (after,) = scans(better)
    assert not region_of(after).carries and len(region_of(after).ys) == 2


@pytest.mark.parametrize("how", ["has two terms", "passes a barrier beside others"])
def test_a_sum_over_the_trips_stays_in_the_scan_if_it(how):
    def step(x, kernels):
        def head(total, kernel):
            if how != "has two terms":
                total, kernel = jax.lax.optimization_barrier((total, kernel))
            h = jnp.tanh(x @ kernel)
            total = total + h.sum(0) if how == "has two terms" else total
            return total + h.sum(0) * jnp.cos(h).sum(0), None

        return jax.lax.scan(head, jnp.ones(WIDTH), kernels)[0]

    jaxpr = traced(step, X, KERNELS)
    assert with_forward_sums(jaxpr, sums_over_rows(jaxpr)) is jaxpr


@pytest.mark.parametrize("used", ["by rows", "by the next trip"])
def test_what_a_trip_reads_of_its_sums_stays_in_it(used):
    def step(x, kernels):
        def layer(x, kernel):
            x = jnp.tanh(x @ kernel)
            scale = x.sum(0) * jnp.cos(x).sum(0)
            return x * scale if used == "by rows" else x + scale.sum(), None

        return jax.lax.scan(layer, x, kernels)[0]

    jaxpr = traced(step, X, KERNELS)
    assert with_forward_sums(jaxpr, sums_over_rows(jaxpr)) is jaxpr


@pytest.mark.parametrize("by_scan", [False, True], ids=["by itself", "in a scan"])
def test_a_sum_that_remat_makes_again_is_the_first_one(by_scan):
    def layer(x, kernel):
        x = jnp.tanh(x @ kernel)
        return x, (x.sum(0) * jnp.cos(x).sum(0)).sum()

    def loss(x, kernels):
        again = jax.checkpoint(layer)
        x, balance = jax.lax.scan(again, x, kernels) if by_scan else again(x, kernels[0])
        return (x**2).sum() + balance.sum()

    def num_sums(jaxpr: Jaxpr) -> int:
        every = (eqn for eqn, _ in equations_within(jaxpr) if eqn.primitive.name == "reduce_sum")
        return sum(eqn.invars[0].aval.shape == (ROWS, WIDTH) and eqn.outvars[0].aval.shape != () for eqn in every)

    jaxpr = traced(jax.value_and_grad(loss, 1), X, KERNELS)
    better = with_forward_sums(jaxpr, sums_over_rows(jaxpr))
    same(jaxpr, better, X, KERNELS)
    assert (num_sums(jaxpr), num_sums(better)) == (4, 2)


def test_names_of_values_of_literals_do_not_grow():
    """Of sums with themselves: a name that held how they are made would double with each, and hashing it take as long."""

    def doubled(x):
        total = jnp.full(WIDTH, 0.5)
        for _ in range(12):
            total = total + total
        return x + total

    jaxpr = traced(doubled, X)
    one = ValueNumbers()
    other = ValueNumbers(numbers=one.numbers)
    for eqn in jaxpr.eqns:
        one.visit(eqn)
        other.visit(eqn)
    *_, last, _ = jaxpr.eqns
    assert one.of(last.outvars[0]) == other.of(last.outvars[0]) and len(repr(one.name)) < 200 * len(jaxpr.eqns)
