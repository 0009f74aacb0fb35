"""A planning request: a step, its cluster, and the user's method.

In:     (a type only; `planner.py` and `restore.py` make it.)
Out:    `Request`, handed through the search; `Narrowed`, which one search tells the next.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

from autopar.grouping import grouped
from autopar.ir.program import Program
from autopar.ir.trace.state import Roles
from autopar.mesh import Cluster, LogicalMesh
from autopar.options import Options
from autopar.search.methods import Method, count_of


@dataclass(frozen=True, slots=True)
class Narrowed:
    """What a search has shown to be worth searching again for a rewritten step.

    Attributes:
        meshes: The meshes with the fastest plans; (): all that the method allows.
        stages: Whether a pipeline was the fastest plan, or came near it.
        seconds: Of the fastest plan's step.
    """

    meshes: tuple[LogicalMesh, ...] = ()
    stages: bool = True
    seconds: float = math.inf


@dataclass(frozen=True, eq=False)
class Request:
    """A step to be planned.

    Attributes:
        program: The traced step, flat, or a rewritten one.
        roles: Which of its inputs are state, batch, donated.
        cluster: The cluster.
        method: The user's method.
        beat: Seconds of the best step known, on other meshes or without this rewriting: slower plans are of no use.
        narrowed: What to search of it, if the step without this rewriting has shown that; None: all that the method allows.
        thorough: Whether all work repays, as where the user names a mesh.
        ends: When planning is to end, by `time.monotonic()`.
    """

    program: Program
    roles: Roles
    cluster: Cluster
    method: Method
    beat: float = math.inf
    narrowed: Narrowed | None = None
    thorough: bool = False
    ends: float = math.inf

    @functools.cached_property
    def options(self) -> Options:
        """The method's options."""
        return self.options_of(self.method)

    def options_of(self, method: Method) -> Options:
        """The options of a method that may differ from the request's, which then says what repays: each microbatch gains."""
        options = method.options()
        gaining = self.method.options().repaying_steps * count_of(method)
        steps = math.inf if self.thorough else min(options.repaying_steps, gaining)
        return dataclasses.replace(options, ends=self.ends, repaying_steps=steps)

    @property
    def budget_bytes(self) -> float:
        """Memory budget of one device, bytes."""
        return self.options.budget_bytes(self.cluster.device.memory_bytes)

    @property
    def batch_sizes(self) -> list[int]:
        """Number of samples in each batch argument that microbatches share; of a stack for a loop of steps, in each step."""
        return [self.program.in_avals[k].shape[dim] for k, dim in self.roles.leading.items()]

    def divides_into(self, count: int) -> bool:
        """Whether there is a batch, and it divides into so many microbatches."""
        return bool(self.batch_sizes) and all(size % count == 0 for size in self.batch_sizes)

    def undivided(self, count: int, devices: int) -> tuple[str, int, int] | None:
        """Path and samples of a leaf of the batch whose microbatches do not divide over devices; what these should divide."""
        for leaf, dims in self.roles.dims.items():
            # Microbatches split the first of these dims, devices any.
            shape = self.program.in_avals[leaf].shape
            sizes = [(shape[d], devices * (count if d == min(dims) else 1)) for d in dims]
            if all(size % wanted for size, wanted in sizes):
                return self.program.in_paths[leaf], *max(sizes)
        return None

    def microbatch_counts(self, least: int = 2, most: float = math.inf, shared: bool = False) -> list[int]:
        """Numbers of microbatches to try: the least divisor of the batch from each power of two on.

        `shared`: also the first one whose microbatches divide best over the devices (on 4 devices 20 rows, not 30 or 15).
        """
        whole, devices = math.gcd(*self.batch_sizes), self.cluster.num_devices
        divisors = (count for count in range(least, int(min(whole, most)) + 1) if whole % count == 0)
        found: list[int] = []
        for counts in grouped((count.bit_length(), count) for count in divisors).values():
            found.append(counts[0])
            best = max(counts, key=lambda count: math.gcd(whole // count, devices))
            if shared and math.gcd(whole // best, devices) > math.gcd(whole // counts[0], devices):
                found.append(best)
        return found

    def most_microbatches(self, wanted: int, devices: int = 1) -> int:
        """The largest number of microbatches up to `wanted` that divides the batch; `wanted` if there is no batch.

        `devices`: those that each microbatch should divide over, if any does.
        """
        if not self.batch_sizes:
            return wanted
        counts = [count for count in range(wanted, 0, -1) if self.divides_into(count)]
        return next((count for count in counts if self.undivided(count, devices) is None), counts[0])

    def of(self, program: Program) -> Request:
        """The same request for a rewritten step."""
        return dataclasses.replace(self, program=program)
