"""The compiler as a list: which passes a step goes through, phase by phase.

In:     (a list only; each is carried out where it stands.)
Out:    `PHASES`, in order. Between them stands what makes one form of another, or goes round in circles:
        segments and stages (`inter_op/chain.py`, `slicing.py`), their tasks (`stage_program.py`);
        decisions (`intra_op/graph.py`); solve, lower and the clock, until it shows what was thought (`intra_op/shard.py`);
        streams, checked and on the clock (`streams/assemble.py`).
Method: `AUTOPAR_CHECK=1` checks what each of them makes; `AUTOPAR_DUMP=folder` writes what the phases made.
"""

from __future__ import annotations

from typing import Any

from autopar.inter_op.cut import APART
from autopar.intra_op.lower import LOWER
from autopar.intra_op.setting import SHARD
from autopar.ir.passes import Pass
from autopar.ir.trace.trace import TRACE
from autopar.search.one_mesh import MICROBATCHES, WHOLE
from autopar.streams.emit import EMIT

PHASES: dict[str, tuple[Pass[Any], ...]] = {
    "trace": TRACE,  # every step, once: from what JAX traced to one flat program
    "apart": APART,  # pipelines, for each number of parts: so that there is something to cut
    "whole": WHOLE,  # one mesh, the batch at once
    "microbatches": MICROBATCHES,  # one mesh, for each number of microbatches: a loop that adds up sums
    "shard": SHARD,  # on every mesh that is tried, of a step or a stage: from decisions to a choice problem
    "lower": LOWER,  # of every solution that is looked at, and every task: from choices to a sharded program
    "emit": EMIT,  # every pipeline that is looked at: from tasks to a stream for each mesh
}
