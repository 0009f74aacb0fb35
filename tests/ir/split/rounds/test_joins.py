"""What all forward passes make together is there between them and the backward passes."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from autopar._jax import Jaxpr, eval_jaxpr, make_jaxpr
from autopar.errors import MicrobatchError
from autopar.ir.check import check_program
from autopar.ir.dataflow import inputs_of
from autopar.ir.gradient import is_backward
from autopar.ir.split.microbatches.microbatch import Microbatches, check_phases
from autopar.ir.split.placement import SUM, Split
from autopar.ir.split.rounds.stage_phases import split_at_joins
from autopar.ir.split.strategy import join_shards
from tests.ir.split.cases import BATCH, WIDTH, Case, Tree, assert_same, full_batch, mlp, sgd, squares, trace_case
from tests.ir.split.losses import normalized_head_loss
from tests.ir.traced import evaluate


def balance_loss(params: Tree, batch: Tree) -> jax.Array:
    """As of a mixture of experts: each expert's share of the samples times its mean probability."""
    p = jax.nn.softmax(mlp(params, batch["x"]))
    share = jax.nn.one_hot(p.argmax(-1), p.shape[-1]).mean(0)
    return squares(params, batch).mean() + (share * p.mean(0)).sum()


def layers_loss(params: Tree, batch: Tree, how: str, again: bool) -> jax.Array:
    """Two layers, which balance their experts each by itself: one by one, in a scan, or in one that adds this up."""

    def layer(x, w):
        p = jax.nn.softmax(x @ w)
        best = jax.nn.one_hot(p.argmax(-1), p.shape[-1])
        balance = w.shape[-1] * (best.mean(0) * p.mean(0)).sum()
        return jnp.tanh(x @ w) + (best * p).sum(-1, keepdims=True), balance

    layer = jax.checkpoint(layer) if again else layer
    kernels = jnp.stack([params["w1"], -params["w1"].T])
    x, balance = batch["x"], 0.0

    def adding(carry, w):
        x, each = layer(carry[0], w)
        return (x, carry[1] + each), None

    match how:
        case "scan":
            x, each = jax.lax.scan(layer, x, kernels)
            balance = each.sum()
        case "scan that adds":
            (x, balance), _ = jax.lax.scan(adding, (x, balance), kernels)
        case _:
            for w in kernels:
                x, each = layer(x, w)
                balance += each
    return (x**2).mean() + balance


def spread_loss(params: Tree, batch: Tree) -> jax.Array:
    """The mean of some samples, and the entropy of their mean answer; the number of these samples is an integer sum."""
    counted = batch["label"] > 0
    p = (jax.nn.softmax(mlp(params, batch["x"])) * counted[:, None]).sum(0) / counted.sum()
    return ((squares(params, batch) * counted).sum() - counted.sum() * (p * jnp.log(p)).sum()) / counted.sum()


def contrastive_loss(params: Tree, batch: Tree) -> jax.Array:
    """Each sample against all others."""
    h = batch["x"]
    for _ in range(6):
        h = jnp.tanh(h @ params["w1"])
    z = h @ params["w2"]
    return optax.softmax_cross_entropy_with_integer_labels(z @ jnp.roll(z, 1, axis=1).T, jnp.arange(len(z))).mean()


def centred_loss(params: Tree, batch: Tree) -> jax.Array:
    """Batch statistics in the middle."""
    z = batch["x"] @ params["w1"]
    z = z - z.mean(0)
    for _ in range(6):
        z = jnp.tanh(z @ params["w1"])
    return (z**2).mean()


