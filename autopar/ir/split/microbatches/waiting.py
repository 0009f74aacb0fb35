"""What samples wait for: values that all microbatches make together, and that are needed before one of them can go on.

In:     the equations of a step that would read such values, as the policy comes by them (`phases.py`).
Out:    `SamplesWaitError`: the first of them, for the user; and the values, for who can have them made before (`rounds.py`).
Method: from such an equation back through what would run after the loop, to what the loop makes: sums, or if nothing but
        samples is read, these. What waits for equations that wait themselves is left for later: it may need nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from autopar._jax import Jaxpr, JaxprEqn, Var
from autopar.errors import MicrobatchError
from autopar.ir.dataflow import ancestors, inputs_of, makers, read_by
from autopar.ir.split.microbatches.local_statistics import SampleSums
from autopar.ir.split.placement import Partial, Split
from autopar.ir.split.solution import LoopSolution


class SamplesWaitError(Exception):
    """Samples wait for what all of them make together.

    Attributes:
        error: For the user.
        sums: Of the step, that the loop makes: were they there before it, samples would wait no more, or for later ones.
        samples: The same of rows of all samples, where no sums are waited for.
        rows: What single samples have that wait, whatever for.
        summed: Of the sums that are waited for, what the step makes of single samples and adds up there.
        complete: Sums that the loop makes and what stands behind it reads, whether samples wait for that or not.
        incomplete: All values of the step that are not complete before every microbatch has made its part.
        solution: How far it has come.
        is_late_work: Nothing waits any more, but too much would be done of all samples at once.
        is_for_rows: All of `sums` are of single elements, or hold what is added once: samples wait for rows of others.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        solution: LoopSolution,
        waiting: Mapping[JaxprEqn, MicrobatchError],
        late: Collection[Var],
        is_late_work: bool = False,
        uneven: Collection[Var] = (),
    ):
        """`waiting`: equations on samples that would have to run after the loop; `late`: what is made there; `uneven`: as of
        `Solver`."""
        super().__init__()
        self.is_late_work = is_late_work
        self.error, self.solution, maker = next(iter(waiting.values())), solution, makers(jaxpr.eqns)
        sums: dict[Var, None] = {}
        samples: dict[Var, None] = {}
        rows: dict[Var, None] = {}
        behind: dict[Var, None] = {}
        for eqn in jaxpr.eqns:
            if not behind.keys().isdisjoint(inputs_of(eqn)):
                behind.update(dict.fromkeys(eqn.outvars if solution.phase.get(eqn) == "after" else ()))
            elif eqn in waiting:
                needs = _needed(eqn, maker, late)
                needed_sums = [var for var in needs if isinstance(solution.of(var), Partial)]
                sums.update(dict.fromkeys(needed_sums))
                samples.update(dict.fromkeys(() if needed_sums else _in_parts(needs, solution)))
                rows.update(dict.fromkeys(_in_parts(inputs_of(eqn), solution)))
                behind.update(dict.fromkeys(eqn.outvars))
        self.sums, self.samples, self.rows = tuple(sums), tuple(samples), tuple(rows)
        self.is_for_rows = bool(sums) and all(var in uneven for var in sums)
        known = SampleSums(jaxpr)
        roots = (root for var in sums for root in known.behind(solution, var))
        added_up = (var for var in read_by(maker[root] for root in roots if root in maker) if var in maker)
        self.summed = tuple(_in_parts(added_up, solution))
        behind_loop = read_by((eqn for eqn in jaxpr.eqns if solution.phase.get(eqn) == "after"), jaxpr.outvars)
        self.complete = tuple(var for var in behind_loop if isinstance(solution.of(var), Partial) and var in maker)
        self.incomplete = tuple(var for var in maker if isinstance(solution.of(var), Partial) or var in late)

    def is_sum(self, var: Var) -> bool:
        """Whether a value, of the step or of a body, is a sum over samples, or the largest or smallest of them."""
        return isinstance(self.solution.made_as(var), Partial)


def _in_parts(values: Iterable[Var], solution: LoopSolution) -> list[Var]:
    return [var for var in values if isinstance(solution.of(var), Split)]


def _needed(eqn: JaxprEqn, maker: Mapping[Var, JaxprEqn], late: Collection[Var]) -> list[Var]:
    """What the loop makes and an equation needs of all microbatches."""
    read = inputs_of(eqn)
    first = [a for a in read if a in late] or read
    behind = ancestors(first, lambda var: inputs_of(maker[var]) if var in late else ())
    # What it reads itself besides, it has of its own microbatch.
    return [var for var in behind if var not in late and (var in first or var not in read)]
