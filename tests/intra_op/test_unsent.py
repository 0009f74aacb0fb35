"""A backward pass waits for gradients that are on their way, so that they are not all sent behind its end."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.cost.steps import AllReduce, ReduceScatter
from autopar.intra_op.liveness import measure_liveness
from autopar.intra_op.sharded import Fused, Move, Region, local_bytes
from autopar.intra_op.unsent import unsent_copies, unsent_waits
from autopar.partition.ahead import Ahead

LAYERS = 6


def train_step(params, batch):
    """Layers that are written out; each is updated in the backward pass, as parts of a sum over microbatches are added."""
    kept = [batch["x"]]
    for p in params:
        kept.append(jnp.tanh((kept[-1] * p["scale"]) @ p["w"]))
    gradient, new = kept[-1] - batch["y"], []
    for p, x, y in zip(params[::-1], kept[-2::-1], kept[:0:-1], strict=True):
        inner = gradient * (1 - y**2)
        outer = inner @ p["w"].T
        new.insert(0, {"w": p["w"] - (x * p["scale"]).T @ inner / 128, "scale": p["scale"] - (outer * x).sum(0) / 128})
        gradient = outer * p["scale"]
    return new


def planned(cluster, width, rows, array, layers=LAYERS, zero=3):
    params = [{"w": array(width, width), "scale": array(width)} for _ in range(layers)]
    batch = {"x": array(rows, width), "y": array(rows, width)}
    method = autopar.DataParallel(zero=zero)
    step = autopar.parallelize(train_step, cluster=cluster, method=method, batch_argnums=(1,), donate_argnums=())
    return step, (params, batch)


def types(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def program(step, given):
    """The only program of a step, and its mesh."""
    (stage,) = step.plan(*given).attached.pipeline.stages
    return stage.tasks[0].body, stage.mesh


@pytest.fixture(scope="module")
def backward():
    """The program of a wide model, and its mesh."""
    return program(*planned(autopar.Cluster.of("8 h100"), 4096, 8192, types))


def delays_of(body, mesh):
    """What waits for gradients on their way in the per-device program."""
    return list(Ahead(body, lambda copy: local_bytes(*copy, mesh)).unsent())


def is_sent(instruction):
    return isinstance(instruction, Move) and isinstance(instruction.step, ReduceScatter)


def test_elementwise_work_waits_for_what_was_sent_before(backward):
    body, mesh = backward
    delays = delays_of(body, mesh)
    sent = [at for at, instruction in enumerate(body.instructions) if is_sent(instruction)]
    assert len(sent) >= 4 and delays
    made_at = {copy: at for at, instruction in enumerate(body.instructions) for copy in instruction.makes}
    for delay in delays:
        reader = body.instructions[delay.position]
        assert set(delay.copies) <= set(reader.reads) and not delay.lasts
        assert not reader.eqn.primitive.name.startswith("dot")
        behind = [made_at[copy] for copy in delay.awaited]
        assert max(behind) < delay.position and set(behind) & set(sent)


def test_the_last_messages_go_on_beside_the_backward_pass(backward):
    body, mesh = backward

    def num_bytes(copy):
        return local_bytes(*copy, mesh)

    made_at = {copy: at for at, instruction in enumerate(body.instructions) for copy in instruction.makes}
    for delay in delays_of(body, mesh):
        last = max(made_at[copy] for copy in delay.awaited if is_sent(body.instructions[made_at[copy]]))
        going = [i for at, i in enumerate(body.instructions) if at > last and is_sent(i)]
        assert sum(num_bytes((i.var, i.source)) for i in going) >= body.bucket / 2


def test_sums_that_are_not_sent_apart_are_waited_for_too(backward):
    body, mesh = backward
    awaited = {copy for delay in delays_of(body, mesh) for copy in delay.awaited}
    made_by = {copy: instruction for instruction in body.instructions for copy in instruction.makes}
    assert any(made_by[copy].eqn.primitive.name == "reduce_sum" for copy in awaited if not is_sent(made_by[copy]))


def test_products_that_are_sent_together_later_are_waited_for():
    """They free what they read; nothing would make them run before the message that they are all in."""

    def step(params, batch):
        gradient, new = batch["y"], []
        for p in params:
            inner = jnp.tanh(gradient) * batch["x"]
            new.append({name: w - inner.T @ gradient[:, : w.shape[1]] for name, w in p.items()})
            gradient = inner @ p["w"].T
        return new

    params = [{"w": types(4096, 4096), "small": types(4096, 64)} for _ in range(LAYERS)]
    batch = {"x": types(8192, 4096), "y": types(8192, 4096)}
    method = autopar.DataParallel(zero=3)
    made = autopar.parallelize(step, cluster=autopar.Cluster.of("8 h100"), method=method, batch_argnums=(1,))
    body, mesh = program(made, (params, batch))
    together = [i for i in body.instructions if isinstance(i, Fused) and isinstance(i.moves[0].step, ReduceScatter)]
    assert len(together) == 1 and len(together[0].moves) == LAYERS
    awaited = {copy for delay in delays_of(body, mesh) for copy in delay.awaited}
    assert len(awaited.intersection(together[0].reads)) >= LAYERS - 2


@pytest.mark.parametrize("zero, step", [(0, AllReduce), (3, ReduceScatter)])
def test_messages_of_many_gradients_are_waited_for_too(zero, step):
    body, mesh = program(*planned(autopar.Cluster.of("8 h100"), 1536, 8192, types, layers=24, zero=zero))
    sent = [i for i in body.instructions if isinstance(i, Fused) and isinstance(i.moves[0].step, step)]
    delays = delays_of(body, mesh)
    awaited = {copy for delay in delays for copy in delay.awaited}
    assert len(sent) >= 4 and sum(i.makes[0] in awaited for i in sent) >= len(sent) - 2


@pytest.mark.parametrize("zero", [0, 3])
def test_gradients_take_memory_until_the_work_that_waits_for_their_sums(monkeypatch, zero):
    """Until then a sum may be on its way: what it reads stays, or, in its place, the result of an all-reduce."""
    body, mesh = program(*planned(autopar.Cluster.of("8 h100"), 4096, 8192, types, zero=zero))
    sums = [at for wait in unsent_waits(body, lambda copy: local_bytes(*copy, mesh)) for at in wait.sums]
    ends = dict(unsent_copies(body, lambda copy: local_bytes(*copy, mesh)))
    curve = measure_liveness(body, mesh, {}).curve
    monkeypatch.setattr("autopar.intra_op.liveness.unsent_copies", lambda *_: ())
    more = np.subtract(curve, measure_liveness(body, mesh, {}).curve)
    gradient = 4096 * 4096 * 4
    for at in (at for at in sums if local_bytes(*body.instructions[at].reads[0], mesh) == gradient):
        stays = body.instructions[at].makes if zero == 0 else body.instructions[at].reads
        assert more[at + 3 : ends[stays[0]] + 1].min() >= gradient
    assert not more[: min(sums)].any() and max(more) <= 2 * gradient


def test_a_loop_waits_for_what_was_sent_before_it():
    """The head's gradient; beside a loop that communicates nothing else is sent."""

    def step(params, batch):
        def loss_of(params):
            x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params["layers"])[0]
            return jnp.mean((x @ params["head"] - batch["y"]) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_of)(params))

    given = (
        {"layers": types(4, 2048, 2048), "head": types(2048, 2048)},
        {"x": types(8192, 2048), "y": types(8192, 2048)},
    )
    method = autopar.DataParallel(zero=3)
    body, mesh = program(autopar.parallelize(step, cluster=autopar.Cluster.of("8 h100"), method=method), given)
    delays = delays_of(body, mesh)
    (head,) = [at for at, i in enumerate(body.instructions) if is_sent(i)]
    (delay,) = [d for d in delays if isinstance(body.instructions[d.position], Region)]
    assert head < delay.position and body.instructions[head].makes[0] in delay.awaited


def test_nothing_waits_for_small_messages(backward):
    body, _ = backward
    assert not unsent_waits(body, lambda copy: 64) and not [*unsent_copies(body, lambda copy: 64)]


def test_what_waits_is_the_same(monkeypatch):
    monkeypatch.setattr("autopar.intra_op.unsent.LATE_BYTES", 1 << 13)
    monkeypatch.setattr("autopar.intra_op.fuse.small_bytes", lambda mesh: 1 << 10)
    found = []

    def finding(body, num_bytes):
        found.append(unsent_waits(dataclasses.replace(body, bucket=1 << 13), num_bytes))
        return found[-1]

    monkeypatch.setattr("autopar.partition.ahead.unsent_waits", finding)
    random = np.random.default_rng(0)
    cluster = autopar.Cluster.local(jax.devices()[:4])
    step, given = planned(cluster, 64, 128, lambda *shape: random.standard_normal(shape, np.float32) / 8)
    got, wanted = step(*given), jax.jit(train_step)(*given)
    assert any(found)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)
