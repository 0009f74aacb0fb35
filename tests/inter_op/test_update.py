"""The update of pipelines: what lives where, and that what crosses stages is small, or crosses once."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.ir.dataflow import inputs_of
from autopar.streams.instructions import Run, Send
from autopar.tuning import TUNING
from tests.models.registry import CASES
from tests.sweep import QUICK, SLOW

WIDE, NARROW = 72, 16
"""Kernels of 72 x 72 are more, those of 16 x 16 less than what the chain calls small (4096 elements)."""


def mlp(num_layers, width, optimizer=None):
    optimizer = optimizer or optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    params = [{"kernel": jnp.ones((width, width)), "bias": jnp.ones(width)} for _ in range(num_layers)]

    def loss_fn(params, batch):
        x = batch["x"]
        for layer in params:
            x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
        return jnp.mean((x - batch["y"]) ** 2)

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, moments = optimizer.update(grads, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss

    array = jax.ShapeDtypeStruct((64, width), np.float32)
    return step, {"params": params, "moments": optimizer.init(params)}, {"x": array, "y": array}


def planned(step, state, batch, num_stages, num_microbatches=4, schedule="1f1b"):
    return autopar.parallelize(
        step,
        cluster=autopar.Cluster(1, num_stages, SLOW, QUICK),
        method=autopar.PipelineParallel(num_stages=num_stages, num_microbatches=num_microbatches, schedule=schedule),
        batch_argnums=(1,),
    ).plan(state, batch)


@functools.cache
def planned_mlp(num_layers, width, schedule="1f1b"):
    return planned(*mlp(num_layers, width), 4, schedule=schedule)


def sent(plan):
    """Every value that is sent: (mesh, peer, number of runs before it, it)."""
    streams = plan.origin.pipeline.streams
    for mesh, stream in streams.instructions.items():
        runs = 0
        for instruction in stream:
            runs += isinstance(instruction, Run)
            if isinstance(instruction, Send):
                for at in instruction.buffers:
                    yield mesh, instruction.peer, runs, streams.buffers[at].value


def size(value):
    return math.prod(value.type.shape)


def large_values_of_the_update(plan):
    """Shapes of what is no scalar and crosses stages after the loop, by (mesh, peer)."""
    return [(m, p, b.type.shape) for m, p, _, b in sent(plan) if b.kind == "value" and size(b) > TUNING.joined_elements]


def large_arguments(plan):
    """The same of what is sent before it."""
    return [
        (m, p, b.type.shape) for m, p, _, b in sent(plan) if b.kind == "argument" and size(b) > TUNING.joined_elements
    ]


@pytest.mark.parametrize(
    "num_layers, width, schedule",
    [(8, WIDE, "gpipe"), (8, WIDE, "1f1b"), (12, WIDE, "gpipe"), (6, WIDE, "1f1b"), (8, NARROW, "1f1b")],
)
def test_only_scalars_cross(num_layers, width, schedule):
    plan = planned_mlp(num_layers, width, schedule)
    assert large_values_of_the_update(plan) == large_arguments(plan) == []


def test_one_message_for_each_peer_and_round():
    plan = planned_mlp(8, WIDE)
    for mesh, stream in plan.origin.pipeline.streams.instructions.items():
        last = max(k for k, i in enumerate(stream) if isinstance(i, Run) and i.program.endswith("/B"))
        rounds = [[]]
        for instruction in stream[last + 1 :]:
            if isinstance(instruction, Run):
                assert instruction.program.startswith(f"stage{mesh}/U")
                rounds.append([])
            if isinstance(instruction, Send):
                rounds[-1].append(instruction.peer)
        assert all(len(peers) == len(set(peers)) for peers in rounds)
        assert len(rounds) - 1 == 2, "its part of the norm; then its parameters"
    crossing = [(m, p) for m, p, _, b in sent(plan) if b.kind == "value"]
    assert set(crossing) == {(k, 3) for k in range(3)} | {(3, k) for k in range(3)}, "to the last stage and back"
    assert sum(m < 3 for m, _ in crossing) == 3, "one partial sum of each"


def updates(plan):
    """The tasks of the update, stage by stage."""
    return [task for stage in plan.origin.pipeline.stages for task in stage.tasks if task.task.kind == "U"]


@pytest.mark.parametrize("optimizer", [optax.adam(1e-2), optax.sgd(0.1, momentum=0.9), optax.adamw(1e-2)])
def test_state_waits_for_the_norm(optimizer):
    """`b1 * mu` is no work of the round before: it would be written, kept, and read again."""
    plan = planned(*mlp(4, WIDE, optax.chain(optax.clip_by_global_norm(0.1), optimizer)), 2)
    first = [task for task in updates(plan) if task.task.round == 0]
    assert len(first) == 2
    for task in first:
        assert {value.kind for value in task.inputs if size(value) > TUNING.joined_elements} == {"sum"}
        assert len([value for value in task.outputs if size(value) > TUNING.joined_elements]) == 4  # gradients


def test_what_is_small_is_kept_and_not_what_it_is_made_of():
    """A cast to 16 bits, which halves what waits; a sum of two gradients, one array instead of two."""

    def step(state, batch):
        def loss_fn(params):
            hidden = jnp.tanh(batch["x"] @ params["a"]) @ params["b"]
            return jnp.mean((hidden @ params["c"] @ params["d"] - batch["y"]) ** 2)

        grads = jax.grad(loss_fn)(state)
        norm = optax.global_norm(grads)
        narrow = {name: g.astype(jnp.bfloat16) for name, g in grads.items()}
        both = grads["a"] + grads["b"]
        new = {name: p - 0.1 / norm * narrow[name] for name, p in state.items()}
        return {**new, "a": new["a"] - both / norm}

    state = {name: jnp.ones((WIDE, WIDE)) for name in "abcd"}
    array = jax.ShapeDtypeStruct((64, WIDE), np.float32)
    plan = planned(step, state, {"x": array, "y": array}, 2)
    kept = [(v.key.aval.dtype.name, len(v.type.shape)) for t in updates(plan) if t.task.round == 0 for v in t.outputs]
    assert kept.count(("bfloat16", 2)) == 4 and kept.count(("float32", 2)) == 1, kept


def test_a_sum_over_devices_that_rounds_share_is_sent_once():
    plan = autopar.parallelize(
        mlp(4, WIDE)[0],
        cluster=autopar.Cluster(1, 4, SLOW, QUICK),
        method=autopar.ThreeD(data=2, pipeline=2, num_microbatches=4),
        batch_argnums=(1,),
    ).plan(*mlp(4, WIDE)[1:])
    sent_bytes = sum(c.bytes * c.times for c in plan.cost.collectives if c.kind == "all-reduce")
    gradients = 4 * 4 * (WIDE * WIDE + WIDE)
    assert gradients <= sent_bytes <= 1.01 * gradients, "and a few scalars"


def test_the_optimizer_lives_with_the_parameters():
    plan = planned_mlp(8, WIDE)
    program, update = plan.origin.program, plan.origin.pipeline.tasks.update
    home = {path: update.home[var] for path, var in zip(program.in_paths, program.jaxpr.invars, strict=False)}
    kernels = [home[f"state/params/{k}/kernel"] for k in range(8)]
    assert kernels == [0, 0, 1, 1, 2, 2, 3, 3]
    for path, at in home.items():
        if "kernel" in path or "bias" in path:
            number = int(path.split("/")[-2])
            assert at == kernels[number], path
            assert update.readers[dict(zip(program.in_paths, program.jaxpr.invars, strict=False))[path]] == (at,)
    for k, path in enumerate(program.out_paths):
        if path.startswith("result/0/"):
            assert update.outputs[k] == home[path.replace("result/0/", "state/")], path


@pytest.mark.parametrize(
    "optimizer",
    [optax.sgd(0.1, momentum=0.9), optax.lion(1e-2), optax.lamb(1e-2), optax.adamw(optax.linear_schedule(0, 1, 9))],
    ids=["sgd", "lion", "lamb", "adamw with a schedule"],
)
def test_nothing_crosses_where_nothing_joins(optimizer):
    plan = planned(*mlp(4, WIDE, optimizer), 2)
    assert [b.type.shape for *_, b in sent(plan) if b.kind == "value"] == []
    assert large_arguments(plan) == []


def test_metrics_live_where_the_loss_is():
    """Sums and counts, also of what the first stage reads: users divide one by the other outside of the step."""
    step, state, batch = mlp(4, NARROW, optax.adam(1e-2))

    def with_metrics(state, batch):
        new, loss = step(state["model"], batch)
        count, seen = state["count"] + batch["x"].shape[0], state["seen"] + jnp.sum(batch["x"] > 0)
        return {"model": new, "total": state["total"] + loss, "count": count, "seen": seen}, loss

    counts = {"count": jnp.int32(0), "seen": jnp.int32(0), "total": jnp.float32(0)}
    plan = planned(with_metrics, {"model": state, **counts}, batch, 2)
    pipeline = plan.origin.pipeline
    names = dict(zip(pipeline.program.jaxpr.invars, pipeline.program.in_paths, strict=False))
    lives = {names[var]: stage for var, stage in pipeline.home.items() if var in names}
    assert {lives[f"state/{name}"] for name in counts} == {1}
    assert {lives["state/model/params/0/kernel"], lives["state/model/params/3/kernel"]} == {0, 1}


def test_a_norm_that_only_is_reported():
    def with_norm(state, batch):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(jnp.tanh(batch @ p[0]) @ p[1]) ** 2))(state)
        largest = jnp.maximum(jnp.abs(grads[0]).max(), jnp.abs(grads[1]).max())
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))
        metrics = {"loss": loss, "norm": norm, "largest": largest}
        return jax.tree.map(lambda p, g: p - g, state, grads), metrics

    kernels = [jax.ShapeDtypeStruct((WIDE, WIDE), np.float32)] * 2
    plan = planned(with_norm, kernels, jax.ShapeDtypeStruct((64, WIDE), np.float32), 2)
    crossing = [(m, p, b.type.shape) for m, p, _, b in sent(plan) if b.kind == "value"]
    assert crossing == [(0, 1, ()), (0, 1, ())], "what the first stage found, once"


@pytest.mark.parametrize("num_stages, num_microbatches", [(2, 4), (4, 1)])
def test_tied_embeddings(num_stages, num_microbatches):
    case = CASES["gpt_tied_dropout"]()
    plan = planned(case.step, case.state, case.batches[0], num_stages, num_microbatches)
    table = case.state["params"]["embed"].shape
    crossing = [(m, p, b.kind) for m, p, _, b in sent(plan) if b.type.shape == table]
    last = num_stages - 1
    assert [(m, p) for m, p, kind in crossing if kind == "argument"] == [(0, last)], "the parameter, once"
    assert [(m, p) for m, p, kind in crossing if kind != "argument"] == [(last, 0)], "its gradient, once"


def test_what_others_read_behind_the_loop():
    """A clipped norm is made of what all stages have: each leaves its part, and none what it alone reads."""
    tasks = planned_mlp(4, NARROW).origin.pipeline.tasks
    stages = range(tasks.num_stages)
    read = [{var for each in rounds for eqn in each.eqns for var in inputs_of(eqn)} for rounds in tasks.update.rounds]
    for stage, left in enumerate(tasks.left_behind_loop):
        elsewhere = set().union(*(read[other] for other in stages if other != stage))
        assert set(left) == {var for var in elsewhere if tasks.update.stage_of.get(var) == stage}
    assert sum(bool(left) for left in tasks.left_behind_loop) > 1
