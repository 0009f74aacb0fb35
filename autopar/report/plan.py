"""The plan that users hold: the decision, with methods to print, explain, compare, verify, save and load it.

In:     `Decision`, from the planner or from a file.
Out:    `Plan`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.entry import DamageError, read_versioned, write_whole
from autopar.errors import AutoparError, PlanFileError
from autopar.plan.decision import Decision
from autopar.plan.record import FORMAT, VERSION, read_plan, record_text
from autopar.plan.words import seconds_text
from autopar.report.diff import diff_text
from autopar.report.explain import explain
from autopar.report.html import plan_html
from autopar.report.measured import MeasuredStep, ShownTimeline, parting_text
from autopar.report.page import page_of
from autopar.report.text import page_text


@dataclass(frozen=True, repr=False)
class Plan(Decision):
    """A plan for one step on one cluster; other attributes as in `Decision`.

    Attributes:
        verifier: Verifies it with a compiler; None: the plan is from a file and not attached to its step.
    """

    verifier: Callable[[Plan, str | None], Any] | None = field(default=None, compare=False, repr=False, hash=False)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON.

        Raises:
            PlanFileError: The file cannot be written.
        """
        write_whole(path, record_text(self), "plan", PlanFileError)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan that `save` wrote; until it is compiled for its program, its shardings are by path.

        Raises:
            PlanFileError: The file is missing, damaged, or of another version.
        """
        try:
            decided = read_plan(read_versioned(path, FORMAT, VERSION))
        except DamageError as error:
            raise PlanFileError(
                "the file cannot be read as a plan.",
                given=str(path),
                wrong=str(error),
                do="plan again, step.plan(...).save(path), with the autopar that is to read it.",
                path=str(path),
            ) from error
        return Plan(**{part.name: getattr(decided, part.name) for part in dataclasses.fields(decided)})

    def explain(self, path_or_op: str) -> str:
        """Explain a sharding: what the alternatives would cost, or what forbids them.

        Args:
            path_or_op: Path of an argument ("state/params/w"), a glob, or part of an operation's name and line; or "compute"
                or "stages".
        """
        return explain(self, path_or_op)

    def diff(self, other: Plan | MeasuredStep) -> str:
        """The differences between this plan and another, as text; "": there are none.

        Args:
            other: A plan; or a measured step of `compiled.measure(...)`: then the largest differences to the prediction.
        """
        return parting_text(other) if isinstance(other, MeasuredStep) else diff_text(self, other)

    def verify(self, target: str | None = None) -> Any:
        """Compile every program of the plan, and compare memory and collectives with the prediction.

        Args:
            target: A device, which you need not have: `"h100"`, `"a100"`, `"b200"`, `"tpu-v5e"`; None: that of the plan.

        Returns:
            `autopar.verify.Verification`, which prints itself, with `.ok` and `.problems`.

        Raises:
            AutoparError: The plan was read from a file and not attached to its step, or the compiler for the target is
                not installed.
        """
        if self.verifier is None:
            raise AutoparError(
                "a plan from a file has no programs.",
                given=f"the plan of `{self.name}`",
                wrong="the file holds what was decided, not the step.",
                do="attach it: step.attach(*args, plan=plan).verify(...).",
            )
        return self.verifier(self, target)

    def timeline(self) -> ShownTimeline:
        """The simulated step as a `Timeline`: a Chrome trace (`.save(path)`, for ui.perfetto.dev), text (`str`), or HTML."""
        return ShownTimeline(self.events.events)

    def __repr__(self) -> str:
        stages = f"{len(self.stages)} stages, {self.schedule}" if not self.is_one_program else str(self.mesh)
        return f"Plan({self.name} by {self.method}, on {stages}: {seconds_text(self.cost.step_seconds)} a step)"

    def __str__(self) -> str:
        return page_text(page_of(self))

    def _repr_html_(self) -> str:
        return plan_html(self)