def in_two_halves(jaxpr: Jaxpr, split: Microbatches, arguments: list[Any], joins: int = 1) -> list[Any]:
    """What the phases compute: all microbatches once for what lies between their halves, and again for the rest.

    `joins`: how often that happens, where what lies between halves waits for what else does.
    """
    values: dict[Any, Any] = dict(zip(jaxpr.invars, arguments, strict=True))

    def work_out(eqns, wanted):
        read = [*values]
        found = evaluate(make_jaxpr(read, [*wanted], eqns), *(values[var] for var in read))
        values.update(zip(wanted, found, strict=True))

    run_loop = jax.jit(lambda *args: eval_jaxpr(split.loop, (), *args))

    def loop():
        given = [values.get(v, jnp.zeros(v.aval.shape, v.aval.dtype)) for v in split.invariants]
        found = []
        for k in range(split.count):
            parts = [jnp.split(values[v], split.count)[k] for v in split.pieces]
            found.append(run_loop(jnp.int32(k), *given, *parts))
        for result, parts in zip(split.results, zip(*found, strict=True), strict=True):
            if isinstance(result.placement, Split):
                values[result.var] = join_shards(parts, result.placement)
            else:
                assert result.placement == SUM
                values[result.var] = sum(parts)

    work_out(split.before, [v for eqn in split.before for v in eqn.outvars])
    for _ in range(joins):
        loop()
        work_out(split.between, [v for eqn in split.between for v in eqn.outvars])
    loop()
    there = [v for v in values if v not in {v for eqn in split.after for v in eqn.outvars}]
    return evaluate(make_jaxpr(there, jaxpr.outvars, split.after), *(values[v] for v in there))


def test_a_head_between():
    """Forward and backward passes of the head are between, on all samples; the layers before it are not."""
    case = Case(sgd(normalized_head_loss))
    program, batch = trace_case(case)
    jaxpr, split = split_at_joins(program.jaxpr, 2, batch)
    check_phases(jaxpr)(split)
    between, inside = (
        [e for e in eqns if e.primitive.name == "dot_general"] for eqns in (split.between, split.loop.eqns)
    )
    assert len(between) < len(inside) / 4
    found = in_two_halves(jaxpr, split, program.flatten_inputs(jax.tree.leaves((case.state(), case.batch()))))
    assert_same(program.unflatten_outputs(found), full_batch(case))


def test_what_is_there_before_the_loop_is_not_made_between_again():
    case = Case(sgd(spread_loss))
    program, batch = trace_case(case)
    jaxpr, split = split_at_joins(program.jaxpr, 2, batch)
    check_phases(jaxpr)(split)
    found = in_two_halves(jaxpr, split, program.flatten_inputs(jax.tree.leaves((case.state(), case.batch()))))
    assert_same(program.unflatten_outputs(found), full_batch(case))


def test_only_backward_passes_read_what_is_joined():
    program, batch = trace_case(Case(sgd(balance_loss)))
    jaxpr, split = split_at_joins(program.jaxpr, 2, batch)
    check_phases(jaxpr)(split)
    assert {str(eqn.primitive) for eqn in split.between} <= {"copy", "mul", "div", "broadcast_in_dim"}
    made = {var for eqn in split.between for var in eqn.outvars}
    inside = dict(zip(split.loop.invars[1:], split.invariants, strict=False))
    readers = [eqn for eqn in split.loop.eqns if any(inside.get(a) in made for a in inputs_of(eqn))]
    assert readers and all(is_backward(eqn) for eqn in readers)


def test_without_waiting_nothing_is_joined():
    program, batch = trace_case(Case(sgd(lambda params, batch: squares(params, batch).mean())))
    jaxpr, split = split_at_joins(program.jaxpr, 2, batch)
    assert jaxpr is program.jaxpr and not split.between


def test_pairs_of_samples_are_joined():
    program, batch = trace_case(Case(sgd(contrastive_loss)))
    jaxpr, split = split_at_joins(program.jaxpr, 2, batch)
    check_phases(jaxpr)(split)
    pairs = [eqn for eqn in (*split.between, *split.after) if eqn.primitive.name == "dot_general"]
    assert any(eqn.outvars[0].aval.shape == (BATCH, BATCH) for eqn in pairs)
    assert not any(var.aval.shape == (BATCH, WIDTH) for eqn in split.loop.eqns for var in eqn.outvars)


def centred_pairs_loss(params: Tree, batch: Tree, parts: int = 1) -> jax.Array:
    """Each sample against all others, of an encoder with batch statistics, which each of `parts` has of its own."""

    def encoded(h: jax.Array) -> jax.Array:
        for layer in range(6):
            h = jnp.tanh(h @ params["w1"])
            h = h - h.mean(0) if layer < 2 else h
        return h @ params["w2"]

    z = jnp.concatenate([encoded(rows) for rows in jnp.split(batch["x"], parts)])
    return optax.softmax_cross_entropy_with_integer_labels(z @ jnp.roll(z, 1, axis=1).T, jnp.arange(len(z))).mean()


