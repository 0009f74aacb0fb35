"""The local runtime: one process, its own devices, one compiled program.

In:     a flat program, its sharded body, the devices.
Out:    `Executable`: compiled once, called with flat arrays.
Method: the per-device program under `jax.jit` with the plan's shardings; state is donated. Arrays that are not where the
        plan wants them are moved in one batched `device_put`; what is donated and passed twice is copied (`memory.py`).
        A step that calls the host is waited for: what a callback raises is raised by the call of the step in which it did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.errors import DeviceCountError, StepError
from autopar.intra_op.sharded import Body, Compute, Region, calls_host
from autopar.mesh import LogicalMesh
from autopar.partition.host_calls import Watch, watched
from autopar.partition.program import global_program
from autopar.runtime.failure import CallbacksRaised, Place, cause_of, donated_error, is_gone, lines_of, step_error
from autopar.runtime.memory import Ownership, let_go
from autopar.runtime.nans import check_results
from autopar.runtime.overlap import compile_lowered, overlap_options


@dataclass(frozen=True, slots=True, eq=False)
class Executable:
    """A compiled step over flat arrays.

    Attributes:
        compiled: XLA's executable.
        in_shardings: Where each input must be.
        donated: For each input, whether its memory is reused.
        name: Of the step.
        paths: Names of its arguments.
        watch: Where callbacks leave what they raise; None: there are none. If there are, the last result tells that the
            step has ended.
        lines: The user's lines that it covers.
        ownership: Which arrays it may overwrite without asking.
        devices: It runs on.
    """

    compiled: jax.stages.Compiled
    in_shardings: tuple[jax.sharding.NamedSharding, ...]
    donated: tuple[bool, ...]
    name: str
    paths: tuple[str, ...]
    watch: Watch | None
    lines: str
    ownership: Ownership
    devices: tuple[jax.Device, ...]
    _seen: list[Any]
    """For each input, the sharding object last found equal to what is wanted: comparing takes longer than looking."""

    def place(self, arrays: Sequence[Any]) -> list[jax.Array]:
        """Put arrays where the program wants them; those that are there already are passed on as they are."""
        placed, seen = list(arrays), self._seen
        away = []
        for k, array in enumerate(placed):
            if isinstance(array, jax.Array):
                if array.is_deleted():  # JAX crashes on it where it has several devices
                    gone = [path for path, a in zip(self.paths, arrays, strict=False) if is_gone(a)]
                    raise donated_error(self.name, gone)
                sharding = array.sharding
                if sharding is seen[k]:
                    continue
                wanted = self.in_shardings[k]
                # An equivalent sharding by another name will do, but not for what is donated: it may be the user's own.
                if sharding == wanted or (not self.donated[k] and sharding.is_equivalent_to(wanted, array.ndim)):
                    seen[k] = sharding
                    continue
            away.append(k)
        self._move(placed, away)
        self._move(placed, self.ownership.shared(arrays, placed, [k for k in away if self.donated[k]]))
        return placed

    def _move(self, placed: list[Any], away: Sequence[int]) -> None:
        if away:
            # The user's own array must survive the donation of its placed copy. `device_put` shares memory with it where
            # it can, also when told not to (a replica on the same device; NumPy memory on CPU): copy first.
            moved = jax.device_put(
                [copied(placed[k]) if self.donated[k] else placed[k] for k in away],
                [self.in_shardings[k] for k in away],
            )
            for k, array in zip(away, moved, strict=True):
                placed[k] = array

    def __call__(self, arrays: Sequence[Any]) -> list[jax.Array]:
        """Run one step.

        Raises:
            StepError: It failed; says where.
            DonatedError: An argument's memory was taken over before.
        """
        placed = self.place(arrays)
        try:
            results = self.compiled(*placed)
            self.ownership.set_results(results)
            check_results(results)
            return results if self.watch is None else self._watched(results, self.watch)
        except Exception as error:
            failure, cause = self._failure(error, arrays)
            raise failure from cause
        finally:
            if len(self.devices) > 1:
                let_go(placed, self.donated)

    def _watched(self, results: list[jax.Array], watch: Watch) -> list[jax.Array]:
        *results, end = results
        end.block_until_ready()
        raised = watch.take()
        if raised:
            raise CallbacksRaised(raised, results)
        return results

    def _failure(self, error: Exception, arrays: Sequence[Any]) -> tuple[StepError, BaseException]:
        lost = any(map(is_gone, arrays))
        if isinstance(error, CallbacksRaised):
            first = error.raised[0]
            results = error.results if all(r.makes_nothing for r in error.raised) else None
            place = Place(None, "", None, f"`{first.operation}`")
            return step_error(self.name, place, first.error, lost, results), first.error
        cause = cause_of(error)
        return step_error(self.name, Place(None, "", None, self.lines), cause, lost), cause


def copied(array: Any) -> Any:
    """The same values in memory of their own."""
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
    paths: Sequence[str],
    options: Mapping[str, Any] | None = None,
) -> Executable:
    """Compile a sharded program for real devices, which need not be there.

    Args:
        body: The sharded program.
        mesh: Its mesh.
        devices: As many as the mesh has places.
        avals: Type of each input.
        donated: For each input, whether its memory may be reused.
        name: Name of the compiled function, as profilers show it.
        paths: Names of the arguments.
        options: Of XLA's compiler.
    """
    places = device_mesh(mesh, devices)
    shardings = tuple(jax.sharding.NamedSharding(places, sharding.partition_spec()) for _, sharding in body.inputs)
    results = [jax.sharding.NamedSharding(places, sharding.partition_spec()) for _, sharding in body.outputs]
    watch = Watch() if calls_host(body) else None
    program = global_program(body if watch is None else watched(body, watch, name, None), places)
    ends = [] if watch is None else [jax.sharding.NamedSharding(places, jax.sharding.PartitionSpec())]

    def step(*arrays: jax.Array) -> list[jax.Array]:
        return [*program(*arrays), *(jnp.int8(0) for _ in ends)]

    step.__name__ = step.__qualname__ = name
    arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s) for a, s in zip(avals, shardings, strict=True)]
    jitted = jax.jit(
        step,
        in_shardings=shardings,
        out_shardings=[*results, *ends],
        donate_argnums=tuple(k for k, d in enumerate(donated) if d),
    )
    overlap = overlap_options(body, mesh)
    compiled = compile_lowered(jitted.lower(*arguments), overlap, devices[0].platform, options)
    lines = lines_of([i.eqn for i in body.instructions if isinstance(i, Compute | Region)])
    types = [(s.shard_shape(a.shape), a.dtype) for a, s in zip(avals, shardings, strict=True)]
    ownership = Ownership(types, donated)
    return Executable(
        compiled,
        shardings,
        tuple(donated),
        name,
        tuple(paths),
        watch,
        lines,
        ownership,
        tuple(devices),
        list(shardings),
    )
