"""The decision: everything that a plan fixes about one step, and what is predicted of it.

In:     what the passes found (`planner.py`).
Out:    `Decision`, frozen, saved as JSON (`record.py`, `read.py`); `Cost` and `Figures`, its prediction; `Origin`, what it came
        from, which stays in memory.
Method: the plan holds the choice of every decision, so that loading it needs no solver, and fingerprints of program and
        cluster, so that a stale one is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.intra_op.sharded import Collective
from autopar.ir.program import Program
from autopar.ir.trace.state import Roles
from autopar.markup import facts
from autopar.mesh import Cluster, LogicalMesh, Sharding
from autopar.options import Options
from autopar.plan.profile import Profile
from autopar.plan.words import ValueRole, bytes_text, seconds_text
from autopar.streams.assemble import ONE_PROGRAM, StepPlan
from autopar.streams.instructions import Instruction
from autopar.streams.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Search:
    """What planning tried before it decided.

    Attributes:
        tried: (what, its predicted seconds, or why it has none), in the order in which it was tried.
        pass_seconds: (pass, CPU seconds that it took).
        ended_early: Why planning ended before all was tried; "": it did not.
    """

    tried: tuple[tuple[str, str], ...] = ()
    pass_seconds: tuple[tuple[str, float], ...] = ()
    ended_early: str = ""

    @property
    def planned(self) -> tuple[tuple[str, str], ...]:
        """What was planned to the end."""
        return tuple(pair for pair in self.tried if pair[1][:1].isdigit())

    @property
    def pruned(self) -> tuple[tuple[str, str], ...]:
        """What was proved, or is known well enough, to be no better, and given up."""
        return tuple(pair for pair in self.tried if pair[1].startswith(("left out", "at least")))

    @property
    def failed(self) -> tuple[tuple[str, str], ...]:
        """What does not fit, or cannot be done."""
        return tuple(pair for pair in self.tried if pair not in (*self.planned, *self.pruned))

    def __str__(self) -> str:
        counts = f"{len(self.planned)} planned, {len(self.pruned)} left out, {len(self.failed)} impossible"
        passes = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in self.pass_seconds)
        early = f"; ended early: {self.ended_early}" if self.ended_early else ""
        return counts + (f" ({passes})" if passes else "") + early


@dataclass(frozen=True, slots=True)
class Figures:
    """What one step does, counted.

    Attributes:
        model_seconds: Its multiplications on all devices at once, each at the datasheet's peak for its operands, and
            nothing else: those that the step would need had it all memory, recomputation left out.
        hardware_seconds: The same with what is computed again, because the step says so (`jax.checkpoint`) or the plan.
        amount: What one step learns from: so many of `unit`; 0: nothing was recognised as a batch.
        unit: `"tokens"` or `"samples"`.
        link_bytes: By level of the machine, what one device sends over it in a step, on average: (level, bytes), the
            nearest first.
        watts: Of all devices; None: a device does not state it.
        price_per_hour: Of all devices; None: the cluster does not state it.
    """

    model_seconds: float = 0.0
    hardware_seconds: float = 0.0
    amount: int = 0
    unit: str = "samples"
    link_bytes: tuple[tuple[str, int], ...] = ()
    watts: float | None = None
    price_per_hour: float | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Cost:
    """What one step is predicted to cost.

    Attributes:
        step_seconds: Kernels, what is exposed of collectives, and waiting.
        compute_seconds: Time of the kernels on one device.
        communication_seconds: Time of all collectives, hidden behind kernels or not.
        bubble_seconds: Idle time of pipeline stages; 0 without a pipeline.
        peak_bytes: Per stage, most bytes alive on one device.
        argument_bytes: Bytes of all arguments on one device.
        collectives: All communication of one step.
        optimality_gap: (cost - proven lower bound) / cost; 0: no other choice on this mesh (of a stage, on its mesh) costs
            less. The cost counts kernels in full, and of each collective the part that nothing hides: that is read off
            the simulated program for each kind of collective, and taken for all others of the kind, also of plans that
            were not simulated. So it is a proof about these costs, not about the clock, which ranks meshes and methods.
            Stages of a pipeline count all collectives in full.
        solver_status: `"optimal"`: the gap is 0; `"feasible"`: it is not.
        planning_seconds: From trace to plan.
        exposed_seconds: Of each of `collectives`, the seconds of a step in which it runs and no kernel does, all its times
            together; the others are hidden.
        figures: What is counted beside the seconds; `mfu`, `hfu`, `rate` and the like follow from them.
        host_bytes: Most bytes that one device has in its host's memory at once.
        search: What was tried; of a plan from a file, nothing is known of that.
    """

    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    bubble_seconds: float
    peak_bytes: tuple[int, ...]
    argument_bytes: int
    collectives: tuple[Collective, ...]
    optimality_gap: float
    solver_status: str
    planning_seconds: float
    exposed_seconds: tuple[float, ...] = ()
    figures: Figures = Figures()
    host_bytes: int = 0
    search: Search = field(default=Search(), compare=False)

    def __repr__(self) -> str:
        return f"Cost({'; '.join(f'{name} {words}' for name, words in self._told())})"

    def _repr_html_(self) -> str:
        return facts("Predicted cost of a step", self._told())

    def _told(self) -> Iterator[tuple[str, str]]:
        """(name, words) of what one asks for first."""
        yield "step", seconds_text(self.step_seconds)
        yield "compute", seconds_text(self.compute_seconds)
        yield "waiting for collectives", seconds_text(self.exposed_communication_seconds)
        if self.bubble_seconds:
            yield "without work", seconds_text(self.bubble_seconds)
        yield "peak", bytes_text(max(self.peak_bytes, default=0))
        yield "solver", f"{self.solver_status}, gap {self.optimality_gap:.2%}"

    @property
    def exposed_communication_seconds(self) -> float:
        """Part of the step in which a device waits for collectives, on average over all devices."""
        return max(0.0, self.step_seconds - self.compute_seconds - self.bubble_seconds)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: FLOPs that the step needs, over those that all devices could do meanwhile at their peak.

        Counted are matrix products, and kernels that state their FLOPs, of the step as it is written; what it computes
        again for lack of memory is not (Chowdhery et al., "PaLM", 2022, appendix B). The peak is the datasheet's, without
        sparsity, for the operands' dtypes; products of float32 are held against TF32 where JAX computes them so.
        """
        return self.figures.model_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilization: the same with the FLOPs that are computed again; where none are, it equals `mfu`."""
        return self.figures.hardware_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def rate(self) -> float:
        """What is learnt from, per second: so many of `figures.unit`; 0: the step has no batch."""
        return self.figures.amount / self.step_seconds if self.step_seconds else 0.0

    @property
    def joules(self) -> float | None:
        """Energy of one step at the devices' rated power; None: a device does not state it (`Device.watts`)."""
        return None if self.figures.watts is None else self.figures.watts * self.step_seconds

    @property
    def price(self) -> float | None:
        """Of one step; None: the cluster does not state one (`Cluster.price_per_hour`)."""
        hourly = self.figures.price_per_hour
        return None if hourly is None else hourly * self.step_seconds / 3600


