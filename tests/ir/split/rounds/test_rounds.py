"""Where samples wait for what all of them make, a first loop over microbatches makes it: equal to the whole batch at once."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from autopar._jax import eval_jaxpr
from autopar.errors import MicrobatchError
from autopar.ir.check import check_program
from autopar.ir.split.rounds.rounds import accumulate_in_rounds
from tests.ir.split.cases import Case, Tree, assert_same, cases_in_parts, full_batch, mlp, sgd, squares, traced
from tests.ir.split.losses import normalized_head_loss, root_loss
from tests.ir.traced import evaluate


def contrastive_loss(params: Tree, batch: Tree) -> jax.Array:
    """Each sample against all others, in both directions."""
    z = mlp(params, batch["x"])
    logits = z @ jnp.roll(z, 1, axis=1).T
    labels = jnp.arange(len(z))
    rows, columns = (optax.softmax_cross_entropy_with_integer_labels(x, labels) for x in (logits, logits.T))
    return (rows + columns).mean()


def matched_loss(params: Tree, batch: Tree) -> jax.Array:
    """Each sample against all of another view."""
    one, other = (jnp.tanh(batch[view] @ params["w"]) @ params["v"] for view in "xy")
    logits = one @ other.T / 20
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(logits))).mean()


def best_classes_loss(params: Tree, batch: Tree) -> jax.Array:
    """What each sample has most of, against all others; where it has it, by itself: of one equation, one result is joint."""
    most, at = lax.top_k(mlp(params, batch["x"]), 2)
    rows = optax.softmax_cross_entropy_with_integer_labels(most @ most[:, ::-1].T, jnp.arange(len(most)))
    return rows.mean() + (batch["y"][:, :2] * at).mean()


def redundancy_loss(params: Tree, batch: Tree) -> jax.Array:
    """What each sample has, of mean 0 and deviation 1 over the samples, is to be uncorrelated."""
    z = mlp(params, batch["x"])
    z = (z - z.mean(0)) / z.std(0)
    return ((z.T @ jnp.roll(z, 1, axis=1) / len(z) - jnp.eye(z.shape[1])) ** 2).sum()


def overlap_and_entropy_loss(params: Tree, batch: Tree) -> jax.Array:
    """Segmentation: one minus the overlap of all samples together, class by class, and the entropy of those that count."""
    logits, target = mlp(params, batch["x"]), jax.nn.softmax(batch["y"])
    counts, shares = batch["y"][:, 0] > 0, jax.nn.softmax(logits)
    overlap = (2 * (shares * target).sum(0) + 1) / (shares.sum(0) + target.sum(0) + 1)
    entropy = optax.softmax_cross_entropy(logits, target)
    return (entropy * counts).sum() / jnp.maximum(counts.sum(), 1) + (1 - overlap).mean()


def sharpness_aware(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """A gradient where another has led."""
    params = state["params"]
    grads = jax.grad(squares_mean)(params, batch)
    scale = 0.05 / optax.global_norm(grads)
    ahead = jax.tree.map(lambda p, g: p + scale * g, params, grads)
    value, grads = jax.value_and_grad(squares_mean)(ahead, batch)
    return {**state, "params": jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)}, {"loss": value}


def squares_mean(params: Tree, batch: Tree) -> jax.Array:
    return squares(params, batch).mean()


def two_players(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """The second is trained against the first as it is after its own update."""
    params = state["params"]

    def judged(judge, made):
        return jnp.tanh(made @ judge).mean()

    def first(judge):
        return judged(judge, mlp(params, batch["x"])) - judged(judge, batch["y"])

    judge = params["w2"].T @ params["w2"]
    judge = judge - 0.1 * jax.grad(first)(judge)
    value, grads = jax.value_and_grad(lambda p: -judged(judge, mlp(p, batch["x"])))(params)
    return {**state, "params": jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)}, {"loss": value}


def drawn_players(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """The second is trained on samples that are drawn for it, and never meet the batch."""
    params, drawn = state["params"], jax.random.normal(jax.random.key(0), batch["x"].shape)
    judge = params["w2"].T @ params["w2"]
    judge = judge - 0.1 * jax.grad(lambda judge: jnp.tanh(batch["y"] @ judge).mean())(judge)
    value, grads = jax.value_and_grad(lambda p: -jnp.tanh(mlp(p, drawn) @ judge).mean())(params)
    return {**state, "params": jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)}, {"loss": value}


def extragradient(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """The gradient of a look ahead, in which each layer goes by its own gradient, so that each waits for another sum."""
    params = state["params"]
    ahead = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(squares_mean)(params, batch))
    value, grads = jax.value_and_grad(squares_mean)(ahead, batch)
    return {**state, "params": jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)}, {"loss": value}


def measured_after(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """The loss with the new parameters is returned, beside the old one."""
    value, grads = jax.value_and_grad(squares_mean)(state["params"], batch)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
    return {**state, "params": params}, {"loss": value, "after": squares_mean(params, batch)}


CASES = {
    "extragradient": (Case(extragradient), 2),
    "measured after": (Case(measured_after), 2),
    "contrastive": (Case(sgd(contrastive_loss)), 2),
    "best classes": (Case(sgd(best_classes_loss)), 2),
    "overlap and entropy": (Case(sgd(overlap_and_entropy_loss)), 2),
    "redundancy": (Case(sgd(redundancy_loss)), 2),
    "normalized": (Case(sgd(normalized_head_loss)), 2),
    "sharpness-aware": (Case(sharpness_aware), 2),
    "two players": (Case(two_players), 2),
    "drawn players": (Case(drawn_players), 2),
    "root of the mean": (Case(sgd(root_loss)), 2),
}


def loops_of(jaxpr):
    return [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]


@cases_in_parts({name: case for name, (case, _) in CASES.items()})
def test_equal(case, count):
    rounds = next(rounds for each, rounds in CASES.values() if each is case)
    program, batch = traced(case)
    flat = accumulate_in_rounds(program.jaxpr, count, batch)
    check_program(flat)
    loops = [eqn for eqn in loops_of(flat) if eqn.params["length"] == count]
    assert len(loops) == rounds
    assert_same(run(case, program, flat), full_batch(case))


def run(case, program, flat):
    step = jax.jit(lambda *args: eval_jaxpr(flat, (), *args))
    return program.unflatten_outputs(step(*program.flatten_inputs(jax.tree.leaves((case.state(), case.batch())))))


def matched_params(width: int = 8) -> Tree:
    random = np.random.default_rng(0)
    return {name: jnp.asarray(random.normal(size=(width, width)), jnp.float32) for name in "wv"}


def matched_views(rows: int = 32, width: int = 8) -> Tree:
    random = np.random.default_rng(1)
    return {name: jnp.asarray(random.normal(size=(rows, width)), jnp.float32) for name in "xy"}


def test_pairs_have_no_statistics():
    """Their loss is that of all samples; where each microbatch may use its own sums, its gradient is still that loss's."""
    case = Case(sgd(matched_loss), matched_params, batch=matched_views)
    program, batch = traced(case)
    flat = accumulate_in_rounds(program.jaxpr, 4, batch, per_microbatch=True)
    assert_same(run(case, program, flat), full_batch(case))


