"""What samples wait for: values that all microbatches make together, and that are needed before one of them can go on.

In:     equations that would read such values, as the policy comes by them (`phases.py`).
Out:    `SamplesWaitError`: the first of them, for the user; and the values, for who can have them made before (`rounds.py`).
Method: from such an equation back through what would run after the loop, to what the loop makes: sums, or if nothing but
        samples is read, these. What waits for equations that wait themselves is left for later: it may need nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar._jax import Jaxpr, JaxprEqn, Var
from autopar.errors import MicrobatchError
from autopar.ir.dataflow import ancestors, inputs_of, makers, read_by
from autopar.ir.split.local_statistics import sums_behind
from autopar.ir.split.placement import Partial, Split
from autopar.ir.split.solution import LoopSolution
from autopar.ir.split.solver import Cause


class SamplesWaitError(Exception):
    """Samples wait for what all of them make together.

    Attributes:
        error: For the user.
        sums: Of the step, that the loop makes: were they there before it, samples would wait no more, or for later ones.
        samples: The same of rows of all samples, where no sums are waited for.
        rows: What single samples have that wait, whatever for.
        summed: Of the sums that are waited for, what the step makes of single samples and adds up there.
        incomplete: All values of the step that are not complete before every microbatch has made its part.
        solution: How far it has come.
    """

    def __init__(self, waiting: Waiting, error: MicrobatchError):
        super().__init__()
        self.error, self.sums, self.samples = error, tuple(waiting.sums), tuple(waiting.samples)
        self.rows = tuple(waiting.rows)
        roots = [root for var in waiting.sums for root in sums_behind(waiting.jaxpr, waiting.solution, var)]
        summing = [waiting.maker[root] for root in roots if root in waiting.maker]
        added_up = (var for var in read_by(summing) if var in waiting.maker)
        self.summed = tuple(var for var in added_up if isinstance(waiting.solution.of(var), Split))
        solution = self.solution = waiting.solution
        self.incomplete = tuple(v for v in waiting.maker if isinstance(solution.of(v), Partial) or v in waiting.late)

    def is_sum(self, var: Var) -> bool:
        """Whether a value, of the step or of a body, is a sum over samples, or the largest or smallest of them."""
        return isinstance(self.solution.made_as(var), Partial)


class Waiting:
    """Collects equations of one step that wait."""

    def __init__(self, jaxpr: Jaxpr, solution: LoopSolution, late: Mapping[Var, Cause]):
        """`late` is what would be made after the loop; it grows while equations are added."""
        self.jaxpr, self.solution, self.late = jaxpr, solution, late
        self.maker = makers(jaxpr.eqns)
        self.error: MicrobatchError | None = None
        self.sums: dict[Var, None] = {}
        self.samples: dict[Var, None] = {}
        self.rows: dict[Var, None] = {}
        self.behind: dict[Var, None] = {}

    def check(self) -> None:
        """Raise what was found.

        Raises:
            SamplesWaitError: An equation waits.
        """
        if self.error is not None:
            raise SamplesWaitError(self, self.error)

    def add(self, eqn: JaxprEqn, error: MicrobatchError) -> None:
        """An equation on samples that would have to run after the loop."""
        self.error = self.error or error
        if self._is_behind(eqn):
            self.follow(eqn)
            return
        found = self._needed(eqn)
        sums = [var for var in found if isinstance(self.solution.of(var), Partial)]
        samples = [var for var in found if isinstance(self.solution.of(var), Split)]
        self.sums.update(dict.fromkeys(sums))
        self.samples.update(dict.fromkeys(() if sums else samples))
        self.rows.update(dict.fromkeys(a for a in inputs_of(eqn) if isinstance(self.solution.of(a), Split)))
        self.behind.update(dict.fromkeys(eqn.outvars))

    def follow(self, eqn: JaxprEqn) -> None:
        """Any other equation that would run after the loop."""
        if self._is_behind(eqn):
            self.behind.update(dict.fromkeys(eqn.outvars))

    def _is_behind(self, eqn: JaxprEqn) -> bool:
        return not self.behind.keys().isdisjoint(inputs_of(eqn))

    def _needed(self, eqn: JaxprEqn) -> list[Var]:
        """What the loop makes and an equation needs of all microbatches."""
        read = inputs_of(eqn)
        first = [a for a in read if a in self.late] or read
        behind = ancestors(first, lambda var: inputs_of(self.maker[var]) if var in self.late else ())
        # What it reads itself besides, it has of its own microbatch.
        return [var for var in behind if var not in self.late and (var in first or var not in read)]