@dataclass(frozen=True, slots=True)
class Submesh:
    """The devices of one stage: so many of the cluster's, in order from `first`."""

    num_devices: int
    first: int = 0

    def __str__(self) -> str:
        return str(self.first) + (f"-{self.first + self.num_devices - 1}" if self.num_devices > 1 else "")


@dataclass(frozen=True, slots=True)
class Recomputed:
    """What the backward pass of a stage recomputes instead of keeping it.

    Attributes:
        level: How many operations it may recompute for each byte saved; 0: only what is cheap, inf: everything.
        operations: Forward operations recomputed for a microbatch that are not cheap.
        seconds: Time that these take in one step.
        kept_bytes: Kept for each microbatch in flight, on one device.
        saved_bytes: As much more would be kept if only what is cheap were recomputed.
    """

    level: float = 0.0
    operations: int = 0
    seconds: float = 0.0
    kept_bytes: int = 0
    saved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers on one submesh, as a plan tells of them and its file keeps them.

    Apart from `StagePlan`, which holds equations: a plan must be read without its program.

    Attributes:
        submesh: Its devices.
        logical_mesh: The mesh they form.
        layers: Which layers; without a pipeline the only stage holds the whole step, one layer.
        choices: Choice of every decision of this stage, in graph order.
        operations: The first and the last operation of its forward pass, for people.
        recomputed: What its backward pass recomputes.
    """

    submesh: Submesh
    logical_mesh: LogicalMesh
    layers: tuple[int, ...]
    choices: tuple[int, ...] = field(default=(), repr=False)
    operations: tuple[str, str] = ("", "")
    recomputed: Recomputed = Recomputed()


@dataclass(frozen=True, slots=True)
class Value:
    """One value of the program and how it is sharded, as a plan tells of it and its file keeps it: without variables.

    Attributes:
        name: Path of an argument or result, or the operation and line that make it.
        role: What it is to the user.
        shape: Global shape.
        dtype: Element type.
        sharding: How it lies on the mesh.
        stage: On the mesh of which stage.
        on_host: Whether it lies in the memory of the hosts.
    """

    name: str
    role: ValueRole
    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding
    stage: int = 0
    on_host: bool = False

    @property
    def lies(self) -> str:
        """Where and how, in words."""
        return f"{self.sharding} on the host" if self.on_host else str(self.sharding)


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """What a plan came from; apart from what the search hands down (`search.request`), which knows methods.

    Attributes:
        program: The traced step.
        roles: Which of its inputs are state, batch, donated.
        cluster: The machine.
        options: What was asked for.
        pipeline: What was planned; on one mesh a pipeline of one stage.
    """

    program: Program
    roles: Roles
    cluster: Cluster
    options: Options
    pipeline: StepPlan


@dataclass(frozen=True)
class Decision:
    """What was decided about one step on one cluster; `Plan` (`report/plan.py`) is this and what one can ask of it.

    Attributes:
        name: The step's name.
        method: What was asked for.
        stages: Stages; one without a pipeline.
        num_microbatches: Parts the batch is worked through in.
        schedule: Name of the pipeline schedule; `"none"` without a pipeline.
        shardings: PartitionSpec per argument leaf, in the arguments' own tree: `(args, kwargs)`. A plan read from a
            file has them by path until it is compiled.
        cost: The prediction.
        values: Arguments, results and the activations that go through memory.
        streams: Per mesh, what it runs.
        alternatives: Other mesh shapes that were tried: (mesh, predicted seconds or why not).
        fingerprints: Of the program and the cluster; beside them the version of JAX.
        machine: The cluster in words.
        events: The simulated step, on the clock.
        budget_bytes: What one device could use; inf: as much as it wanted.
        microbatch_semantics: `"exact"`, or `"per_microbatch"` where the user allowed it.
        parts: Into how many parts scans over layers are taken, which stages are made of; 1: there are none.
        profile: What the step does with its time and memory.
        padded: Lengths of the step's products that are made longer, so that devices can split them, each with what it
            becomes: of what lies between products, and of no argument or result.
        offloaded: Paths of the arguments that lie in the memory of the hosts.
    """

    name: str
    method: str
    stages: tuple[Stage, ...]
    num_microbatches: int
    schedule: str
    shardings: Any = field(hash=False)
    cost: Cost
    values: tuple[Value, ...] = field(repr=False)
    streams: Mapping[int, tuple[Instruction, ...]] = field(hash=False, repr=False)
    alternatives: tuple[tuple[str, str], ...]
    fingerprints: Mapping[str, str] = field(hash=False)
    machine: str = ""
    events: Timeline = field(default=Timeline(()), repr=False, compare=False)
    microbatch_semantics: str = "exact"
    parts: int = 1
    budget_bytes: float = math.inf
    profile: Profile = field(default=Profile(), repr=False, compare=False)
    padded: tuple[tuple[int, int], ...] = ()
    offloaded: tuple[str, ...] = ()
    origin: Origin | None = field(default=None, compare=False, repr=False, hash=False)
    """The planning problem in memory, for `explain`; absent in a plan read from a file until it is compiled."""

    @property
    def is_one_program(self) -> bool:
        """Whether the step is one program on one mesh, and not cut into stages."""
        return self.schedule == ONE_PROGRAM

    @property
    def interval_seconds(self) -> float:
        """Predicted time from one call to the next where calls do not wait for each other: of the busiest mesh."""
        return max(self.events.busy_seconds.values(), default=self.cost.step_seconds)

    @property
    def attached(self) -> Origin:
        """The planning problem in memory, where it is known to be there."""
        assert self.origin is not None, "the plan was read from a file and not compiled since"
        return self.origin

    @property
    def mesh(self) -> LogicalMesh:
        """The logical mesh of the first stage."""
        return self.stages[0].logical_mesh
