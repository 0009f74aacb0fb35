"""What samples wait for: joint results of all microbatches that are needed before one of them can go on.

In:     the equations of a step that would read such results, as the policy meets them (`phases.py`).
Out:    `SamplesWaitError`: the first of them, for the user; and the results, for a caller that can have them computed before
        (`rounds/`).
Method: from such an equation back through those that would run after the loop, to what the loop makes: sums, or if it reads
        only samples, these. An equation that waits for another waiting one is left out: it may need nothing else. The sums
        that must become local together with such a value are found backwards through linear equations; the copy that `remat`
        recomputes in the backward pass by value numbering.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from functools import cached_property

from autopar._jax import Jaxpr, JaxprEqn, Var
from autopar.errors import MicrobatchError
from autopar.grouping import grouped
from autopar.ir.dataflow import ancestors, inputs_of, makers, read_by, variables
from autopar.ir.signature import ValueNumbers
from autopar.ir.split.placement import SUM, Partial, Split
from autopar.ir.split.solution import LoopSolution, Solution


class SamplesWaitError(Exception):
    """Samples wait for joint results of all microbatches.

    Attributes:
        error: The error for the user.
        sums: Partial sums of the step that are waited for: were they known before the loop, these samples would not wait.
        samples: Split values of the step that are waited for whole, where no sums are.
        rows: Split values that the waiting equations read.
        summed: Split values that are added up in `sums`.
        complete: Partial sums that equations after the loop read, waited for or not.
        incomplete: All values of the step that are known only after the last microbatch.
        solution: The solution so far.
        is_late_work: No sample waits, but too much work would be done on all samples at once.
        is_for_rows: All of `sums` are uneven (`Solver.uneven`): samples wait for rows of others.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        solution: LoopSolution,
        error: MicrobatchError,
        waiting: Collection[JaxprEqn],
        late: Collection[Var],
        is_late_work: bool = False,
        uneven: Collection[Var] = (),
    ):
        """`error`: of the first of `waiting`, the equations on samples that would run after the loop; `late`: values made
        there; `uneven`: see `Solver`."""
        super().__init__()
        self.is_late_work = is_late_work
        self.error, self.solution, maker = error, solution, makers(jaxpr.eqns)
        sums: dict[Var, None] = {}
        samples: dict[Var, None] = {}
        rows: dict[Var, None] = {}
        dependent: dict[Var, None] = {}
        for eqn in jaxpr.eqns:
            if not dependent.keys().isdisjoint(inputs_of(eqn)):
                dependent.update(dict.fromkeys(eqn.outvars if solution.phase.get(eqn) == "after" else ()))
            elif eqn in waiting:
                needs = _needed(eqn, maker, late)
                needed_sums = [var for var in needs if isinstance(solution.of(var), Partial)]
                sums.update(dict.fromkeys(needed_sums))
                samples.update(dict.fromkeys(() if needed_sums else _in_parts(needs, solution)))
                rows.update(dict.fromkeys(_in_parts(inputs_of(eqn), solution)))
                dependent.update(dict.fromkeys(eqn.outvars))
        self.sums, self.samples, self.rows = tuple(sums), tuple(samples), tuple(rows)
        self.is_for_rows = bool(sums) and all(var in uneven for var in sums)
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


def _needed(eqn: JaxprEqn, maker: Mapping[Var, JaxprEqn], late: Collection[Var]) -> list[Var]:
    """The values of the loop that an equation needs from all microbatches."""
    read = inputs_of(eqn)
    first = [a for a in read if a in late] or read
    found = ancestors(first, lambda var: inputs_of(maker[var]) if var in late else ())
    # Its other operands are of its own microbatch.
    return [var for var in found if var not in late and (var in first or var not in read)]


class SampleSums:
    """The sums over samples of one program; value numbers are computed once."""

    def __init__(self, jaxpr: Jaxpr):
        self._jaxpr, self._made_by = jaxpr, makers(jaxpr.eqns)

    def terms_of(self, solution: Solution, var: Var) -> list[Var]:
        """The sums in which a value is linear, or the value itself; and all values equal to one of them.

        `solution`: covers the equations up to the one that waits for the value.
        `var`: a partial result, of a body or of the step itself.
        """

        def terms(value: Var) -> list[Var] | None:
            """The partial sums in which it is linear; None: it is such a sum itself."""
            eqn = self._made_by.get(value)
            strategy = None if eqn is None else solution.strategy_of.get(eqn)
            if eqn is None or strategy is None or strategy.factor is not None:
                return None
            pairs = zip(eqn.invars, strategy.operands, strict=True)
            return variables(a for a, want in pairs if want == SUM and solution.of(a) == SUM)

        found = ancestors([var], lambda value: terms(value) or ())
        return self._with_twins([value for value in found if terms(value) is None])

    def _with_twins(self, wanted: Sequence[Var]) -> list[Var]:
        """The wanted values, then all values equal to one of them, in program order."""
        numbers, alike = self._numbered
        twins = [pair for name in dict.fromkeys(map(numbers.of, wanted)) for pair in alike.get(name, ())]
        return [*wanted, *(var for _, var in sorted(twins, key=lambda pair: pair[0]) if var not in wanted)]

    @cached_property
    def _numbered(self) -> tuple[ValueNumbers, dict[Hashable, list[tuple[int, Var]]]]:
        """Value numbers, and the values that have each number, with their positions."""
        numbers = ValueNumbers()
        for eqn in self._jaxpr.eqns:
            numbers.visit(eqn)
        return numbers, grouped((numbers.of(var), (place, var)) for place, var in enumerate(self._made_by))
