"""The plan as its user holds it: the decision, and what one can ask of it.

In:     `Decision`, from the planner or from a file.
Out:    `Plan`: prints itself, says why, says what differs from another, is saved and loaded.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from autopar.plan.decision import Decision
from autopar.plan.file import load_decision, save_decision
from autopar.plan.words import seconds_text
from autopar.report.diff import diff_text
from autopar.report.explain import explain
from autopar.report.html import plan_html
from autopar.report.measured import MeasuredStep, parting_text
from autopar.report.shown import ShownTimeline
from autopar.report.text import plan_text


@dataclass(frozen=True, repr=False)
class Plan(Decision):
    """A plan for one step on one cluster: its attributes are those of `Decision`."""

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        save_decision(self, path)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            PlanFileError: The file is missing, damaged, or of another version.
        """
        decided = load_decision(path)
        return Plan(**{part.name: getattr(decided, part.name) for part in dataclasses.fields(decided)})

    def explain(self, path_or_op: str) -> str:
        """Why this sharding: what the alternatives would cost, and what forbids them.

        Args:
            path_or_op: Path of an argument ("state/params/w"), a glob, or part of an operation's name and line.
        """
        return explain(self, path_or_op)

    def diff(self, other: Plan | MeasuredStep) -> str:
        """What differs between this plan and another, as text; "" where nothing does.

        Args:
            other: A plan; or what `compiled.measure(...)` found: then where prediction and measurement part.
        """
        return parting_text(other) if isinstance(other, MeasuredStep) else diff_text(self, other)

    def timeline(self) -> ShownTimeline:
        """The simulated step as a `Timeline`: a Chrome trace (`.save(path)`, for ui.perfetto.dev), text (`str`), or HTML."""
        return ShownTimeline(self.events.events)

    def __repr__(self) -> str:
        stages = f"{len(self.stages)} stages, {self.schedule}" if self.schedule != "none" else str(self.mesh)
        return f"Plan({self.name} by {self.method}, on {stages}: {seconds_text(self.cost.step_seconds)} a step)"

    def __str__(self) -> str:
        return plan_text(self)

    def _repr_html_(self) -> str:
        return plan_html(self)
