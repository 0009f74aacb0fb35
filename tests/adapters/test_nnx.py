"""Steps on NNX objects: what `nnx.jit` makes of them, leaf by leaf, in the same objects."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autopar
from autopar.errors import StructureChangedError, TraceError

METHODS = {
    "auto": autopar.Auto(),
    "zero 3": autopar.DataParallel(zero=3),
    "2 x 4": autopar.ShardParallel((2, 4)),
    "two stages": autopar.PipelineParallel(num_stages=2, num_microbatches=1),
}
ADAM, MOMENTUM = optax.adam(1e-2, eps=1e-3), optax.sgd(0.1, momentum=0.9)
PLAIN = autopar.ShardParallel((2, 4))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return self.dropout(jnp.tanh(self.linear(self.norm(x))))


class Net(nnx.Module):
    """Ends with its first kernel again: a shared variable."""

    def __init__(self, rngs):
        self.first = nnx.Linear(16, 16, rngs=rngs)
        self.blocks = nnx.List([Block(rngs)])
        self.last = nnx.Linear(16, 16, use_bias=False, rngs=rngs)
        self.last.kernel = self.first.kernel
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        self.calls[...] += 1
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def make():
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param), nnx.MultiMetric(loss=nnx.metrics.Average("loss"))


def loss_of(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def train_step(model, optimizer, metrics, batch):
    loss, grads = nnx.value_and_grad(loss_of)(model, batch)
    metrics.update(loss=loss)
    optimizer.update(model, grads)
    return loss


def batches(count=3):
    random = np.random.default_rng(0)
    return [{name: random.normal(size=(16, 16)).astype(np.float32) for name in "xy"} for _ in range(count)]


def arrays(objects):
    leaves = jax.tree.leaves(nnx.state(objects))
    return [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves]


def check(ours, theirs):
    assert nnx.graphdef(ours) == nnx.graphdef(theirs), "the same structure, the same references"
    for a, b in zip(arrays(ours), arrays(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_step_in_place(method):
    ours, theirs = make(), make()
    model, kernel = ours[0], ours[0].first.kernel
    step, jitted = autopar.parallelize(train_step, method=method), nnx.jit(train_step)
    for batch in batches():
        np.testing.assert_allclose(step(*ours, batch), jitted(*theirs, batch), rtol=1e-5)
        measured = [metrics.compute()["loss"] for _, _, metrics in (ours, theirs)]  # outside of the step
        np.testing.assert_allclose(*measured, rtol=1e-5)
    check(ours, theirs)
    assert ours[0] is model and model.last.kernel is model.first.kernel is kernel
    assert len(step._made.compiled) == 1 and int(model.calls[...]) == 3


def test_paths_are_the_users():
    plan = autopar.parallelize(train_step, method=autopar.DataParallel(zero=3)).plan(*make(), batches()[0])
    roles = {value.name: value.role for value in plan.values}
    assert roles["model/blocks/0/linear/kernel"] == roles["optimizer/opt_state/0/mu/first/kernel"] == "state"
    assert roles["metrics/loss/total"] == "state" and roles["batch/x"] == "batch" and roles["result"] == "result"
    assert "model/last/kernel" not in roles, "it is the first one's"
    assert any(plan.shardings[0][0]["blocks"][0]["linear"]["kernel"])
    assert "model/first/kernel" in str(plan) and "ZeRO" not in plan.explain("model/first/kernel")


def test_optimizer_that_holds_the_model_and_containers_of_objects():
    """The model is passed twice, by itself and inside of the optimizer, and beside arrays that are no objects."""

    def step(state, batch, *, ema):
        model, optimizer = state["model"], state["optimizer"]
        loss, grads = nnx.value_and_grad(loss_of)(model, batch)
        optimizer.update(grads)
        ema = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, ema, model.first.kernel[...])
        return loss, ema, state["optimizer"].model

    def fresh():
        model = Net(nnx.Rngs(0))
        return {"model": model, "optimizer": nnx.ModelAndOptimizer(model, MOMENTUM), "note": jnp.ones(3)}

    ours, theirs, ema, other = fresh(), fresh(), jnp.zeros((16, 16)), jnp.zeros((16, 16))
    parallel, jitted = autopar.parallelize(step, method=PLAIN), nnx.jit(step)
    for batch in batches():
        loss, ema, model = parallel(ours, batch, ema=ema)
        expected, other, _ = jitted(theirs, batch, ema=other)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        np.testing.assert_allclose(ema, other, rtol=1e-4, atol=1e-6)
        assert model is ours["model"] is ours["optimizer"].model
    check(ours, theirs)


def test_structure_that_changes_in_the_step():
    """New variables, flags, and modules that are returned."""

    def step(model, batch):
        model.seen = nnx.Variable(jnp.mean(batch["x"], 0))
        model.eval()
        out = model(batch["x"])
        return nnx.Linear(4, 4, rngs=nnx.Rngs(1)), model.blocks[0], jnp.mean(out)

    ours, theirs = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    parallel, jitted = autopar.parallelize(step, method=PLAIN), nnx.jit(step)
    for batch in batches(2):
        (made, block, mean), (other, _, expected) = parallel(ours, batch), jitted(theirs, batch)
        np.testing.assert_allclose(mean, expected, rtol=1e-4)
        assert block is ours.blocks[0] and ours.blocks[0].dropout.deterministic
        check((ours, made), (theirs, other))
    assert len(parallel._made.compiled) == 2, "the flags of the second call are others"


def test_what_is_only_read_is_not_donated():
    def accuracy(model, batch):
        model.eval()
        return loss_of(nnx.clone(model), batch)

    model, batch = Net(nnx.Rngs(0)), batches()[0]
    model.eval()
    kernel = model.first.kernel[...]
    parallel = autopar.parallelize(accuracy, method=PLAIN)
    plan = parallel.plan(model, batch)
    assert {v.role for v in plan.values if v.name.startswith("model/")} == {"argument"}
    loss = [parallel(model, batch) for _ in range(2)]
    np.testing.assert_allclose(loss[1], loss_of(model, batch), rtol=1e-5)
    assert not kernel.is_deleted()


def test_jit_inside_and_around():
    inside = autopar.parallelize(nnx.jit(train_step), method=PLAIN)
    ours, theirs = make(), make()
    for batch in batches(2):
        np.testing.assert_allclose(inside(*ours, batch), nnx.jit(train_step)(*theirs, batch), rtol=1e-5)
    check(ours, theirs)
    with pytest.raises(TraceError, match="(?s)is being traced.*outside of other transformations"):
        nnx.jit(autopar.parallelize(train_step, method=PLAIN))(*make(), batches()[0])


def test_compiled_followed_and_created():
    batch = batches()[0]
    step = autopar.parallelize(train_step, method=autopar.DataParallel(zero=3))
    ours, theirs = step.create_state(make, example=(batch,)), nnx.jit(make)()
    check(ours, theirs)
    assert len(ours[0].first.kernel[...].sharding.device_set) == 8 and any(ours[0].first.kernel[...].sharding.spec)
    compiled = step.compile(*ours, batch)
    np.testing.assert_allclose(compiled(*ours, batch), nnx.jit(train_step)(*theirs, batch), rtol=1e-5)
    check(ours, theirs)
    follow = autopar.follow(lambda model, batch: model(batch["x"]), step)
    for each in (ours[0], theirs[0]):
        each.eval()
    np.testing.assert_allclose(follow(ours[0], batch), theirs[0](batch["x"]), rtol=1e-4, atol=1e-5)
    with pytest.raises(StructureChangedError, match="what is no array in them"):
        compiled(*ours, batch)


def test_types_do_for_arrays():
    abstract = nnx.eval_shape(make)
    plan = autopar.parallelize(train_step, method=PLAIN).plan(*abstract, batches()[0])
    assert {"model/first/kernel", "batch/x"} <= {value.name for value in plan.values}
    assert isinstance(abstract[0].first.kernel.get_value(), jax.ShapeDtypeStruct)


def test_mutable_arrays_are_refused():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    model.kernel = nnx.Param(jnp.ones((4, 4)), ref=True)
    with pytest.raises(TraceError, match="(?s)mutable array.*kernel"):
        autopar.parallelize(lambda model, batch: batch @ model.kernel[...], method=PLAIN).plan(model, jnp.ones((8, 4)))


def test_variables_and_states_are_pytrees():
    """The functional style: `nnx.split` outside, `nnx.merge` inside."""
    graph, state = nnx.split(Net(nnx.Rngs(0)))

    def step(state, batch):
        model = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(loss_of)(model, batch)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads)
        nnx.update(model, params)
        return nnx.state(model), loss

    parallel = autopar.parallelize(step, method=PLAIN)
    assert {v.role for v in parallel.plan(state, batches()[0]).values if v.name.startswith("state/")} == {"state"}
    before = np.asarray(state["first"]["kernel"][...])
    new, _ = parallel(state, batches()[0])
    assert new is not state and np.array_equal(state["first"]["kernel"][...], before), "as under `jax.jit`"
    expected, _ = jax.jit(step)(state, batches()[0])
    np.testing.assert_allclose(new["first"]["kernel"][...], expected["first"]["kernel"][...], rtol=1e-4, atol=1e-6)
