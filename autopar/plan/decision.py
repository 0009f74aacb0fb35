"""The decision: everything that a plan fixes about one step, and its predicted cost.

In:     (types only; `search/` fills them in.)
Out:    `Decision`, saved as JSON (`record.py`); `Cost` and `Figures`, the prediction; `Origin`, the planning problem that it
        came from, which stays in memory.
Method: the plan holds the choice of every node of the planning problem, so that loading it needs no solver, and fingerprints
        of program and cluster, so that a stale plan is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from autopar.intra_op.sharded import BUCKET_BYTES, Collective
from autopar.ir.program import Program
from autopar.ir.trace.state import Roles
from autopar.markup import facts
from autopar.mesh import Cluster, LogicalMesh, Sharding
from autopar.options import MicrobatchSemantics, Options
from autopar.plan.profile import Profile
from autopar.plan.words import ValueRole, bytes_text, seconds_text
from autopar.streams.assemble import ONE_PROGRAM, StepPlan
from autopar.streams.instructions import Instruction
from autopar.streams.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Search:
    """What planning tried before it decided.

    Attributes:
        tried: (candidate, its predicted seconds, or why it has none), in the order tried.
        pass_seconds: (pass, CPU seconds that it took).
        ended_early: Why planning ended before all candidates were tried; "": it did not.
    """

    tried: tuple[tuple[str, str], ...] = ()
    pass_seconds: tuple[tuple[str, float], ...] = ()
    ended_early: str = ""

    @property
    def planned(self) -> tuple[tuple[str, str], ...]:
        """Candidates that were planned to the end."""
        return tuple(pair for pair in self.tried if pair[1][:1].isdigit())

    @property
    def pruned(self) -> tuple[tuple[str, str], ...]:
        """Candidates left out, or given up, because a bound or an estimate says that they are no better."""
        return tuple(pair for pair in self.tried if pair[1].startswith(("left out", "at least")))

    @property
    def failed(self) -> tuple[tuple[str, str], ...]:
        """Candidates that do not fit, or cannot be done."""
        return tuple(pair for pair in self.tried if pair not in (*self.planned, *self.pruned))

    def __str__(self) -> str:
        counts = f"{len(self.planned)} planned, {len(self.pruned)} left out, {len(self.failed)} impossible"
        passes = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in self.pass_seconds)
        early = f"; ended early: {self.ended_early}" if self.ended_early else ""
        return counts + (f" ({passes})" if passes else "") + early


@dataclass(frozen=True, slots=True)
class Figures:
    """What one step does, in numbers.

    Attributes:
        model_seconds: Time of the step's multiplications alone, on all devices at the datasheet's peak for their operands,
            recomputation left out.
        hardware_seconds: The same with recomputation, both the step's own (`jax.checkpoint`) and the plan's.
        amount: How many of `unit` one step trains on; 0: the step has no recognised batch.
        unit: `"tokens"` or `"samples"`.
        link_bytes: (level of the machine, bytes that one device sends over it in a step, on average), nearest first.
        watts: Rated power of all devices; None: a device does not state it.
        price_per_hour: Price of all devices; None: the cluster does not state it.
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
    """The predicted cost of one step.

    Attributes:
        step_seconds: Kernels, exposed collectives, and idle time.
        compute_seconds: Time of the kernels on one device.
        communication_seconds: Time of all collectives, hidden behind kernels or not.
        bubble_seconds: Idle time of pipeline stages; 0 without a pipeline.
        peak_bytes: Per stage, the peak of bytes live on one device.
        argument_bytes: Bytes of all arguments on one device.
        collectives: All communication of one step.
        optimality_gap: (cost - proven lower bound) / cost; 0: no other choice on this mesh (of a stage, on its mesh) costs
            less. The cost counts kernels in full, and of each collective its exposed part: the simulated program tells it
            for each kind of collective, and it is assumed for all of that kind, also in plans that were not simulated. So
            the gap is a proof about these costs, not about the simulated time, by which meshes and methods are ranked.
            Stages of a pipeline count all collectives in full.
        solver_status: `"optimal"`: the gap is 0; `"feasible"`: it is not.
        planning_seconds: Time from trace to plan.
        exposed_seconds: For each of `collectives`, the seconds of a step in which it runs and no kernel does, over all its
            executions; the rest of its time is hidden.
        figures: What the step does, in numbers; `mfu`, `hfu`, `rate` and the like follow from them.
        host_bytes: Peak bytes that one device has in its host's memory.
        search: What was tried; empty in a plan from a file.
    """

    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    bubble_seconds: float
    peak_bytes: tuple[int, ...]
    argument_bytes: int
    collectives: tuple[Collective, ...]
    optimality_gap: float
    solver_status: Literal["optimal", "feasible"]
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
        """The main figures as (name, text)."""
        yield "step", seconds_text(self.step_seconds)
        yield "compute", seconds_text(self.compute_seconds)
        yield "waiting for collectives", seconds_text(self.exposed_communication_seconds)
        if self.bubble_seconds:
            yield "without work", seconds_text(self.bubble_seconds)
        yield "peak", bytes_text(max(self.peak_bytes, default=0))
        yield "solver", f"{self.solver_status}, gap {self.optimality_gap:.2%}"

    @property
    def exposed_communication_seconds(self) -> float:
        """Seconds of the step in which a device waits for collectives, averaged over all devices."""
        return max(0.0, self.step_seconds - self.compute_seconds - self.bubble_seconds)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the step's FLOPs over those that all devices could do at their peak in the same time.

        Counts matrix products, and kernels that state their FLOPs, of the step as written, without recomputation
        (Chowdhery et al., "PaLM", 2022, appendix B). The peak is the datasheet's, without sparsity, for the operands'
        dtypes; TF32's for products of float32 where JAX computes them in it.
        """
        return self.figures.model_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilization: as `mfu`, with recomputed FLOPs counted too."""
        return self.figures.hardware_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def rate(self) -> float:
        """Throughput in `figures.unit` per second; 0: the step has no batch."""
        return self.figures.amount / self.step_seconds if self.step_seconds else 0.0

    @property
    def joules(self) -> float | None:
        """Energy of one step at the devices' rated power; None: a device does not state it (`Device.watts`)."""
        return None if self.figures.watts is None else self.figures.watts * self.step_seconds

    @property
    def price(self) -> float | None:
        """Price of one step; None: the cluster does not state one (`Cluster.price_per_hour`)."""
        hourly = self.figures.price_per_hour
        return None if hourly is None else hourly * self.step_seconds / 3600


