"""Layer splitting: a `scan` over L layers becomes n scans of about L / n layers in sequence; of one layer each, no scan.

In:     a flat program whose scans run over stacked layers, and n.
Out:    `LayerSplit`: the same program over parts of its stacks: the weights, residuals, gradients and optimizer state of each
        part are values of their own, so that the program can be cut between any two parts.
Method: layers are an axis like microbatches (`solver.py`, `demand.py`, `writer.py`), but all of its shards, the parts, stand in
        the program. A value that is only read in parts is made in parts; an equation that needs a whole value gets the
        parts joined. A stacked argument that is only read in parts becomes one argument per part, and so does its new value.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from autopar._jax import Jaxpr, make_jaxpr
from autopar.ir.region import trip_count
from autopar.ir.rewrite.dead_code import remove_dead_code
from autopar.ir.split.layers.placements import LayerPlacements, is_over_stacks, work_of_passes
from autopar.ir.split.layers.writer import LayerWriter
from autopar.ir.split.placement import Split
from autopar.tuning import TUNING

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class LayerSplit:
    """A program over parts of its stacks.

    Attributes:
        jaxpr: The program.
        count: Number of parts.
        length: Number of layers; 0: no scan is split.
        inputs: For each input of the original program the positions of its inputs here: one, or one per part.
        outputs: The same for results.
        input_dims: For each input of the original program the dim of layers, along which it is split; 0 if it is whole.
        output_dims: The same for results.
    """

    jaxpr: Jaxpr
    count: int
    length: int
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    input_dims: tuple[int, ...]
    output_dims: tuple[int, ...]

    def sizes(self, number: int) -> list[int]:
        """Lengths of the parts of an input of the original program along their dim; of one that is whole, 1."""
        parts, dim = self.inputs[number], self.input_dims[number]
        return [self.jaxpr.invars[at].aval.shape[dim] for at in parts] if len(parts) > 1 else [1]


def whole_stacks(jaxpr: Jaxpr) -> LayerSplit:
    """The `LayerSplit` of a program in which no scan is split."""
    return LayerSplit(
        jaxpr,
        1,
        0,
        tuple((k,) for k in range(len(jaxpr.invars))),
        tuple((k,) for k in range(len(jaxpr.outvars))),
        (0,) * len(jaxpr.invars),
        (0,) * len(jaxpr.outvars),
    )


def layer_count(
    jaxpr: Jaxpr, weights: Collection[int], aliases: Mapping[int, int], stacked: Mapping[int, int] | None = None
) -> int:
    """The trip count of the scans over layers: they do a good part of the work, and read stacks of weights in parts.

    `weights`: inputs that may be such stacks; a scan over time, or over chunks of samples, reads none of them in parts.

    Returns of several trip counts that of the scans with most work; 0: there is none.
    """
    costs, whole = work_of_passes(jaxpr)
    of_length: dict[int, float] = {}
    for eqn, cost in zip(jaxpr.eqns, costs, strict=True):
        if is_over_stacks(eqn):
            of_length[trip_count(eqn)] = of_length.get(trip_count(eqn), 0.0) + cost
    worth = [length for length, cost in of_length.items() if cost >= TUNING.layers_work * whole]
    if len(worth) < 2:
        return next(iter(worth), 0)
    for length in sorted(worth, key=lambda length: (-of_length[length], -length)):
        if not LayerPlacements(jaxpr, length, length, aliases, stacked).find_split()[0].keys().isdisjoint(weights):
            return length
    return 0


def split_layers(
    jaxpr: Jaxpr, length: int, count: int, aliases: Mapping[int, int], stacked: Mapping[int, int] | None = None
) -> LayerSplit:
    """Split the scans of `length` layers into parts.

    Args:
        length: Trip count of these scans.
        count: Number of parts, as even as can be; at most `length`, if that is not 0.
        aliases: Output -> input whose new value it is: both are split, or neither.
        stacked: Inputs that must be split -> along which dim; where one is read whole, its parts are joined.
    """
    layers = LayerPlacements(jaxpr, length, count, aliases, stacked)
    split_in, split_out = layers.find_split()
    writer = LayerWriter(layers)
    invars, inputs = _listed([writer.input(var, split_in.get(k)) for k, var in enumerate(jaxpr.invars)])
    for eqn in jaxpr.eqns:
        writer.equation(eqn)
    made = [
        writer.in_parts(atom, Split(split_out[k])) if k in split_out else [writer.value(atom)]
        for k, atom in enumerate(jaxpr.outvars)
    ]
    outvars, outputs = _listed(made)
    return LayerSplit(
        remove_dead_code(make_jaxpr(invars, outvars, writer.eqns)),
        count,
        length,
        inputs,
        outputs,
        tuple(split_in.get(k, 0) for k in range(len(inputs))),
        tuple(split_out.get(k, 0) for k in range(len(outputs))),
    )


def _listed(groups: Sequence[Sequence[_T]]) -> tuple[list[_T], tuple[tuple[int, ...], ...]]:
    """The concatenation of groups, and the positions of each group in it."""
    ends = list(itertools.accumulate(map(len, groups), initial=0))
    places = tuple(tuple(range(first, end)) for first, end in itertools.pairwise(ends))
    return [value for group in groups for value in group], places
