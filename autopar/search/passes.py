"""The compiler as a list: which passes a step goes through, phase by phase.

In:     (a list only; each is carried out where it stands.)
Out:    `PHASES`: the rewrites, in order. What follows them makes other forms, and is no list:
        graph, costs, solve, lower (`intra_op/shard.py`), once for every mesh and every stage that is tried;
        segments and stages (`inter_op/chain.py`, `slicing.py`), their tasks (`stage_program.py`);
        streams, checked and on the clock (`streams/assemble.py`).
Method: `AUTOPAR_CHECK=1` checks what each of them makes; `AUTOPAR_DUMP=folder` writes what the phases made.
"""

from __future__ import annotations

from typing import Any

from autopar.inter_op.cut import APART
from autopar.ir.passes import Pass
from autopar.ir.trace.trace import TRACE
from autopar.search.one_mesh import MICROBATCHES

PHASES: dict[str, tuple[Pass[Any], ...]] = {
    "trace": TRACE,  # every step, once: from what JAX traced to one flat program
    "apart": APART,  # pipelines, for each number of parts: so that there is something to cut
    "microbatches": MICROBATCHES,  # one mesh, for each number of microbatches: a loop that adds up sums
}
