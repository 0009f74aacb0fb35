"""Compiles the programs of a step for the devices of this process, equal programs only once.

In:     a `StepPlan`; devices, which may be descriptions of absent ones.
Out:    `Compiled`: XLA's executables.
Method: equal stages on meshes of the same shape have the same program, except for its devices. XLA binds an executable to
        devices, so one is compiled, and loaded again for the devices of each other stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar._jax import load_elsewhere
from autopar.errors import DeviceCountError
from autopar.mesh import LogicalMesh
from autopar.partition.host_calls import Watch
from autopar.partition.overlap import compile_lowered
from autopar.partition.task import DeviceProgram, Function, device_program, jitted
from autopar.streams.assemble import StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """The compiled programs of a step.

    Attributes:
        places: The device mesh of each stage.
        functions: What each program was compiled from, by name.
        programs: XLA's executables, by name.
        watch: Collects the exceptions of host callbacks.
        num_compiled: Number of programs that were compiled; the others equal one of these.
    """

    places: tuple[jax.sharding.Mesh, ...]
    functions: Mapping[str, DeviceProgram[Function]]
    programs: Mapping[str, jax.stages.Compiled]
    watch: Watch
    num_compiled: int


def compile_step(planned: StepPlan, devices: Sequence[Any], options: Mapping[str, Any] | None = None) -> Compiled:
    """Compile all programs of a step for the devices of its cluster, in order; `options` go to XLA's compiler.

    Raises `DeviceCountError`: there are fewer or more devices than meshes have places.
    """
    watch, compiler = Watch(), _Compiler(len(planned.stages) > 1, options)
    places: list[jax.sharding.Mesh] = []
    functions: dict[str, DeviceProgram[Function]] = {}
    programs: dict[str, jax.stages.Compiled] = {}
    for stage, own in zip(planned.stages, planned.devices_of_stages(devices), strict=True):
        places.append(device_mesh(stage.mesh, own))
        for task in stage.tasks:
            name = task.task.name
            made = device_program(task, stage.mesh, places[-1], planned.streams.overwritten[name], watch)
            functions[name], programs[name] = made, compiler.compile(made, places[-1])
    return Compiled(tuple(places), functions, programs, watch, compiler.num_compiled)


def device_mesh(mesh: LogicalMesh, devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
    """The logical mesh over real devices, in their order.

    Raises `DeviceCountError`: there are fewer or more devices than the mesh has places.
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


class _Compiler:
    """Compiles programs, equal ones once."""

    def __init__(self, has_equals: bool, options: Mapping[str, Any] | None):
        # By their text: compiled programs, and the devices that they were compiled for.
        self._known: dict[str, tuple[jax.stages.Compiled, tuple[jax.Device, ...]]] = {}
        self._has_equals, self._options = has_equals, dict(options or {})
        self.num_compiled = 0

    def compile(self, made: DeviceProgram[Function], places: jax.sharding.Mesh) -> jax.stages.Compiled:
        devices = tuple(places.devices.flat)
        # Programs of equal text take the same arguments only if unused arguments are kept.
        function, operands = jitted(made, lambda kind: kind.on(places), keep_unused=self._has_equals)
        lowered = function.lower(*operands)
        # An executable with callbacks cannot be loaded for other devices.
        may_be_equal = self._has_equals and not made.calls_host
        text = lowered.as_text().replace(made.title, "task") if may_be_equal else ""
        taken = self._take_over(text, devices) if text else None
        if taken is not None:
            return taken
        compiled = compile_lowered(lowered, dict(made.options), devices[0].platform, self._options)
        self.num_compiled += 1
        if text:
            self._known[text] = compiled, devices
        return compiled

    def _take_over(self, text: str, devices: tuple[jax.Device, ...]) -> jax.stages.Compiled | None:
        known, own = self._known.get(text, (None, devices))
        if known is None or own == devices:
            return known
        if jax.config.jax_compilation_cache_dir:
            # XLA:CPU cannot serialize again an executable that it read from JAX's cache: the copy would lack functions.
            return None
        try:
            return load_elsewhere(known, own, devices)
        except Exception:  # the platform cannot load it for other devices: compile it
            return None
