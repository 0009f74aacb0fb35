"""Reshards: the steps lead where they should, with the bytes and the seconds they promise, and nothing is cheaper."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from autopar.cost import collective_seconds
from autopar.cost.reshard import cheapest_reshard, reshard_seconds
from autopar.cost.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Permute,
    ReduceScatter,
    Slice,
    apply_to_sharding,
    step_kind,
)
from autopar.mesh import Link, LogicalMesh, Sharding
from autopar.partition.collectives import apply_step

SLOW, FAST = Link(1e-6, 1e8), Link(1e-6, 1e9)


def all_shardings(shape, mesh):
    """Every sharding of a tensor, partial sums included."""
    ndim = len(shape)
    for choice in itertools.product(range(ndim + 2), repeat=len(mesh.shape)):
        named = list(zip(mesh.axis_sizes, choice, strict=True))
        dims = tuple(tuple(a for a, c in named if c == d) for d in range(ndim))
        sharding = Sharding(dims, tuple(a for a, c in named if c == ndim))
        if sharding.is_valid(shape, mesh):
            yield sharding


def pairs_of(shape, mesh, count, seed=0):
    rng = np.random.default_rng(seed)
    known = list(all_shardings(shape, mesh))
    return [(known[rng.integers(len(known))], known[rng.integers(len(known))]) for _ in range(count)]


@pytest.mark.parametrize("mesh_shape", [(8,), (2, 4), (2, 2, 2)])
@pytest.mark.parametrize("shape", [(16, 8), (8, 3, 24)])
def test_steps_lead_to_the_target(mesh_shape, shape):
    mesh = LogicalMesh(mesh_shape, links=(SLOW, FAST, FAST)[: len(mesh_shape)])
    pairs = pairs_of(shape, mesh, 24)
    routes = [cheapest_reshard(shape, 4, source, target, mesh) for source, target in pairs]
    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)

    def program():
        outcome = []
        for (source, target), route in zip(pairs, routes, strict=True):
            # This device's part: its slice of the value; of a partial sum, the value times 1, 2, ... over their sum.
            local, at = jnp.asarray(value), Sharding.replicated(len(shape))
            for dim, axes in enumerate(source.dims):
                if axes:
                    local = apply_step(local, Slice(axes, dim), mesh.axis_sizes)
            if source.partial:
                count = np.prod([mesh.size_of(a) for a in source.partial])
                local = local * (lax.axis_index(source.partial) + 1) / (count * (count + 1) / 2)
            at = source
            for step in route.steps:
                local, at = apply_step(local, step, mesh.axis_sizes), apply_to_sharding(step, at, mesh)
            assert at == target
            assert local.shape == target.local_shape(shape, mesh)
            outcome.append(lax.psum(local, target.partial) if target.partial else local)
        return outcome

    devices = Mesh(np.array(jax.devices()[:8]).reshape(mesh_shape), tuple(mesh.axis_sizes))
    specs = [PartitionSpec(*(axes or None for axes in target.dims)) for _, target in pairs]
    got = jax.jit(jax.shard_map(program, mesh=devices, in_specs=(), out_specs=specs, check_vma=False))()
    for result, pair in zip(got, pairs, strict=True):
        np.testing.assert_allclose(result, value, rtol=1e-5, err_msg=str(pair))


@pytest.mark.parametrize("mesh_shape", [(8,), (2, 4), (2, 2, 2)])
def test_seconds_are_those_of_the_steps(mesh_shape):
    shape, mesh = (16, 8, 4), LogicalMesh(mesh_shape, links=(SLOW, FAST, FAST)[: len(mesh_shape)])
    for source, target in pairs_of(shape, mesh, 50, seed=1):
        route, at, seconds = cheapest_reshard(shape, 4, source, target, mesh), source, 0.0
        for step in route.steps:
            following = apply_to_sharding(step, at, mesh)
            counted = following if isinstance(step, AllGather) else at
            num_bytes = np.prod(counted.local_shape(shape, mesh)) * 4
            if step_kind(step) is not None:
                seconds += collective_seconds(step_kind(step), int(num_bytes), step.axes, mesh)
            at = following
        assert route.seconds == pytest.approx(seconds, abs=1e-13)
        assert reshard_seconds(shape, 4, [source], [target], mesh)[0, 0] == route.seconds


def test_triangle_inequality():
    shape, mesh = (8, 8), LogicalMesh((2, 4), links=(SLOW, FAST))
    known = list(all_shardings(shape, mesh))
    table = reshard_seconds(shape, 4, known, known, mesh)
    detour = functools.reduce(np.minimum, (table[:, [k]] + table[[k], :] for k in range(len(known))))
    assert np.all(table <= detour + 1e-13)
    assert np.all(np.diag(table) == 0)


def test_classics():
    """What an expert would write."""
    mesh = LogicalMesh((2, 4), links=(SLOW, FAST))

    def steps(source, target, shape=(1024, 1024)):
        return cheapest_reshard(shape, 4, source, target, mesh).steps

    whole, rows, columns = Sharding(((), ())), Sharding((("y",), ())), Sharding(((), ("y",)))
    assert steps(whole, rows) == (Slice(("y",), 0),)
    assert steps(rows, whole) == (AllGather(("y",), 0),)
    assert steps(rows, columns) == (AllToAll(("y",), 0, 1),)
    assert steps(Sharding(((), ()), ("y",)), rows) == (ReduceScatter(("y",), 0),)
    assert steps(Sharding(((), ()), ("x", "y")), whole) == (AllReduce(("x", "y")),)
    both = LogicalMesh((4, 4), links=(FAST, FAST))
    moved = cheapest_reshard((4, 1), 4, Sharding((("x",), ())), Sharding((("y",), ())), both)
    assert moved.steps == (Permute("x", "y", 0, ("x", "y")),)


def test_whole_before_it_is_a_partial_sum():
    mesh = LogicalMesh((8,))
    rows, partial = Sharding((("x",),)), Sharding(((),), ("x",))
    assert [type(s).__name__ for s in cheapest_reshard((16,), 4, rows, partial, mesh).steps] == ["AllGather", "Mask"]
