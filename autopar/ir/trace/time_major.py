"""Finds batches that lie behind time: `[time, batch, ...]`, as recurrent nets and reinforcement learning have them.

In:     a flat program, the arguments that may hold samples, the dims of the batch as leading dims tell.
Out:    for each leaf the dim that runs over samples, if samples lie behind time.
Method: a loop goes through the leading dim of what an argument holds, and carries something from trip to trip: points in time,
        then, and samples may lie along the second dim; what has no time (the state that the loop begins with, the value after
        its end) has them along its first. Of such layouts, and the leading dims, the first along which the step can be computed
        row by row is the batch, the layout that covers most bytes first. If there is none (epochs of shuffled minibatches), and
        leading dims differ, it is the only layout that covers all arrays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from autopar._jax import Jaxpr, Var
from autopar.ir.dataflow import descendants
from autopar.ir.gradient import is_backward
from autopar.ir.region import kind_of, region_of, trip_count
from autopar.ir.split.rounds.rounds import first_of_samples
from autopar.ir.split.rounds.steps import holds_steps
from autopar.ir.work import num_bytes

Layout = Mapping[int, int]
"""Input of a program -> the dim that runs over samples."""


def samples_behind_time(jaxpr: Jaxpr, arguments: Sequence[Collection[int]], leading: Layout) -> Layout:
    """The layout of a batch in which samples lie behind time; {}: there is none, or the leading dims will do.

    Args:
        jaxpr: The program.
        arguments: For each argument that may hold samples its inputs of one dim or more, without random keys.
        leading: The batch as leading dims tell; {}: they do not.
    """
    layouts = [layout for layout in _layouts(jaxpr, arguments) if _goes_through_time(jaxpr, layout)]
    if not layouts:
        return {}
    ways = [way for way in (leading, *layouts) if way]
    ways.sort(key=lambda way: -sum(num_bytes(jaxpr.invars[k]) for k in way))
    found = first_of_samples(jaxpr, ways)
    if found is None and len({jaxpr.invars[k].aval.shape[dim] for k, dim in leading.items()}) != 1:
        covering = [layout for layout in layouts if all(k in layout for inputs in arguments for k in inputs)]
        found = covering[0] if len(covering) == 1 else None
    return found if found is not None and found != leading else {}


def _layouts(jaxpr: Jaxpr, arguments: Sequence[Collection[int]]) -> Iterator[Layout]:
    """For each size of a second dim the inputs that have it as their first or second; of arguments all of whose arrays do."""
    shapes = {k: tuple(jaxpr.invars[k].aval.shape) for inputs in arguments for k in inputs}
    sizes = dict.fromkeys(shape[1] for shape in shapes.values() if len(shape) > 1 and shape[1] > 1)
    for size in sizes:
        layout: dict[int, int] = {}
        for inputs in arguments:
            dims = {k: shapes[k][:2].index(size) for k in inputs if size in shapes[k][:2]}
            if all(k in dims or len(shapes[k]) == 1 for k in inputs):
                layout |= dims
        yield layout


def _goes_through_time(jaxpr: Jaxpr, layout: Layout) -> bool:
    """Whether a loop of the forward pass that carries something goes through the dim before the samples."""
    made = descendants(jaxpr.eqns, given=[jaxpr.invars[k] for k, dim in layout.items() if dim])
    times = {jaxpr.invars[k].aval.shape[0] for k, dim in layout.items() if dim}
    for eqn in jaxpr.eqns:
        if kind_of(eqn) == "scan" and trip_count(eqn) in times and not is_backward(eqn) and not holds_steps(eqn):
            scan = region_of(eqn)
            read = [b.operand for b in scan.of_role("xs")]
            if scan.of_role("carry") and any(isinstance(a, Var) and a in made for a in read):
                return True
    return False