def counted_pairs_loss(params: Tree, batch: Tree) -> jax.Array:
    """Of pairs of one class, of which the backward pass reads how many there are."""
    z = batch["x"]
    for name in "wvwv":
        z = jnp.tanh(z @ params[name] / 4)
    is_first = batch["y"][:, 0] > 0.5
    same = is_first[:, None] == is_first
    return -jnp.where(same, jax.nn.log_softmax(z @ z.T, 1), 0).sum() / same.sum()


def test_counted_pairs_have_no_statistics():
    case = Case(sgd(counted_pairs_loss), partial(matched_params, 32), batch=partial(matched_views, 32, 32))
    program, batch = traced(case)
    flat = accumulate_in_rounds(program.jaxpr, 4, batch, per_microbatch=True)
    assert_same(run(case, program, flat), full_batch(case))


def normalized_matched_loss(params: Tree, batch: Tree, parts: int = 1, width: int = 24) -> jax.Array:
    """Of encoders with batch statistics, which each of `parts` of the batch has of its own."""

    def encoded(rows: jax.Array) -> jax.Array:
        h = jnp.tile(rows @ params["w"], 3)[:, :width]
        return jnp.tanh((h - h.mean(0)) / jnp.sqrt(h.var(0) + 0.1)) @ jnp.tile(params["v"], (3, 1))[:width]

    one, other = (jnp.concatenate([encoded(rows) for rows in jnp.split(batch[view], parts)]) for view in "xy")
    return optax.softmax_cross_entropy_with_integer_labels(one @ other.T / 20, jnp.arange(len(one))).mean()


def test_pairs_behind_local_statistics():
    """The loss is that of all pairs; what a microbatch has of its own is the statistics, in its gradient, too."""
    case = Case(sgd(normalized_matched_loss), matched_params, batch=matched_views)
    program, batch = traced(case)
    flat = accumulate_in_rounds(program.jaxpr, 4, batch, per_microbatch=True)
    assert_same(
        run(case, program, flat), jax.jit(sgd(partial(normalized_matched_loss, parts=4)))(case.state(), case.batch())
    )


def test_pairs_as_many_as_statistics_are_refused():
    case = Case(sgd(partial(normalized_matched_loss, width=16)), matched_params, batch=lambda: matched_views(16))
    program, batch = traced(case)
    with pytest.raises(MicrobatchError, match="(?s)which gradient.*cannot be told.*not the number of statistics"):
        accumulate_in_rounds(program.jaxpr, 4, batch, per_microbatch=True)


def test_not_in_every_layer():
    """As many rounds as layers would do most of the work again and again."""

    def loss(params, batch):
        x = batch["x"]
        for _ in range(8):
            x = jnp.tanh(x @ params["w1"] @ params["w2"] @ params["w2"].T @ params["w1"].T)
            x = (x - x.mean(0)) / (x.std(0) + 1e-3)
        return (x**2).mean()

    program, batch = traced(Case(sgd(loss)))
    with pytest.raises(MicrobatchError, match="batch statistics"):
        accumulate_in_rounds(program.jaxpr, 2, batch)


def test_not_where_nothing_is_left():
    """All pairs of samples are the work; to make the samples first would leave all of it before the loop."""

    def loss(params, batch):
        return jnp.tanh(batch["x"][:, None] - batch["x"][None] + params["w1"][0, 0]).mean()

    program, batch = traced(Case(sgd(loss)))
    with pytest.raises(MicrobatchError, match="all of the samples"):
        accumulate_in_rounds(program.jaxpr, 2, batch)


def test_what_is_seen_outside_happens_once():
    """Both rounds need the losses of the samples; what a callback is told of them, it is told once."""
    seen = []

    def loss(params, batch):
        each = squares(params, batch)
        jax.debug.callback(lambda x: seen.append(float(x)), each.sum())
        return jnp.sqrt(each.mean())

    case = Case(sgd(loss))
    program, batch = traced(case)
    flat = accumulate_in_rounds(program.jaxpr, 2, batch)
    assert len(loops_of(flat)) == 2
    evaluate(flat, *program.flatten_inputs(jax.tree.leaves((case.state(), case.batch()))))
    jax.effects_barrier()
    np.testing.assert_allclose(seen, [squares(case.state()["params"], case.batch()).sum()], rtol=1e-5)
