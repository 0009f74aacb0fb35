"""Samples behind samples: of each block a microbatch has its part."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax import lax

from autopar.ir.split.placement import Split
from tests.ir.split.cases import (
    BATCH,
    CLASSES,
    WIDTH,
    Case,
    Tree,
    assert_equals_full_batch,
    cases_in_parts,
    descend,
    language_params,
    mlp,
    mlp_params,
    old_key,
    sgd,
    sgd_of_state,
    split_case,
    typed_key,
)
from tests.ir.split.models import layered_params, scanned_loss


def two_views_loss(params: Tree, batch: Tree) -> jax.Array:
    first, second = jnp.split(mlp(params, jnp.concatenate([batch["x"], 2 * batch["x"]])), 2)
    return ((first - second) ** 2).mean()


def three_blocks_loss(params: Tree, batch: Tree) -> jax.Array:
    """Some blocks are sliced off, one is found by its number, and all are reduced together."""
    z = mlp(params, jnp.concatenate([batch["x"], 2 * batch["x"], -batch["x"]]))
    middle = z.reshape(3, -1, CLASSES)[1]
    return (z[:BATCH] ** 2).mean() + (z[BATCH:] ** 3).sum() / BATCH + (middle * batch["y"]).mean() + z.max(-1).mean()


def preference_loss(params: Tree, batch: Tree) -> jax.Array:
    """DPO: chosen and rejected sentences in one call, with one mask for both."""
    tokens = jnp.concatenate([batch["tokens"], batch["targets"]])
    logits = jnp.tanh(params["embed"][tokens] @ params["w"]) @ params["out"]
    scores = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)[..., 0]
    chosen, rejected = jnp.split((scores * jnp.tile(batch["words"], (2, 1))).sum(-1), 2)
    return -jax.nn.log_sigmoid(chosen - rejected).mean()


def teacher_step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """Two views; each is compared with what the moving average of the student makes of the other."""
    first, second = batch["x"], batch["x"][:, ::-1]

    def loss(params: Tree) -> jax.Array:
        targets = jax.nn.softmax(mlp(state["teacher"], jnp.concatenate([first, second])))
        return -(targets * jax.nn.log_softmax(mlp(params, jnp.concatenate([second, first])))).sum(-1).mean()

    value, grads = jax.value_and_grad(loss)(state["params"])
    params = descend(state["params"], grads)
    return {"params": params, "teacher": optax.incremental_update(params, state["teacher"], 0.1)}, {"loss": value}


def two_dropouts_loss(params: Tree, state: Tree, batch: Tree) -> jax.Array:
    x = jnp.concatenate([batch["x"], batch["x"]])
    kept = jnp.where(jax.random.bernoulli(state["key"], 0.7, x.shape), x, 0)
    first, second = jnp.split(mlp(params, kept), 2)
    return ((first - second) ** 2).mean()


def two_dropouts_each_loss(params: Tree, state: Tree, batch: Tree) -> jax.Array:
    """A key for each row."""
    x = jnp.concatenate([batch["x"], batch["x"]])
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, (WIDTH,)))(jax.random.split(state["key"], len(x)))
    return (mlp(params, jnp.where(keep, x, 0)) ** 2).mean()


def blocks_by_layers_loss(params: Tree, batch: Tree) -> jax.Array:
    z = scanned_loss(
        params, {**batch, "x": jnp.concatenate([batch["x"], 2 * batch["x"]]), "y": jnp.tile(batch["y"], (2, 1))}
    )
    return z.mean()


def blocks_by_rows_loss(params: Tree, batch: Tree) -> jax.Array:
    """Trip by trip, over all blocks."""
    x = jnp.concatenate([batch["x"], 2 * batch["x"]])
    return lax.map(lambda row: (mlp(params, row) ** 2).sum(), x).mean()


def time_first_loss(params: Tree, batch: Tree) -> jax.Array:
    """A sequence of batches in one dim: as many blocks as there are places."""
    h = params["embed"][batch["tokens"].T.reshape(-1)]
    logits = jnp.tanh(h @ params["w"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"].T.reshape(-1)).mean()


def blocks_step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """What is made of all rows is returned in their order."""

    def loss(params: Tree) -> tuple[jax.Array, jax.Array]:
        z = mlp(params, jnp.concatenate([batch["x"], 2 * batch["x"]]))
        return (z**2).mean(), z

    (value, z), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
    metrics = {"loss": value, "rows": z, "classes": z.argmax(-1), "turned": z.T}
    return {"params": descend(state["params"], grads)}, metrics


def labelled_half_loss(params: Tree, state: Tree, batch: Tree) -> jax.Array:
    """The first half of the batch has labels, the second its own guesses."""
    kept = jnp.where(jax.random.bernoulli(state["key"], 0.7, batch["x"].shape), batch["x"], 0)
    z, labels = mlp(params, kept), batch["label"][: BATCH // 2]
    guesses = lax.stop_gradient(z[BATCH // 2 :]).argmax(-1)
    known = optax.softmax_cross_entropy_with_integer_labels(z[: BATCH // 2], labels).mean()
    return known + optax.softmax_cross_entropy_with_integer_labels(z[BATCH // 2 :], guesses).sum() / BATCH


def paired_halves_loss(params: Tree, batch: Tree) -> jax.Array:
    """Each row of the second half of the batch is compared with one of the first."""
    chosen, rejected = mlp(params, batch["x"])[:, 0].reshape(2, -1)
    return -jax.nn.log_sigmoid(chosen - rejected).mean()


def unstacked_halves_loss(params: Tree, batch: Tree) -> jax.Array:
    """As above, with the halves apart by `jnp.unstack` (which JAX 0.11 writes for both)."""
    chosen, rejected = jnp.unstack(mlp(params, batch["x"])[:, 0].reshape(2, -1))
    return -jax.nn.log_sigmoid(chosen - rejected).mean()


def stacked_views_loss(params: Tree, batch: Tree) -> jax.Array:
    """Two views of each row, stacked and worked through as one batch."""
    views = jnp.stack([batch["x"], 2 * batch["x"]]).reshape(2 * BATCH, -1)
    return (mlp(params, views) ** 2).mean()


def middle_loss(params: Tree, batch: Tree) -> jax.Array:
    """The end of one block and the beginning of the next: of a batch that is two blocks itself."""
    z = mlp(params, jnp.concatenate([batch["x"], 2 * batch["x"]]))
    return (z[BATCH // 2 : -BATCH // 2] ** 2).mean()


BLOCKS = {
    "two views": Case(sgd(two_views_loss)),
    "three blocks": Case(sgd(three_blocks_loss)),
    "preferences": Case(sgd(preference_loss), language_params),
    "teacher": Case(teacher_step, extra=lambda: {"teacher": jax.tree.map(lambda p: 0.9 * p, mlp_params())}),
    "dropout": Case(sgd_of_state(two_dropouts_loss), extra=typed_key),
    "dropout, old key": Case(sgd_of_state(two_dropouts_loss), extra=old_key),
    "dropout, a key for each row": Case(sgd_of_state(two_dropouts_each_loss), extra=typed_key),
    "scan over layers": Case(sgd(blocks_by_layers_loss), layered_params),
    "lax.map over rows": Case(sgd(blocks_by_rows_loss)),
    "time first": Case(sgd(time_first_loss), language_params),
    "rows returned": Case(blocks_step),
    "labels of one half": Case(sgd_of_state(labelled_half_loss), extra=typed_key),
    "pairs of halves": Case(sgd(paired_halves_loss)),
    "halves unstacked": Case(sgd(unstacked_halves_loss)),
    "views stacked": Case(sgd(stacked_views_loss)),
    "middle of two blocks": Case(sgd(middle_loss)),
}


@cases_in_parts(BLOCKS)
def test_samples_behind_samples(case, count):
    assert_equals_full_batch(case, count)


def test_rows_are_cut_in_blocks():
    """A microbatch has its rows of each block, and the rest of the program knows which they are."""
    _, split = split_case(Case(blocks_step), 4)
    shares = {
        str(result.var.aval.shape): result.placement for result in split.results if isinstance(result.placement, Split)
    }
    assert shares[str((2 * BATCH, CLASSES))] == Split(0, blocks=2)
