"""A mesh in JAX's context, and `with_sharding_constraint`, which names its axes."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import ConstraintError

METHODS = Path(__file__).parent.parent / "docs" / "methods.md"
AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
BATCH = {name: np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32) for name in ("x", "y")}
METHOD = autopar.ShardParallel(mesh_shape=(2, 4))


def make_mesh(kind=AUTO, shape=(2, 4), names=("x", "y")):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


def params():
    return {"up": np.eye(8, 16, dtype=np.float32), "down": np.eye(16, 8, dtype=np.float32)}


def step_with(sharding):
    """The step that docs/methods.md prints; None: without the constraint."""

    def train_step(params, batch):
        def loss_fn(params):
            hidden = jnp.tanh(batch["x"] @ params["up"])
            if sharding is not None:
                hidden = jax.lax.with_sharding_constraint(hidden, sharding)
            return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return train_step


def check(step, state=None):
    expected = jax.jit(step_with(None))(params(), BATCH)
    got = step(params() if state is None else state, BATCH)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)
    step(got[0], BATCH)


def spec_of_hidden(step):
    """How the plan's program makes the value that the constraint names."""
    for instruction in step.latest().plan.origin.pipeline.stages[0].sharded.body.instructions:
        eqn = getattr(instruction, "eqn", None)
        if eqn is not None and eqn.primitive.name == "sharding_constraint":
            return instruction.strategy.results[0].partition_spec()
    raise AssertionError("the constraint is not in the program")


@pytest.mark.parametrize(
    "kind, names, method",  # each kind with each method and with each mesh
    [
        (AUTO, ("x", "y"), METHOD),
        (EXPLICIT, ("data",), METHOD),
        (AUTO, ("data",), autopar.DataParallel(zero=3)),
        (EXPLICIT, ("x", "y"), autopar.DataParallel(zero=3)),
        (AUTO, ("x", "y"), autopar.PipelineParallel(num_stages=2, num_microbatches=2)),
        (EXPLICIT, ("data",), autopar.PipelineParallel(num_stages=2, num_microbatches=2)),
    ],
)
def test_a_mesh_in_context_changes_nothing(kind, names, method):
    shape = (2, 4) if len(names) == 2 else (8,)
    expected = jax.jit(step_with(None))(params(), BATCH)
    step = autopar.parallelize(step_with(None), method=method, batch_argnums=1)
    with jax.set_mesh(make_mesh(kind, shape, names)):
        state = step.create_state(lambda: jax.tree.map(jnp.asarray, params()), example=(BATCH,))
        got = step(state, BATCH)
        step(got[0], BATCH)
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5)


def test_arrays_of_an_explicit_mesh():
    mesh = make_mesh(EXPLICIT)
    for context in (contextlib.nullcontext, jax.set_mesh):
        with context(mesh):
            step = autopar.parallelize(step_with(None), method=METHOD, batch_argnums=1)
            check(step, jax.device_put(params(), NamedSharding(mesh, P("x"))))


def test_arrays_of_an_explicit_mesh_in_pieces_and_parts():
    """A pipeline takes the batch apart into microbatches, and stacks into their layers."""

    def step(layers, x):
        grads = jax.grad(lambda w: jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]))(layers)
        return layers - grads

    layers, x = np.stack([np.eye(8, dtype=np.float32)] * 2), BATCH["x"]
    put = NamedSharding(make_mesh(EXPLICIT), P("x"))
    parallel = autopar.parallelize(step, method=autopar.PipelineParallel(num_stages=2, num_microbatches=2))
    got = parallel(jax.device_put(layers, put), jax.device_put(x, put))
    np.testing.assert_allclose(got, jax.jit(step)(layers, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", [P("x", "y"), P("y", None), P(None, ("x", "y"))])
def test_a_constraint_is_a_pin(spec):
    step = autopar.parallelize(step_with(NamedSharding(make_mesh(), spec)), method=METHOD, batch_argnums=1)
    check(step)
    assert spec_of_hidden(step) == spec


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_a_bare_spec_and_the_mesh_in_context(kind):
    step = autopar.parallelize(step_with(P("x", "y")), method=METHOD, batch_argnums=1)
    with jax.set_mesh(make_mesh(kind)):
        check(step)
    assert spec_of_hidden(step) == P("x", "y")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_bare_spec_in_the_old_context():
    step = autopar.parallelize(step_with(P("x", "y")), method=METHOD, batch_argnums=1)
    with make_mesh():
        check(step)
    assert spec_of_hidden(step) == P("x", "y")


def test_the_example_of_the_docs():
    """As printed."""
    blocks = re.findall(r"```python\n(.*?)```", METHODS.read_text(), re.DOTALL)
    (block,) = (text for text in blocks if "with_sharding_constraint" in text)
    names = {"jax": jax, "jnp": jnp, "autopar": autopar, "P": P}
    exec(block, names)
    check(names["train_step"])
    assert spec_of_hidden(names["train_step"]) == P("x", "y")


def test_a_constraint_on_axes_that_the_plan_has_not():
    step = autopar.parallelize(
        step_with(NamedSharding(make_mesh(names=("data", "model")), P("data"))), method=METHOD, batch_argnums=1
    )
    with pytest.raises(ConstraintError, match="no axis 'data'"):
        step(params(), BATCH)
