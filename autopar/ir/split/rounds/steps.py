"""Loops of training steps: which loops they are, and along which dims of what they read samples lie.

In:     equations of a flat program; a value.
Out:    whether an equation takes gradients in a body, and whether it goes on with what they have moved; the dims of the value
        that run over samples.
Method: samples lie along the leading dim of what a step reads. If a loop of training steps reads a stack, that step is a trip,
        and the stack's own leading dim counts steps: `[steps, batch, ...]`. If the trips only add up gradients, it counts the
        user's microbatches, and runs over samples too. Casts and other equations that keep all dims are passed through.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autopar._jax import Jaxpr, JaxprEqn, Var
from autopar.ir.dataflow import descendants, inputs_of, readers_of
from autopar.ir.dims import Dims
from autopar.ir.gradient import holds_backward, is_backward, takes_gradients
from autopar.ir.region import Region, is_region, kind_of, region_of
from autopar.ir.rules import rule_for


def holds_steps(eqn: JaxprEqn) -> bool:
    """Whether an equation is a loop or condition that takes gradients in a body, and is not part of a backward pass."""
    if kind_of(eqn) not in ("scan", "while", "cond") or is_backward(eqn):
        return False
    return any(map(takes_gradients, region_of(eqn).bodies))


def is_loop_of_steps(eqn: JaxprEqn) -> bool:
    """Whether an equation is a scan whose trips take gradients at values that those of earlier trips have moved."""
    is_scan = kind_of(eqn) == "scan" and not eqn.effects
    return is_scan and holds_steps(eqn) and _goes_on_with_gradients(region_of(eqn))


def _goes_on_with_gradients(scan: Region) -> bool:
    """Whether a trip takes gradients that depend on those of earlier trips; with a mere sum of gradients it does not."""
    (body,), carried = scan.bodies, list(scan.of_role("carry"))
    moved: dict[Var, None] = {}
    while True:  # a carry may depend on gradients through another carry
        behind = descendants(body.eqns, holds_backward, moved)
        more = [b.inputs[0] for b in carried if b.outputs[0] in behind]
        if len(more) == len(moved):
            break
        moved = dict.fromkeys(filter(None, more))
    led = descendants(body.eqns, given=moved)
    return any(holds_backward(eqn) and any(a in led for a in inputs_of(eqn)) for eqn in body.eqns)


def dims_of_samples(jaxpr: Jaxpr, values: Iterable[Var]) -> dict[Var, Dims]:
    """For each value the dims that run over samples, if it is (a stack of) the batch; none if its rows are single numbers."""
    if not any(map(holds_steps, jaxpr.eqns)):
        return {var: frozenset({0} if var.aval.shape else ()) for var in values}
    found = _SampleDims(readers_of(jaxpr.eqns))
    return {var: found.of_value(var) for var in values}


class _SampleDims:
    def __init__(self, readers: Mapping[Var, Sequence[JaxprEqn]]):
        self.readers, self.known = readers, dict[Var, Dims]()

    def of_value(self, var: Var) -> Dims:
        if var not in self.known:
            ways = [self.of_reader(eqn, var) for eqn in self.readers.get(var, ())] or [frozenset({0})]
            found = frozenset.intersection(*ways)
            if any(ways) and not found:  # its readers disagree
                found = frozenset({0})
            self.known[var] = frozenset(d for d in found if d < len(var.aval.shape))
        return self.known[var]

    def of_reader(self, eqn: JaxprEqn, var: Var) -> Dims:
        if is_region(eqn):
            return _of_loop(eqn, var)
        rule = rule_for(eqn)
        for atom, term in zip(eqn.invars, rule.operands, strict=True):
            for result, kept in zip(eqn.outvars, rule.results, strict=True):
                if atom is var and kept[: len(term)] == term:
                    return self.of_value(result)
        return frozenset({0})


def _of_loop(eqn: JaxprEqn, var: Var) -> Dims:
    """The dims of a value that run over samples, as a region that reads it sees them."""
    region = region_of(eqn)
    if region.kind != "scan" or not holds_steps(eqn):
        return frozenset({0})
    read = [b for b in region.of_role("const", "xs") if b.operand is var]
    inside = dims_of_samples(region.bodies[0], [b.var for b in read])
    found = frozenset(d + b.lead for b in read for d in inside[b.var])
    is_summed = found and not is_loop_of_steps(eqn) and any(b.is_stacked for b in read)
    return found | {0} if is_summed else found
