"""Each mesh runs its tasks in the schedule's order; what crosses is sent behind its maker and received before its reader."""

import functools

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import Cluster, Device, Link, PipelineParallel
from autopar.streams.instructions import Free, Recv, Run, Send
from autopar.streams.schedules import find_schedule

CLUSTER = Cluster(1, 2, Device("toy", 1e9, 1e9, 1e9), Link(1e-6, 1e9), Link(1e-6, 1e9))
COUNT = 4


def train_step(weights, batch):
    def loss_of(weights):
        x = batch
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    loss, grads = jax.value_and_grad(loss_of)(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], loss


@functools.cache
def streams_of(schedule):
    method = PipelineParallel(num_stages=2, num_microbatches=COUNT, schedule=schedule)
    weights = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 4
    step = autopar.parallelize(train_step, cluster=CLUSTER, method=method)
    return step.plan(weights, jax.ShapeDtypeStruct((16, 8), jnp.float32)).origin.pipeline.streams


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_the_order_is_the_schedules(schedule):
    streams = streams_of(schedule)
    for mesh, steps in enumerate(find_schedule(schedule).order(2, COUNT)):
        runs = [i for i in streams.instructions[mesh] if isinstance(i, Run)]
        kinds = [streams.programs[i.program].task.kind for i in runs]
        found = [(kind, i.microbatch) for kind, i in zip(kinds, runs, strict=True) if kind in ("F", "B", "W")]
        planned = [(s.kind, s.microbatch) for s in steps if f"stage{mesh}/{s.kind}" in streams.programs]
        assert found == planned
        assert kinds[-1] == "U" and kinds.count("U") == 1


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_messages_come_directly_before_who_reads_them_first(schedule):
    streams = streams_of(schedule)
    sent = {
        i.message: (mesh, i) for mesh, stream in streams.instructions.items() for i in stream if isinstance(i, Send)
    }
    received = 0
    for mesh, stream in streams.instructions.items():
        busy = [i for i in stream if not isinstance(i, Free)]
        for at, instruction in enumerate(busy):
            match instruction:
                case Recv(buffers, peer, message):
                    received += 1
                    source, other = sent[message]
                    assert (source, other.peer, len(other.buffers)) == (peer, mesh, len(buffers))
                    reader = next(i for i in busy[at:] if isinstance(i, Run))
                    assert set(buffers) & set(reader.inputs)
                case Send(buffers):
                    maker = next(i for i in reversed(busy[:at]) if isinstance(i, Run))
                    assert set(buffers) & set(maker.outputs)
    assert received == len(sent) > 0
