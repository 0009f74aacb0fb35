"""What samples wait for: joint results of all microbatches that are needed before one of them can go on.

In:     the equations of a step that would read such results, as the policy meets them (`phases.py`).
Out:    `SamplesWaitError`: the first of them, for the user; and the results, for a caller that can have them computed before
        (`rounds/`).
Method: from such an equation back through those that would run after the loop, to what the loop makes: sums, or if it reads
        only samples, these. An equation that waits for another waiting one is left out: it may need nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from autopar._jax import Jaxpr, JaxprEqn, Var
from autopar.errors import MicrobatchError
from autopar.ir.dataflow import ancestors, inputs_of, makers, read_by
from autopar.ir.region import is_region
from autopar.ir.rules import rule_for
from autopar.ir.split.microbatches.local_statistics import SampleSums
from autopar.ir.split.placement import Partial, Split
from autopar.ir.split.solution import LoopSolution
from autopar.ir.split.solver import Cause


class SamplesWaitError(Exception):
    """Samples wait for joint results of all microbatches.

    Attributes:
        error: The error for the user.
        sums: Partial sums of the step that are waited for: were they known before the loop, these samples would not wait.
        samples: Split values of the step that are waited for whole, where no sums are.
        moved: Equations that put samples in another order, for which others wait, with what they read; no sums are waited for.
        rows: Split values that the waiting equations read.
        summed: Split values that are added up in `sums`.
        complete: Partial sums that equations after the loop read, waited for or not.
        incomplete: All values of the step that are known only after the last microbatch.
        solution: The solution so far.
        is_late_work: No sample waits, but too much work would be done on all samples at once.
        is_for_rows: Samples wait for rows of others alone: all of `sums` are uneven (`Solver.uneven`), or all are `moved`.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        solution: LoopSolution,
        error: MicrobatchError,
        waiting: Mapping[JaxprEqn, Cause],
        late: Mapping[Var, Cause],
        is_late_work: bool = False,
        uneven: Collection[Var] = (),
    ):
        """`error`: of the first of `waiting`, the equations on samples that would run after the loop; `late`: values made
        there; both with their causes; `uneven`: see `Solver`."""
        super().__init__()
        self.is_late_work = is_late_work
        self.error, self.solution, maker = error, solution, makers(jaxpr.eqns)
        sums: dict[Var, None] = {}
        samples: dict[Var, None] = {}
        rows: dict[Var, None] = {}
        causes: dict[Cause, None] = {}
        dependent: dict[Var, None] = {}
        for eqn in jaxpr.eqns:
            if not dependent.keys().isdisjoint(inputs_of(eqn)):
                dependent.update(dict.fromkeys(eqn.outvars if solution.phase.get(eqn) == "after" else ()))
            elif eqn in waiting:
                behind = _behind(eqn, maker, late)
                needs = [var for var in behind if var not in late]
                needed_sums = [var for var in needs if isinstance(solution.of(var), Partial)]
                sums.update(dict.fromkeys(needed_sums))
                samples.update(dict.fromkeys(() if needed_sums else _in_parts(needs, solution)))
                causes.update(dict.fromkeys([late[var] for var in behind if var in late] or [waiting[eqn]]))
                rows.update(dict.fromkeys(_in_parts(inputs_of(eqn), solution)))
                dependent.update(dict.fromkeys(eqn.outvars))
        self.sums, self.samples, self.rows = tuple(sums), tuple(samples), tuple(rows)
        self.moved = tuple(cause for cause in causes if not sums and _moves_samples(cause, solution))
        self.is_for_rows = all(var in uneven for var in sums) if sums else 0 < len(self.moved) == len(causes)
        known = SampleSums(jaxpr)
        roots = (root for var in sums for root in known.terms_of(solution, var))
        added_up = (var for var in read_by(maker[root] for root in roots if root in maker) if var in maker)
        self.summed = tuple(_in_parts(added_up, solution))
        after_loop = read_by((eqn for eqn in jaxpr.eqns if solution.phase.get(eqn) == "after"), jaxpr.outvars)
        self.complete = tuple(var for var in after_loop if isinstance(solution.of(var), Partial) and var in maker)
        self.incomplete = tuple(var for var in maker if isinstance(solution.of(var), Partial) or var in late)

    def is_sum(self, var: Var) -> bool:
        """Whether a value, of the step or of a body, is a sum, maximum or minimum over samples."""
        return isinstance(self.solution.made_as(var), Partial)


def _in_parts(values: Iterable[Var], solution: LoopSolution) -> list[Var]:
    return [var for var in values if isinstance(solution.of(var), Split)]


def _moves_samples(cause: Cause, solution: LoopSolution) -> bool:
    """Whether a cause computes nothing, and reads samples."""
    computes = is_region(cause.eqn) or rule_for(cause.eqn).flops
    return not computes and isinstance(solution.of(cause.operand), Split)


def _behind(eqn: JaxprEqn, maker: Mapping[Var, JaxprEqn], late: Collection[Var]) -> list[Var]:
    """The values of the loop that an equation needs from all microbatches, and the late ones between these and it."""
    read = inputs_of(eqn)
    first = [a for a in read if a in late] or read
    found = ancestors(first, lambda var: inputs_of(maker[var]) if var in late else ())
    # Its other operands are of its own microbatch.
    return [var for var in found if var in late or var in first or var not in read]
