"""Warns of unbalanced stages, where the step could not be cut more evenly.

In:     a step that is cut, its borders.
Out:    a warning that names the stage, what makes it long, and why that was not split; "": stages are balanced.
Method: work is counted in seconds, as for the choice of borders (`inter_op/weigh.py`). The largest segment is taken as the
        cause; reasons why a loop stays whole are those of `ir/split/layers/layers.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar._jax import JaxprEqn
from autopar.grouping import grouped
from autopar.inter_op.cut import CutStep
from autopar.intra_op.sharded import describe
from autopar.ir.region import kind_of, region_of, trip_count
from autopar.ir.rewrite.trips_at_once import own_microbatches
from autopar.ir.source import source_line
from autopar.ir.split.rounds.steps import holds_steps
from autopar.tuning import TUNING


def uneven_text(cut: CutStep, borders: Sequence[int], sizes: Sequence[int]) -> str:
    """The warning; "": stages are balanced, or as the user marked them.

    `sizes`: number of devices of each mesh; stage s is on mesh s modulo their number.
    """
    chain, num_meshes = cut.chain, len(sizes)
    if set(borders[1:]) <= set(chain.marks):
        return ""
    of_stage = np.add.reduceat(chain.work, borders)
    of_mesh = np.array([of_stage[mesh::num_meshes].sum() for mesh in range(num_meshes)])
    whole = float(of_mesh.sum())
    even = whole * np.array(sizes) / sum(sizes)
    mesh = int((of_mesh / even).argmax()) if whole else 0
    if of_mesh[mesh] <= TUNING.uneven_stage * even[mesh]:
        return ""
    stage = mesh + num_meshes * int(of_stage[mesh::num_meshes].argmax())
    last = borders[stage + 1] if stage + 1 < len(borders) else chain.num_segments
    segment = borders[stage] + int(chain.work[borders[stage] : last].argmax())
    return (
        f"the stages are far from even: stage {stage} of {len(borders)} has {of_stage[stage] / whole:.0%} of the work, and the "
        f"others wait for it. {chain.work[segment] / whole:.0%} of the work is one piece: " + _piece(cut, segment)
    )


def _piece(cut: CutStep, segment: int) -> str:
    """The operation that is most of a segment, gradients included, and why it was not split; or that there is none."""
    chain = cut.chain
    inside = [k for k, at in enumerate(chain.segment) if at == segment]
    of_line = grouped((source_line(chain.loop.eqns[k]), k) for k in inside)
    work = {line: sum(chain.work_of[k] for k in at) / chain.work[segment] for line, at in of_line.items()}
    line = max(work, key=work.__getitem__)
    largest = max(of_line[line], key=lambda k: (not chain.backward[k], chain.work_of[k], -k))
    eqn = chain.loop.eqns[largest]
    if 2 * work[line] > 1:
        reason = _why_whole(cut, eqn)
        return describe(eqn) + (f"; {reason}." if reason else ".")
    behind = sum(chain.backward[k] for k in inside)
    return (
        f"{len(inside)} operations, {behind} of them of the backward pass, which run where what they read is; most are at "
        f"{line}, {work[line]:.0%} of it."
    )


def _why_whole(cut: CutStep, eqn: JaxprEqn) -> str:
    """Why a loop was not split between layers; "": it is no loop, or was split."""
    if kind_of(eqn) == "while":
        return "how many turns a while loop takes is known only when it runs"
    if trip_count(eqn) < 2:
        return ""
    own = own_microbatches(cut.program.jaxpr) if holds_steps(eqn) else 0
    sizes = [cut.program.in_avals[k].shape[dim] for k, dim in cut.roles.leading.items()]
    if own and not any(size % own for size in sizes):
        return f"it adds up gradients: with num_microbatches={own}, each of its turns is a microbatch, and is cut into stages"
    if not region_of(eqn).xs:
        return "it runs over no stack of layers, such as weights that lax.scan takes as `xs`"
    if cut.stacks.count < 2:
        return "no weights are stacked that it alone reads, layer by layer: its turns share them, or they are also read whole"
    return f"only scans over as many layers as another one are taken apart ({trip_count(eqn)} turns here)"
