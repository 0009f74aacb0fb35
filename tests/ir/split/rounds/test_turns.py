"""Loops whose turns are training steps: each turn goes through its own batch in microbatches."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from autopar._jax import eval_jaxpr
from autopar.errors import MicrobatchError
from autopar.ir.check import check_program
from autopar.ir.gradient import is_backward
from autopar.ir.region import equations_within
from autopar.ir.split.rounds.rounds import accumulate_in_rounds
from tests.ir.split.cases import Case, Tree, assert_same, cases_in_parts, descend, full_batch, mlp, squares, traced


def critics(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """A critic is trained three times, with noise of its own each time; then, on the same batch, what it judges."""

    def loss(judge, params, noise):
        return (jnp.tanh(mlp(params, batch["x"]) @ judge + noise) ** 2).mean() - (batch["y"] @ judge).mean()

    def turn(judge, key):
        noise = jax.random.normal(key, (len(batch["x"]), 1))
        value, grads = jax.value_and_grad(loss)(judge, state["params"], noise)
        return judge - 0.1 * grads, value

    judge, values = jax.lax.scan(turn, jnp.ones((4, 1)), jax.random.split(jax.random.key(1), 3))
    value, grads = jax.value_and_grad(lambda params: -loss(judge, params, 0.0))(state["params"])
    return {**state, "params": descend(state["params"], grads)}, {"loss": value, "judged": values}


def epochs(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """Two epochs over shuffled minibatches of four, whose weights are divided by their own mean."""

    def loss(params, part):
        return (part["weight"] / part["weight"].mean() * squares(params, part)).mean()

    def turn(params, part):
        value, grads = jax.value_and_grad(loss)(params, part)
        return descend(params, grads), value

    def epoch(params, key):
        order = jax.random.permutation(key, len(batch["x"]))
        parts = jax.tree.map(lambda x: x[order].reshape(-1, 4, *x.shape[1:]), batch)
        return jax.lax.scan(turn, params, parts)

    params, values = jax.lax.scan(epoch, state["params"], jax.random.split(jax.random.key(0), 2))
    return {**state, "params": params}, {"loss": values.mean()}


def until_good(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """Descent in a `while`, until the loss is small or the turns are over."""

    def turn(carry):
        number, params, _ = carry
        value, grads = jax.value_and_grad(lambda params: squares(params, batch).mean())(params)
        return number + 1, descend(params, grads), value

    goes_on = lambda carry: (carry[0] < 5) & (carry[2] > 1e-3)  # noqa: E731
    number, params, value = jax.lax.while_loop(goes_on, turn, (0, state["params"], jnp.float32(jnp.inf)))
    return {**state, "params": params}, {"loss": value, "turns": number}


def line_search(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """The gradient is taken where the last step has not left it; then the stride is halved until the loss is smaller."""

    def taken(params):
        return jax.value_and_grad(lambda params: squares(params, batch).mean())(params)

    stale = (jnp.float32(jnp.inf), jax.tree.map(jnp.zeros_like, state["params"]))
    value, grads = jax.lax.cond(jnp.isinf(stale[0]), taken, lambda _: stale, state["params"])

    def turn(carry):
        stride, _, _ = carry
        there, slope = taken(jax.tree.map(lambda p, g: p - stride * g, state["params"], grads))
        falls = sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(slope), jax.tree.leaves(grads), strict=True))
        return jnp.where(falls > 0, stride, stride / 2), there, there <= value

    goes_on = lambda carry: ~carry[2] & (carry[0] > 1e-3)  # noqa: E731
    stride, there, _ = jax.lax.while_loop(goes_on, turn, (jnp.float32(4), value, False))
    return {**state, "params": jax.tree.map(lambda p, g: p - stride * g, state["params"], grads)}, {"loss": there}


def backtracking(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """The stride is halved until the loss is smaller by a part of what the gradient promises; no turn takes a gradient."""
    loss_of = lambda params: squares(params, batch).mean()  # noqa: E731
    value, grads = jax.value_and_grad(loss_of)(state["params"])
    slope = sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads))
    moved = lambda stride: jax.tree.map(lambda p, g: p - stride * g, state["params"], grads)  # noqa: E731
    too_far = lambda stride: (loss_of(moved(stride)) > value - 0.9 * stride * slope) & (stride > 1e-4)  # noqa: E731
    stride = jax.lax.while_loop(too_far, lambda stride: stride / 2, jnp.float32(4))
    return {**state, "params": moved(stride)}, {"loss": value, "stride": stride}


def normed(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """Batch statistics in every layer of a turn."""

    def loss(params):
        x = batch["x"]
        for _ in range(8):
            x = jnp.tanh(x @ params["w1"] @ params["w2"] @ params["w2"].T @ params["w1"].T)
            x = (x - x.mean(0)) / (x.std(0) + 1e-3)
        return (x**2).mean()

    params, _ = jax.lax.scan(lambda p, _: (descend(p, jax.grad(loss)(p)), None), state["params"], None, length=2)
    return {**state, "params": params}, {"loss": jnp.zeros(())}


CASES = {
    "critics": Case(critics),
    "epochs": Case(epochs),
    "until good": Case(until_good),
    "line search": Case(line_search),
    "backtracking": Case(backtracking),
}


@cases_in_parts(CASES)
def test_equal(case, count):
    program, batch = traced(case)
    flat = accumulate_in_rounds(program.jaxpr, count, batch)
    check_program(flat)
    run = jax.jit(lambda *args: eval_jaxpr(flat, (), *args))
    found = program.unflatten_outputs(run(*program.flatten_inputs(jax.tree.leaves((case.state(), case.batch())))))
    assert_same(found, full_batch(case))


@pytest.mark.parametrize("case, rows, times", [("epochs", 4, 4), ("backtracking", 8, 11)])
def test_products_are_of_microbatches(case, rows, times):
    """No product of a turn has more rows than a microbatch of a minibatch; there are as many of them."""
    program, batch = traced(CASES[case])

    def rows_of_products(jaxpr):
        """Of products with the first weights, how many rows each has, and how often it runs."""
        found = Counter()
        for eqn, times in equations_within(jaxpr):
            if eqn.primitive.name == "dot_general" and eqn.invars[1].aval.shape == (16, 16) and not is_backward(eqn):
                found[eqn.outvars[0].aval.shape[0]] += times
        return found

    whole, split = rows_of_products(program.jaxpr), rows_of_products(accumulate_in_rounds(program.jaxpr, 2, batch))
    assert whole == {rows: times} and split == {rows // 2: 2 * times}


def test_what_no_turn_can_split_is_refused():
    program, batch = traced(Case(normed))
    with pytest.raises(MicrobatchError, match="batch statistics"):
        accumulate_in_rounds(program.jaxpr, 2, batch)


def test_rows_that_do_not_divide():
    """Minibatches of four rows have no eight parts."""
    program, batch = traced(CASES["epochs"])
    with pytest.raises(MicrobatchError, match="divide into 8 microbatches") as caught:
        accumulate_in_rounds(program.jaxpr, 8, batch)
    assert "test_turns.py" in caught.value.given