def test_pairs_behind_local_statistics_are_joined():
    """The loss is that of all pairs; what a microbatch has of its own is the statistics, in its gradient, too."""
    case = Case(sgd(centred_pairs_loss))
    program, batch = trace_case(case)
    jaxpr, split = split_at_joins(program.jaxpr, 2, batch, per_microbatch=True)
    check_phases(jaxpr)(split)
    found = in_two_halves(jaxpr, split, program.flatten_inputs(jax.tree.leaves((case.state(), case.batch()))))
    reference = jax.jit(sgd(partial(centred_pairs_loss, parts=2)))(case.state(), case.batch())
    assert_same(program.unflatten_outputs(found), reference)


def test_forward_passes_that_wait_in_the_middle_are_refused():
    program, batch = trace_case(Case(sgd(centred_loss)))
    with pytest.raises(MicrobatchError, match="which `reduce_sum`"):
        split_at_joins(program.jaxpr, 2, batch)


HOW = [("loop", True), ("scan", False), ("scan", True), ("scan that adds", False), ("scan that adds", True)]


@pytest.mark.parametrize("how, again", HOW)
def test_layers_that_run_again_or_in_a_loop(how, again):
    program, batch = trace_case(Case(sgd(lambda params, batch: layers_loss(params, batch, how, again))))
    jaxpr, split = split_at_joins(program.jaxpr, 2, batch)
    check_program(jaxpr)
    check_phases(jaxpr)(split)
    assert split.between
    case = Case(sgd(lambda params, batch: layers_loss(params, batch, how, again)))
    run = jax.jit(lambda *args: eval_jaxpr(jaxpr, (), *args))
    found = program.unflatten_outputs(run(*program.flatten_inputs(jax.tree.leaves((case.state(), case.batch())))))
    assert_same(found, full_batch(case))


def supervised_loss(params: Tree, batch: Tree) -> jax.Array:
    """Two views of each sample against all views of all, those of one class being its like: rows and columns are the same."""
    views = []
    for x in (batch["x"], jnp.roll(batch["x"], 1, axis=1)):
        for _ in range(6):
            x = jnp.tanh(x @ params["w1"])
        views.append(x @ params["w2"])
    z, label = jnp.concatenate(views), jnp.tile(batch["label"], 2)
    logits = jnp.where(jnp.eye(len(z), dtype=bool), -1e9, z @ z.T)
    like = (label[:, None] == label[None]) - jnp.eye(len(z))
    return -((like * jax.nn.log_softmax(logits)).sum(1) / like.sum(1).clip(1)).mean()


def transport_loss(params: Tree, batch: Tree) -> jax.Array:
    """What each sample is to become is found for all pairs, in turns; their gradient goes through these turns again."""
    z = batch["x"]
    for _ in range(10):
        z = jnp.tanh(z @ params["w1"])
    cost = ((z @ params["w2"])[:, None, 0] - batch["y"][None, :, 0]) ** 2

    def turn(row, _):
        column = -jax.nn.logsumexp(row[:, None] - cost, axis=0)
        return -jax.nn.logsumexp(column[None] - cost, axis=1), column.mean()

    row, columns = jax.lax.scan(turn, jnp.zeros(len(z)), None, length=2)
    return row.mean() + columns[-1]


@pytest.mark.parametrize("loss", (supervised_loss, transport_loss))
@pytest.mark.parametrize("count", (2, 4))
def test_pairs_that_are_read_by_rows_and_by_columns(loss, count):
    """The gradient of the pairs, too, is one that samples wait for: of what it is made is joined."""
    case = Case(sgd(loss))
    program, batch = trace_case(case)
    jaxpr, split = split_at_joins(program.jaxpr, count, batch)
    check_phases(jaxpr)(split)
    pairs = {(BATCH, BATCH), (2 * BATCH, 2 * BATCH)}
    assert any(var.aval.shape in pairs for eqn in split.between for var in eqn.outvars)
    found = in_two_halves(jaxpr, split, program.flatten_inputs(jax.tree.leaves((case.state(), case.batch()))))
    assert_same(program.unflatten_outputs(found), full_batch(case))


