"""The compiler as a list: the passes that a step goes through, phase by phase.

In:     (a list only; each pass is run where it is defined.)
Out:    `PHASES`, in order. Between them come translations and iterations:
        segments and stages (`inter_op/chain.py`, `slicing.py`), their tasks (`stage_program.py`);
        the decision graph (`intra_op/graph.py`); solve, lower and simulate, to a fixed point (`intra_op/shard.py`);
        streams, checked and simulated (`streams/assemble.py`).
Method: `AUTOPAR_CHECK=1` checks the result of each pass; `AUTOPAR_DUMP=folder` writes those of the phases.
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
    "apart": APART,  # pipelines, for each number of parts: splits loops, so that stages can be cut
    "whole": WHOLE,  # one mesh, the batch at once
    "microbatches": MICROBATCHES,  # one mesh, for each number of microbatches: a loop that accumulates sums
    "shard": SHARD,  # a step or stage on each mesh tried: from the decision graph to a choice problem
    "lower": LOWER,  # each solution considered, and each task: from choices to a sharded program
    "emit": EMIT,  # each pipeline considered: from tasks to one stream per mesh
}
