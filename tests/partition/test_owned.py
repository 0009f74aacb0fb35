"""What is moved as a partial sum keeps every bit: the sign of zero, and with it the order of ties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from autopar.cost.steps import AllReduce, ReduceScatter
from autopar.partition.collectives import apply_step
from autopar.partition.owned import without_loss
from tests.models.case import Case
from tests.sweep import check_faithful, compile_case

ZEROS = np.array([0.0, -0.0, 1.5, -0.0, 0.0, -2.5, 0.0, -0.0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(8, 2), (16,), (8, 3), (2, 8)])
def test_every_bit_is_moved(dtype, shape):
    """By an all-reduce and by a reduce-scatter along each dim; an odd number of 16-bit numbers by value only."""
    mesh = jax.make_mesh((8,), ("x",))
    values = np.resize(ZEROS, shape).astype(jnp.dtype(dtype))
    dims = [d for d, size in enumerate(shape) if size % 8 == 0]
    steps = [AllReduce(("x",)), *(ReduceScatter(("x",), d) for d in dims)]

    def device(x):
        owner = jnp.arange(x.size).reshape(x.shape) % 8  # each element has another
        part = jnp.where(owner == lax.axis_index("x"), x, 0)
        move = [lambda parts, s=s: [apply_step(parts[0], s, {"x": 8})] for s in steps]
        return [without_loss([part], [s], {"x": 8}, act)[0] for s, act in zip(steps, move, strict=True)]

    specs = [PartitionSpec(), *(PartitionSpec(*[None] * d, "x") for d in dims)]
    run = jax.shard_map(device, mesh=mesh, in_specs=PartitionSpec(), out_specs=specs, check_vma=False)
    for step, found in zip(steps, jax.jit(run)(values), strict=True):
        found = np.asarray(found)
        np.testing.assert_array_equal(found.astype(np.float32), values.astype(np.float32))
        left = shape[-1] // 8 if step == ReduceScatter(("x",), len(shape) - 1) else shape[-1]
        if dtype == "float32" or left % 2 == 0:
            np.testing.assert_array_equal(np.signbit(found), np.signbit(values))


def step(state, batch):
    """Rows that are looked up, moved, and put in order, where -0.0 comes before 0.0; of a sum, beyond its end too. Columns are
    looked up within the table: a lookup that fills, in a table that one device holds, keeps values only (`owned.py`)."""
    n, ids = batch["n"], batch["ids"]
    rows = {
        "row": state["table"][n],
        "rows": state["table"][ids],
        "turned": jnp.flip(lax.dynamic_slice(state["table"], (n, 0), (1, 8)).reshape(8)),
        "half": state["half"][ids].T,
        "filled": jnp.sum(batch["parts"], 0).at[ids + 2].get(mode="fill", fill_value=np.nan),
        "column": jnp.take_along_axis(state["table"], jnp.full((8, 8), n), axis=1, mode="clip"),
        "read": jax.pure_callback(lambda: ZEROS.astype(np.float32), jax.ShapeDtypeStruct((8,), np.float32)),
    }
    return state, {name: (jnp.signbit(x), lax.top_k(x, 4)) for name, x in rows.items()}


@pytest.mark.parametrize("shape, seeds", [((8,), (0, 1, 2)), ((2, 2, 2), (3, 4))])
def test_ties_are_in_the_order_of_jit(shape, seeds):
    table = np.random.default_rng(0).permuted(np.tile(ZEROS, (8, 1)), axis=1)
    state = {"table": jnp.asarray(table, jnp.float32), "half": jnp.asarray(table, jnp.bfloat16)}
    case = Case(
        "zeros", step, state, ({"n": jnp.int32(5), "ids": jnp.array([1, 7, 0, 3]), "parts": jnp.ones((8, 8, 8))},)
    )
    wanted = jax.jit(step)(state, case.batches[0])[1]
    for seed in seeds:
        compiled = compile_case(case, shape, f"random{seed}")
        check_faithful(compiled)
        jax.tree.map(np.testing.assert_array_equal, compiled(state, case.batches[0])[1], wanted)