def ranked_loss(params: Tree, batch: Tree) -> jax.Array:
    """Statistics of the losses' ranks: the worst half, a quantile, the median, and all losses weighted by their rank."""
    losses = squares(params, batch)
    worst = losses[jnp.argsort(-losses)[: BATCH // 2]].mean()
    ranked, _ = jax.lax.sort((losses, batch["label"]), num_keys=2)
    weighted = (ranked * jnp.arange(BATCH)).mean()
    return worst + jnp.quantile(losses, 0.9) + jnp.median(losses) + weighted


@pytest.mark.parametrize("count", (2, 4))
def test_what_is_cheap_is_not_done_before_what_it_reads_between(count):
    """A sort also reads numbers of the batch's labels, which are there before the loop; the losses are not."""
    case = Case(sgd(ranked_loss))
    program, batch = trace_case(case)
    jaxpr, split = split_at_joins(program.jaxpr, count, batch)
    check_phases(jaxpr)(split)
    found = in_two_halves(jaxpr, split, program.flatten_inputs(jax.tree.leaves((case.state(), case.batch()))), joins=2)
    assert_same(program.unflatten_outputs(found), full_batch(case))


def test_too_much_at_once_is_told():
    """All that is done for pairs would be done of all samples, while the stages wait; so is what a callback is told."""

    def loss(params, batch):
        pairs = batch["x"] @ params["w1"] @ batch["x"].T
        for _ in range(6):
            pairs = jnp.sin(pairs @ pairs.T)
        jax.debug.callback(lambda x: None, pairs)
        return (pairs * (batch["x"] @ params["w2"])[:, :1]).mean()

    program, batch = trace_case(Case(sgd(loss)))
    with pytest.raises(MicrobatchError, match="(?s)more than 20% of the work.*loss over pairs"):
        split_at_joins(program.jaxpr, 2, batch)


def test_what_to_do_about_a_loop_that_ends_for_all_samples():
    def loss(params, batch):
        x, square = jax.lax.stop_gradient(batch["x"]), jnp.ones((batch["x"].shape[1],) * 2)
        z = jax.lax.while_loop(lambda z: jnp.sum(z**2) > 1, lambda z: jnp.tanh(z @ square @ square) / 2, x)
        return (z @ params["w1"] @ params["w2"]).mean()

    program, batch = trace_case(Case(sgd(loss)))
    with pytest.raises(MicrobatchError, match="(?s)more than 20% of the work.*each sample end by itself") as info:
        split_at_joins(program.jaxpr, 2, batch)
    assert "pairs" not in str(info.value)


def test_a_loop_that_ends_for_all_samples_before_two_updates():
    """What is too much at once is told of the samples that the loop reads, not of the parameters."""

    def step(state, batch):
        params, w = state["params"], state["params"]["w1"]
        x, square = batch["x"] - batch["x"].mean(0), jnp.ones_like(w)
        z = jax.lax.while_loop(lambda z: jnp.sum(z**2) > 1, lambda z: jnp.tanh(z @ w @ square @ square) / 2, x)
        for _ in range(2):
            value, grads = jax.value_and_grad(lambda params: jnp.mean((z @ params["w2"]) ** 2))(params)
            params = {**params, "w2": params["w2"] - 0.1 * grads["w2"]}
        return {**state, "params": params}, {"loss": value}

    program, batch = trace_case(Case(step))
    with pytest.raises(
        MicrobatchError, match=rf"(?s)`while`.*operand of shape \({BATCH}, {WIDTH}\).*more than 20% of the work"
    ):
        split_at_joins(program.jaxpr, 2, batch)


def test_a_scan_that_adds_up_gradients_is_no_loop_of_steps():
    """Samples wait for others before it: the error names these, and not the scan."""

    def step(state, batch):
        params = state["params"]
        x = batch["x"] @ params["w1"]
        pairs = jnp.tanh((x - x.mean(0)) @ x.T)
        weights = jax.nn.softmax(pairs, axis=0).sum(1)

        def chunk(grads, rows):
            x, weight = rows
            more = jax.grad(lambda params: (weight * (jnp.tanh(x @ params["w1"]) ** 2).sum(-1)).mean())(params)
            return jax.tree.map(jnp.add, grads, more), None

        rows = jax.tree.map(lambda a: a.reshape(4, -1, *a.shape[1:]), (batch["x"], weights))
        grads, _ = jax.lax.scan(chunk, jax.tree.map(jnp.zeros_like, params), rows)
        return state | {"params": jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)}, weights.sum()

    program, batch = trace_case(Case(step))
    with pytest.raises(MicrobatchError, match="samples of the whole batch"):
        split_at_joins(program.jaxpr, 2, batch)
