"""The local runtime: one process, its own devices, one compiled program.

In:     a flat program, its sharded body, the devices.
Out:    `Executable`: compiled once, called with flat arrays.
Method: the per-device program under `jax.jit` with the plan's shardings; state is donated. Arrays that are not where the
        plan wants them are moved in one batched `device_put`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.errors import DeviceCountError
from autopar.intra_op.sharded import Body
from autopar.mesh import LogicalMesh
from autopar.partition.program import global_program


@dataclass(frozen=True, slots=True, eq=False)
class Executable:
    """A compiled step over flat arrays.

    Attributes:
        compiled: XLA's executable.
        in_shardings: Where each input must be.
        donated: For each input, whether its memory is reused.
    """

    compiled: jax.stages.Compiled
    in_shardings: tuple[jax.sharding.NamedSharding, ...]
    donated: tuple[bool, ...]
    _seen: list[Any]
    """For each input, the sharding object last found equal to what is wanted: comparing takes longer than looking."""

    def place(self, arrays: Sequence[Any]) -> list[jax.Array]:
        """Put arrays where the program wants them; those that are there already are passed on as they are."""
        placed, seen = list(arrays), self._seen
        away = []
        for k, array in enumerate(placed):
            if isinstance(array, jax.Array):
                sharding = array.sharding
                if sharding is seen[k]:
                    continue
                wanted = self.in_shardings[k]
                # An equivalent sharding by another name will do, but not for what is donated: it may be the user's own.
                if sharding == wanted or (not self.donated[k] and sharding.is_equivalent_to(wanted, array.ndim)):
                    seen[k] = sharding
                    continue
            away.append(k)
        if away:
            # The user's own array must survive the donation of its placed copy. `device_put` shares memory with it where
            # it can, also when told not to (a replica on the same device; NumPy memory on CPU): copy first.
            moved = jax.device_put(
                [_copied(arrays[k]) if self.donated[k] else arrays[k] for k in away],
                [self.in_shardings[k] for k in away],
            )
            for k, array in zip(away, moved, strict=True):
                placed[k] = array
        return placed

    def __call__(self, arrays: Sequence[Any]) -> list[jax.Array]:
        """Run one step."""
        return self.compiled(*self.place(arrays))


def _copied(array: Any) -> Any:
    return jnp.array(array, copy=True) if isinstance(array, jax.Array) else np.array(array)


def device_mesh(mesh: LogicalMesh, devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
    """The logical mesh over real devices, in their order.

    Raises:
        DeviceCountError: There are fewer or more devices than the mesh has places.
    """
    if len(devices) != mesh.num_devices:
        raise DeviceCountError(
            "the plan is for another number of devices.",
            given=f"{len(devices)} devices",
            wrong=f"the mesh {mesh} has {mesh.num_devices} places.",
            do="plan for these devices (step.plan), or pass "
            "cluster=Cluster.local(devices=...) with as many as the plan wants.",
            wanted=mesh.num_devices,
            available=len(devices),
        )
    return jax.sharding.Mesh(np.array(devices).reshape(mesh.shape), tuple(mesh.axis_sizes))


def compile_program(
    body: Body,
    mesh: LogicalMesh,
    devices: Sequence[jax.Device],
    avals: Sequence[Any],
    donated: Sequence[bool],
    name: str,
) -> Executable:
    """Compile a sharded program for real devices.

    Args:
        body: The sharded program.
        mesh: Its mesh.
        devices: As many as the mesh has places.
        avals: Type of each input.
        donated: For each input, whether its memory may be reused.
        name: Name of the compiled function, as profilers show it.
    """
    places = device_mesh(mesh, devices)
    shardings = tuple(jax.sharding.NamedSharding(places, sharding.partition_spec()) for _, sharding in body.inputs)
    results = [jax.sharding.NamedSharding(places, sharding.partition_spec()) for _, sharding in body.outputs]
    program = global_program(body, places)

    def step(*arrays: jax.Array) -> list[jax.Array]:
        return program(*arrays)

    step.__name__ = step.__qualname__ = name
    arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s) for a, s in zip(avals, shardings, strict=True)]
    jitted = jax.jit(
        step, in_shardings=shardings, out_shardings=results, donate_argnums=tuple(k for k, d in enumerate(donated) if d)
    )
    return Executable(jitted.lower(*arguments).compile(), shardings, tuple(donated), list(shardings))
