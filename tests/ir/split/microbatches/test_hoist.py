"""Before the loop: samples in another order than they came; and what a branch does behind a gradient."""

from __future__ import annotations

import copy
import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.errors import MicrobatchError
from autopar.ir.check import check_program
from autopar.ir.rewrite.fission import cut_after_gradients
from autopar.ir.split.microbatches.hoist import Hoist
from tests.ir.split.cases import (
    COUNTS,
    Case,
    Tree,
    assert_equals_full_batch,
    assert_is_worked_through,
    assert_same,
    cases_in_parts,
    cross_entropies,
    descend,
    full_batch,
    mlp,
    primitives_in,
    run_split,
    sgd,
    sgd_of_state,
    squares,
    traced,
    typed_key,
)
from tests.ir.traced import split_microbatches


def reversed_inputs_loss(params: Tree, batch: Tree) -> jax.Array:
    return squares(params, {**batch, "x": batch["x"][::-1], "y": batch["y"][::-1]}).mean()


def shuffled_inputs_loss(params: Tree, state: Tree, batch: Tree) -> jax.Array:
    order = jax.random.permutation(state["key"], batch["x"].shape[0])
    return squares(params, {**batch, "x": batch["x"][order], "y": batch["y"][order]}).mean()


def halves_loss(params: Tree, batch: Tree) -> jax.Array:
    """The first half is trained in another way than the second."""
    half = batch["x"].shape[0] // 2
    supervised = ((mlp(params, batch["x"][:half]) - batch["y"][:half]) ** 2).mean()
    return supervised + 0.1 * (mlp(params, batch["x"][half:]) ** 2).mean()


def mixup_loss(params: Tree, batch: Tree) -> jax.Array:
    """Each sample is mixed with its neighbour, as labels are."""
    x, y = (0.7 * a + 0.3 * jnp.roll(a, 1, axis=0) for a in (batch["x"], batch["y"]))
    return squares(params, {**batch, "x": x, "y": y}).mean()


def drawn_mixup_loss(params: Tree, state: Tree, batch: Tree) -> jax.Array:
    """Each sample is mixed by a share of its own. To draw them is more work than the loss, and reads no samples."""
    share = jax.random.uniform(state["key"], (batch["x"].shape[0], 4096)).mean(1, keepdims=True)
    x, y = (share * a + (1 - share) * a[::-1] for a in (batch["x"], batch["y"]))
    return squares(params, {**batch, "x": x, "y": y}).mean()


def cutmix_loss(params: Tree, state: Tree, batch: Tree) -> jax.Array:
    """Some features of each sample, drawn with the order, are those of another one; the loss is of both labels."""
    order = jax.random.permutation(state["key"], batch["x"].shape[0])
    kept = jax.random.bernoulli(state["key"], 0.6, batch["x"].shape[1:])
    mixed = {**batch, "x": jnp.where(kept, batch["x"], batch["x"][order])}
    other = {**mixed, "label": batch["label"][order], "y": batch["y"][order]}
    share = kept.mean()
    return (share * cross_entropies(params, mixed) + (1 - share) * cross_entropies(params, other)).mean()


def sorted_loss(params: Tree, batch: Tree) -> jax.Array:
    """Samples in the order of their labels, every second one weighed more."""
    order = jnp.argsort(batch["label"])
    weights = jnp.where(jnp.arange(batch["x"].shape[0]) % 2 == 0, 2.0, 1.0)
    return (weights * squares(params, {**batch, "x": batch["x"][order], "y": batch["y"][order]})).mean()


def two_views_loss(params: Tree, batch: Tree) -> jax.Array:
    """Twice the samples: as they are, and backwards."""
    twice = {name: jnp.concatenate([batch[name], batch[name][::-1]]) for name in ("x", "y")}
    return squares(params, {**batch, **twice}).mean()


REARRANGED = {
    "reversed": Case(sgd(reversed_inputs_loss)),
    "shuffled": Case(sgd_of_state(shuffled_inputs_loss), extra=typed_key),
    "sorted": Case(sgd(sorted_loss)),
    "halves": Case(sgd(halves_loss)),
    "two views": Case(sgd(two_views_loss)),
    "mixup": Case(sgd(mixup_loss)),
    "drawn mixup": Case(sgd_of_state(drawn_mixup_loss), extra=typed_key),
    "cutmix": Case(sgd_of_state(cutmix_loss), extra=typed_key),
}


@cases_in_parts(REARRANGED)
def test_samples_in_another_order(case, count):
    """They are put in that order before the loop, as a whole; each microbatch has its part of it."""
    assert_equals_full_batch(case, count)


def critic_in_turns(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """Every second step trains: the gradient, its clipping and the update are in one branch."""

    def train(params: Tree) -> tuple[Tree, jax.Array]:
        value, grads = jax.value_and_grad(lambda p: squares(p, batch).mean())(params)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        return descend(params, jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), grads)), value

    params, value = lax.cond(state["step"] % 2 == 0, train, lambda p: (p, jnp.zeros(())), state["params"])
    return {**state, "step": state["step"] + 1, "params": params}, {"loss": value}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("step", (0, 1))
def test_update_in_a_branch(step, count):
    """The branch is split behind its backward pass: gradients are added up in the loop, and used once."""
    case = Case(critic_in_turns, extra=lambda: {"step": jnp.int32(step)})
    program, batch = traced(case)
    with pytest.raises(MicrobatchError, match="cond"):
        split_microbatches(program.jaxpr, count, batch)
    program = dataclasses.replace(program, jaxpr=cut_after_gradients(program.jaxpr))
    check_program(program.jaxpr)
    split = split_microbatches(program.jaxpr, count, batch)
    assert_is_worked_through(split)
    assert primitives_in(split.loop.eqns)["cond"] == 1 == primitives_in(split.after)["cond"]
    assert_same(run_split(case, program, split), full_batch(case))


@pytest.mark.parametrize("loss", [mixup_loss, halves_loss, two_views_loss])
def test_what_is_known_of_work_is_what_would_be_found_anew(loss, monkeypatch):
    """Bounds that are kept while more is hoisted are those of a walk from the beginning."""
    kept, asked = Hoist._least_work, []

    def checked(self, var):
        anew = copy.copy(self)
        anew.look_again()
        asked.append(kept(self, var))
        assert asked[-1] == kept(anew, var)
        return asked[-1]

    monkeypatch.setattr(Hoist, "_least_work", checked)
    program, batch = traced(Case(sgd(loss)))
    split_microbatches(program.jaxpr, 2, batch)
    assert asked
