"""What the compiler says of a plan, beside what the plan says.

In:     (types only; `verify.py` makes them.)
Out:    `Checked`, of one program; `Findings`, of all.
Method: bytes of each kind of collective must be equal, executions counted: XLA joins small collectives, so their number is
        its own. So must be what goes between the memories of devices and hosts. Memory must fit the budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.cost.steps import COLLECTIVE_KINDS
from autopar.plan.words import bytes_text
from autopar.verify.host_copies import DIRECTIONS
from autopar.verify.schedule import Emitted

MOVES = (*COLLECTIVE_KINDS, *DIRECTIONS)
"""What moves bytes between memories: collectives, and copies."""


@dataclass(frozen=True, slots=True)
class Checked:
    """One program.

    Attributes:
        name: As in the plan's streams.
        stage: On whose mesh.
        runs: In one step.
        predicted_bytes: Of memory on one device at its peak.
        compiled_bytes: The same, by XLA.
        planned: Bytes of collectives in one run, by kind (`MOVES`), and of copies to and from the host's memory.
        emitted: The same, by XLA.
        collectives: Of the compiled program.
        compute_seconds: Of its kernels in one run; XLA has not tuned them.
        exposed_seconds: In which they wait for collectives.
        kernels: Executions of kernels that are not XLA's own, by name and first result.
    """

    name: str
    stage: int
    runs: int
    predicted_bytes: int
    compiled_bytes: int
    planned: dict[str, int]
    emitted: dict[str, int]
    collectives: tuple[Emitted, ...]
    compute_seconds: float
    exposed_seconds: float
    kernels: dict[str, int]


@dataclass(frozen=True, repr=False)
class Findings:
    """A plan and what XLA makes of it.

    Attributes:
        plan: Name of the step.
        target: The device that was compiled for.
        programs: Each of its programs.
        predicted_bytes: Per mesh, the peak on one device, as planned.
        compiled_bytes: The same, by XLA.
        budget_bytes: What one device may use.
    """

    plan: str
    target: str
    programs: tuple[Checked, ...]
    predicted_bytes: tuple[int, ...]
    compiled_bytes: tuple[int, ...]
    budget_bytes: float

    @property
    def problems(self) -> tuple[str, ...]:
        """Where the compiler and the plan disagree; none: the plan is verified."""
        return tuple(self._problems())

    @property
    def ok(self) -> bool:
        """Whether bytes are equal and the memory fits."""
        return not self.problems

    def _problems(self) -> Iterator[str]:
        for program in self.programs:
            for kind in MOVES:
                planned, emitted = program.planned.get(kind, 0), program.emitted.get(kind, 0)
                if planned != emitted:
                    yield f"{program.name}: {kind} of {emitted:,} B are executed, and {planned:,} B planned."
        for mesh, peak in enumerate(self.compiled_bytes):
            if peak > self.budget_bytes:
                where = f"mesh {mesh}: " if len(self.compiled_bytes) > 1 else ""
                yield f"{where}XLA takes {bytes_text(peak)}, over the budget of {bytes_text(self.budget_bytes)}."

    @property
    def communication_seconds(self) -> float:
        """Of all collectives of a step, on all meshes."""
        return sum(p.runs * c.times * c.seconds for p in self.programs for c in p.collectives)

    @property
    def async_share(self) -> float:
        """Part of the collectives' seconds in which the program goes on meanwhile."""
        total = self.communication_seconds
        going = sum(p.runs * c.times * c.seconds for p in self.programs for c in p.collectives if c.is_async)
        return going / total if total else 0.0

    @property
    def exposed_share(self) -> float:
        """Part of the collectives' seconds in which kernels wait for them."""
        total = self.communication_seconds
        return min(1.0, sum(p.runs * p.exposed_seconds for p in self.programs) / total) if total else 0.0