@dataclass(frozen=True, slots=True)
class Submesh:
    """The devices of one stage: `num_devices` of the cluster's, in order from `first`."""

    num_devices: int
    first: int = 0

    def __str__(self) -> str:
        return str(self.first) + (f"-{self.first + self.num_devices - 1}" if self.num_devices > 1 else "")


@dataclass(frozen=True, slots=True)
class Recomputed:
    """What the backward pass of a stage recomputes instead of keeping residuals.

    Attributes:
        level: Operations that it may recompute for each byte saved; 0: only cheap ones, inf: everything.
        operations: Forward operations recomputed per microbatch, without cheap ones.
        seconds: Time of these in one step.
        kept_bytes: Bytes of residuals per microbatch in flight, on one device.
        saved_bytes: How many more it would be if only cheap operations were recomputed.
    """

    level: float = 0.0
    operations: int = 0
    seconds: float = 0.0
    kept_bytes: int = 0
    saved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers on one submesh, as shown and saved.

    Unlike `StagePlan` it holds no equations: a plan can be read without its program.

    Attributes:
        submesh: Its devices.
        logical_mesh: The mesh they form.
        layers: Numbers of its layers; without a pipeline the only stage holds the whole step, one layer.
        choices: The choice of each node of the stage's planning problem, in graph order.
        operations: The first and the last operation of its forward pass, for people.
        recomputed: What its backward pass recomputes.
        bucket_bytes: The most bytes that it sends as one message of several values.
    """

    submesh: Submesh
    logical_mesh: LogicalMesh
    layers: tuple[int, ...]
    choices: tuple[int, ...] = field(default=(), repr=False)
    operations: tuple[str, str] = ("", "")
    recomputed: Recomputed = Recomputed()
    bucket_bytes: int = BUCKET_BYTES


@dataclass(frozen=True, slots=True)
class Value:
    """One value of the program and its sharding, as shown and saved: without variables.

    Attributes:
        name: Path of an argument or result, or the operation and line that compute it.
        role: Its role for the user.
        shape: Global shape.
        dtype: Element type.
        sharding: Its sharding on the mesh.
        stage: The stage on whose mesh it is.
        on_host: Whether it is in the hosts' memory.
    """

    name: str
    role: ValueRole
    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding
    stage: int = 0
    on_host: bool = False

    @property
    def sharding_text(self) -> str:
        """Its sharding as text, and whether it is on the host."""
        return f"{self.sharding} on the host" if self.on_host else str(self.sharding)


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """The planning problem that a plan came from. (`search.request` has the search's own, which knows methods.)

    Attributes:
        program: The traced step.
        roles: Which of its inputs are state, batch, donated.
        cluster: The machine.
        options: The user's options.
        pipeline: The planned step; on one mesh a pipeline of one stage.
    """

    program: Program
    roles: Roles
    cluster: Cluster
    options: Options
    pipeline: StepPlan


@dataclass(frozen=True)
class Decision:
    """All decisions about one step on one cluster; `Plan` (`report/plan.py`) adds the methods that users call.

    Attributes:
        name: The step's name.
        method: The user's method.
        stages: Stages; one without a pipeline.
        num_microbatches: Number of parts that the batch is split into.
        schedule: Name of the pipeline schedule; `"none"` without a pipeline.
        shardings: PartitionSpec per argument leaf, in the arguments' own tree: `(args, kwargs)`. A plan read from a
            file has them by path until it is compiled.
        cost: The prediction.
        values: Arguments, results and the activations that go through memory.
        streams: The instructions of each mesh.
        alternatives: Other mesh shapes that were tried: (mesh, predicted seconds or why not).
        fingerprints: Those of the program and the cluster, and the version of JAX.
        machine: The cluster as text.
        events: The timeline of the simulated step.
        budget_bytes: Memory that one device may use; inf: unlimited.
        microbatch_semantics: `"exact"`, or `"per_microbatch"` where the user allowed it.
        parts: Into how many parts scans over layers are split for stages; 1: they are whole.
        profile: The time, memory and traffic of the step.
        padded: (length, padded length) of dims of products and of values between them, padded so that devices can split
            them; arguments and results are never padded.
        offloaded: Paths of the arguments that are in the hosts' memory.
        offloaded_activations: Number of residuals that the step keeps there from its forward to its backward pass.
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
    microbatch_semantics: MicrobatchSemantics = "exact"
    parts: int = 1
    budget_bytes: float = math.inf
    profile: Profile = field(default=Profile(), repr=False, compare=False)
    padded: tuple[tuple[int, int], ...] = ()
    offloaded: tuple[str, ...] = ()
    offloaded_activations: int = 0
    origin: Origin | None = field(default=None, compare=False, repr=False, hash=False)
    """The planning problem, for `explain`; None in a plan read from a file, until it is compiled."""

    @property
    def is_one_program(self) -> bool:
        """Whether the step is one program on one mesh, and not cut into stages."""
        return self.schedule == ONE_PROGRAM

    @property
    def interval_seconds(self) -> float:
        """Predicted time between calls that do not wait for each other's results: the busy time of the busiest mesh."""
        return max(self.events.busy_seconds.values(), default=self.cost.step_seconds)

    @property
    def attached(self) -> Origin:
        """The planning problem, which must be in memory."""
        assert self.origin is not None, "the plan was read from a file and not compiled since"
        return self.origin

    @property
    def mesh(self) -> LogicalMesh:
        """The logical mesh of the first stage."""
        return self.stages[0].logical_mesh
