"""What instructions wait for beside copies between the memories of device and host."""

import jax
import jax.numpy as jnp

import autopar
from autopar._jax import on_host
from autopar.intra_op.host_order import arrivals, copies_host, host_waits
from autopar.intra_op.liveness import measure_liveness
from autopar.intra_op.sharded import local_bytes
from tests.intra_op.test_liveness import lowered


def train_step(state, x):
    """Its momentum is in host memory between steps."""
    params, moments = state[0], jax.device_put(state[1], jax.memory.Space.Device)

    def loss_of(params):
        y = x
        for w in params:
            y = jnp.tanh(y @ w)
        return jnp.sum(y)

    moments = [0.9 * m + g for m, g in zip(moments, jax.grad(loss_of)(params), strict=True)]
    new = [w - 0.1 * m for w, m in zip(params, moments, strict=True)]
    return new, jax.device_put(moments, jax.memory.Space.Host)


def task_of():
    weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 4
    step = autopar.parallelize(train_step, cluster=autopar.Cluster.of("4 h100"), method=autopar.DataParallel(zero=0))
    (stage,) = step.plan((weights, weights), jax.ShapeDtypeStruct((256, 64), jnp.float32)).attached.pipeline.stages
    return stage.tasks[0].body, stage.mesh


def test_a_copy_from_the_host_waits_for_the_update_before():
    body, mesh = task_of()
    made = {copy: k for k, i in enumerate(body.instructions) for copy in i.makes}
    waits = host_waits(body, lambda copy: local_bytes(*copy, mesh), True)
    fetches = [k for k, i in enumerate(body.instructions) if copies_host(i) and on_host(i.reads[0][0].aval)]
    assert len(fetches) == 4 and all(waits[k] for k in fetches), "none begins with the program"
    for before, later in zip(fetches[1:], fetches[2:], strict=False):  # the second is copied while the first is read
        assert any(before < made[copy] < later for copy in waits[later])


def test_an_update_waits_until_the_state_before_it_is_on_the_host():
    body, _ = task_of()
    found = arrivals(body, True)
    made = {copy: k for k, i in enumerate(body.instructions) for copy in i.makes}
    assert len(found) >= 3
    for position, there in found.items():
        assert all(on_host(var.aval) and made[var, sharding] < position for var, sharding in there)


def test_rows_of_a_loop_wait_for_nothing():
    body, mesh = task_of()
    inner = host_waits(body, lambda copy: local_bytes(*copy, mesh), False)
    assert not any(copies_host(body.instructions[k]) for k in inner) and not arrivals(body, False)


def test_the_first_row_of_a_loop_is_there_before_it(monkeypatch):
    """XLA peels off the first trip, and fetches its row as soon as it is on the host."""

    def step(x, w, rows):
        rows = jax.device_put(rows, jax.memory.Space.Host)
        y = (x @ w) @ w
        return jax.lax.scan(lambda y, row: (y @ jax.device_put(row, jax.memory.Space.Device), None), y, rows)[0]

    body, mesh, stored = lowered(step, (8, 16), (16, 16), (4, 16, 16))
    with_it = measure_liveness(body, mesh, stored).curve
    monkeypatch.setattr("autopar.intra_op.versions.fetched_first", lambda _: ())
    without = measure_liveness(body, mesh, stored).curve
    names = [i.eqn.primitive.name for i in body.instructions]
    first, loop = names.index("device_put"), names.index("scan")
    assert loop - first > 1
    assert [a - b for a, b in zip(with_it, without, strict=True)][first : loop + 1] == [16 * 16 * 4] * (
        loop + 1 - first
    )
