"""What a plan came from: kept beside it in memory, for `explain` and for compiling.

In:     (types only; `search/describe.py` makes it.)
Out:    `Origin`.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.program import Program
from autopar.ir.trace.state import Roles
from autopar.mesh import Cluster
from autopar.options import Options
from autopar.streams.assemble import StepPlan


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
