"""Whose memory results take: sums in place, new state where the old was, nothing of the user's; and when buffers are freed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import Cluster, Device, Link, PipelineParallel
from autopar.streams.instructions import Free, Recv, Run, Send, Streams, reads, writes
from autopar.streams.lifetimes import free

CLUSTER = Cluster(1, 2, Device("toy", 1e9, 1e9, 1e9), Link(1e-6, 1e9), Link(1e-6, 1e9))
BATCH = jax.ShapeDtypeStruct((16, 8), jnp.float32)
WEIGHTS = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 2


def train_step(weights, batch):
    def loss_of(weights):
        return jnp.mean((jnp.tanh(batch @ weights[0]) @ weights[1]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], loss


def decode(caches, weights, batch):
    new = [jnp.roll(cache, 1, axis=1) + 1 for cache in caches]
    return new, jnp.tanh(batch @ weights[0] + new[0]) @ weights[1] + new[1]


def taken(step, *args, num_microbatches=2, **options):
    """Per kind of task, the kinds of values whose memory its programs take."""
    method = PipelineParallel(num_stages=2, num_microbatches=num_microbatches)
    streams = autopar.parallelize(step, cluster=CLUSTER, method=method, **options).plan(*args).origin.pipeline.streams
    found = {}
    for name, positions in streams.overwritten.items():
        plan = streams.programs[name]
        operands = (*plan.inputs, *plan.written_rows)
        found.setdefault(plan.task.kind, set()).update(operands[k].kind for k in positions)
        results = [value.type for value in plan.outputs]
        for k in positions:  # each takes the memory of one of its own type
            results.remove(operands[k].type)
    return found


def test_a_step_that_trains_overwrites_state_in_its_update_alone():
    found = taken(train_step, WEIGHTS, BATCH)
    assert found["U"] == {"argument"}
    assert found["B"] == {"sum"} and found["F"] <= {"sum"}


def test_what_the_user_keeps_stays():
    found = taken(train_step, WEIGHTS, BATCH, donate_argnums=())
    assert found["U"] == set() and found["B"] == {"sum"}


def test_without_gradients_what_is_read_last_is_taken():
    caches = [BATCH, BATCH]
    given = dict(batch_argnums=(2,), num_microbatches=1)
    found = taken(decode, caches, WEIGHTS, BATCH, donate_argnums=(0,), **given)
    kept = taken(decode, caches, WEIGHTS, BATCH, donate_argnums=(), **given)
    assert any("argument" in kinds for kinds in found.values())
    assert not any("argument" in kinds for kinds in kept.values())


def streams(instructions, results=()):
    return Streams(instructions, (), (), (), tuple(results), {}, {})


def test_behind_the_last_reader():
    first = Run("a", 0, 0, (0,), (1, 2)), Run("b", 0, 0, (1,), (3,)), Send((1,), 1, 0)
    second = Recv((4,), 0, 0), Run("c", 1, 0, (4,), (5,))
    found = free(streams({0: first, 1: second}, [3, None, 5])).instructions
    assert found[0] == (first[0], Free((0, 2)), *first[1:], Free((1,)))  # 2 is read by nobody, 3 is a result
    assert found[1] == (*second, Free((4,)))


def drawn(seed):
    """A stream of runs that read what is there, and which buffers are results."""
    random = np.random.default_rng(seed)
    there, stream = [0, 1], []
    for number in range(int(random.integers(3, 12))):
        read = tuple(int(b) for b in random.choice(there, size=min(2, len(there)), replace=False))
        made = tuple(range(len(there), len(there) + int(random.integers(1, 3))))
        stream.append(Run(f"p{number}", 0, 0, read, made))
        there += made
    return tuple(stream), [int(b) for b in random.choice(there, size=2, replace=False)]


@pytest.mark.parametrize("seed", range(20))
def test_once_and_not_before_it_may_go(seed):
    stream, results = drawn(seed)
    found = free(streams({0: stream}, results)).instructions[0]
    assert tuple(i for i in found if not isinstance(i, Free)) == stream
    gone = [b for i in found if isinstance(i, Free) for b in i.buffers]
    used = {b for i in stream for b in (*reads(i), *writes(i))}
    assert sorted(gone) == sorted(used.difference(results))
    for before, after in zip(found, found[1:], strict=False):
        if isinstance(after, Free):
            last = found.index(after)
            assert all(b in (*reads(before), *writes(before)) for b in after.buffers)
            assert not any(b in (*reads(i), *writes(i)) for b in after.buffers for i in found[last:])
