"""Runs and checkpoints of states that are objects."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import autopar
from autopar import checkpoint
from autopar.errors import StructureChangedError
from tests.adapters import test_equinox as of_eqx
from tests.adapters import test_nnx as of_nnx
from tests.adapters.test_nnx import PLAIN, batches

STAGES = autopar.PipelineParallel(num_stages=2, num_microbatches=1)


def nnx_step(state, batch):
    return of_nnx.train_step(*state, batch)


def nnx_loss(state, batch):
    state[0].eval()
    return of_nnx.loss_of(state[0], batch)


def eqx_step(state, batch):
    *state, loss = of_eqx.train_step(*state, batch, jax.random.key(0), of_eqx.ADAM)
    return tuple(state), loss


def eqx_loss(state, batch):
    model = eqx.nn.inference_mode(state[0])
    out = jax.vmap(model, axis_name="batch", in_axes=(0, None, None))(batch["x"], state[1], jax.random.key(0))[0]
    return jnp.mean((out - batch["y"]) ** 2)


@pytest.mark.parametrize("of, step, loss", [(of_nnx, nnx_step, nnx_loss), (of_eqx, eqx_step, eqx_loss)])
def test_fit(of, step, loss, tmp_path):
    """A run that is broken off and goes on under another plan ends where one without a break does."""
    train = autopar.parallelize(step, method=PLAIN)
    evaluated = []
    options = {"checkpoint_dir": tmp_path, "save_every": 1}
    autopar.fit(
        train,
        of.make(),
        batches(2),
        **options,
        eval_step=autopar.follow(loss, train),
        eval_batches=batches(1),
        loggers=lambda number, scalars: evaluated.append(scalars),
    )
    assert any(key.startswith("eval") for scalars in evaluated for key in scalars)
    state, metrics = autopar.fit(autopar.parallelize(step, method=STAGES), of.make(), batches(3), **options)
    assert list(metrics) == [2]
    expected, alone = autopar.fit(step if of is of_eqx else train, of.make(), batches(3))
    of.check(state, expected)
    np.testing.assert_allclose(metrics[2], alone[2], rtol=1e-4)


def test_nnx_objects_in_checkpoints(tmp_path):
    """Each array once, under the user's paths, and read back under another plan as new objects."""
    objects = of_nnx.make()
    autopar.parallelize(of_nnx.train_step, method=autopar.DataParallel(zero=3))(*objects, batches()[0])
    checkpoint.save(tmp_path, objects).wait()
    step = autopar.parallelize(of_nnx.train_step, method=STAGES)
    compiled = step.compile(*objects, batches()[0])
    found = checkpoint.restore(tmp_path, nnx.eval_shape(of_nnx.make), compiled=compiled)
    of_nnx.check(found, objects)
    assert found[0].last.kernel is found[0].first.kernel and found[0] is not objects[0]
    assert len(found[0].first.kernel[...].sharding.device_set) == 4
    compiled(*found, batches()[1])


def test_a_run_keeps_what_is_no_array():
    def step(model, batch):
        model.eval()
        return of_nnx.loss_of(model, batch)

    with pytest.raises(StructureChangedError, match="changes what is no array in the state"):
        autopar.fit(autopar.parallelize(step, method=PLAIN), of_nnx.Net(nnx.Rngs(0)), batches(1))
