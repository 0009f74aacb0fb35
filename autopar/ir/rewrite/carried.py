"""Tells what the trips of a loop that takes gradients do to each of its carries.

In:     a scan; what is known of the program's values.
Out:    for each carry: a sum of what the trips add, a weighted sum such as a running mean, a number that counts, something
        that goes on by itself, as a random key that each trip splits, or something that no gradient waits for.
Method: dataflow of the body. A carry that becomes `factor * carry + addend`, with factors that are known for all trips, is a
        weighted sum: the weight of a trip's addend is the product of the factors of later trips.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from autopar._jax import Atom, JaxprEqn, Var
from autopar.ir.dataflow import descendants, inputs_of, makers, needed, read_by, times_read, variables
from autopar.ir.gradient import holds_backward
from autopar.ir.known_values import KnownValues
from autopar.ir.region import Binding, Region


@dataclass(frozen=True, slots=True)
class Sum:
    """A carry that only grows, by `addend` in each trip."""

    addend: Atom


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """A carry that becomes `factor * carry + addend` in each trip: a running mean, or a sum that the first trip begins.

    Attributes:
        begin: The weight of what the loop begins with.
        weights: The weight of each trip's addend, which is what the trip makes of a carry of zeros.
    """

    begin: float
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Count:
    """A carry that is `first` in the first trip, and `step` more in each trip after; a `step` of 0: it stays as it is."""

    first: float = 0
    step: float = 0


@dataclass(frozen=True, slots=True)
class Ahead:
    """A carry that goes on by itself, from what all trips share: a random key that each trip splits."""


@dataclass(frozen=True, slots=True)
class Behind:
    """A carry that no gradient or sum depends on: the largest loss, running statistics."""


Carry = Sum | WeightedSum | Count | Ahead | Behind


def carries_of(scan: Region, known: KnownValues) -> list[Carry] | None:
    """What the carries of a scan are; None: it has to be a loop, since one of them is something else."""
    body = Body(scan)
    found: dict[Binding, Carry] = {}
    for b in scan.carries:
        numbers = known.in_trips(b.var, scan)
        if numbers is not None and numbers.shape == (scan.trips,):
            found[b] = Count(numbers[0].item(), (numbers[1] - numbers[0]).item())
        elif b.value is b.var:
            found[b] = Count()
        elif (addend := body.addend(b.var, b.value)) is not None:
            found[b] = Sum(addend)
        elif (factors := body.factors(b.var, b.value, known)) is not None:
            found[b] = _weighted(factors, scan.eqn.params["reverse"])
    found |= dict.fromkeys(body.ahead(found), Ahead())
    if body.rest_is_behind(found):
        found |= {b: Behind() for b in scan.carries if b not in found}
    return [found[b] for b in scan.carries] if len(found) == len(scan.carries) else None


def _weighted(factors: np.ndarray, reverse: bool) -> WeightedSum:
    """The sum of a carry that is multiplied with these factors, one for each row."""
    in_turn = factors[::-1] if reverse else factors
    begin, *weights = np.cumprod([1, *in_turn[::-1]])[::-1].tolist()
    return WeightedSum(begin, tuple(reversed(weights) if reverse else weights))


class Body:
    """Tells what a trip does to a carry."""

    def __init__(self, scan: Region):
        self.scan = scan
        (self.jaxpr,) = scan.bodies
        self.made_by = makers(self.jaxpr.eqns)
        self.times_read = times_read(self.jaxpr.eqns, self.jaxpr.outvars)

    def addend(self, before: Var, after: Atom) -> Atom | None:
        """What `after` is `before` plus, if nothing else reads either; else None."""
        total = self.plain(after)
        adding = self.made_by.get(total) if isinstance(total, Var) else None
        if adding is None or adding.primitive.name not in ("add", "add_any"):
            return None
        operands = [self.plain(a) for a in adding.invars]
        alone = all(self.times_read[var] == 1 for var in variables([before, total, after]))
        return adding.invars[1 - operands.index(before)] if alone and before in operands else None

    def plain(self, atom: Atom) -> Atom:
        """A value before conversions to its own dtype (a carry that began as a Python number has such), if it is read once."""
        while isinstance(atom, Var) and self.times_read[atom] == 1 and atom in self.made_by:
            eqn = self.made_by[atom]
            if eqn.primitive.name != "convert_element_type" or eqn.invars[0].aval.dtype != atom.aval.dtype:
                break
            atom = eqn.invars[0]
        return atom

    def factors(self, before: Var, after: Atom, known: KnownValues) -> np.ndarray | None:
        """In each trip, the factor of `before` in `after`, if `after` is linear in it and nothing else reads it; else None."""
        led: dict[Var, np.ndarray] = {before: np.ones(self.scan.trips)}
        for eqn in self.jaxpr.eqns:
            if any(var in led for var in inputs_of(eqn)):
                made = self.factor(eqn, led, known)
                if made is None or eqn.outvars[0].aval.shape != before.aval.shape:
                    return None
                led[eqn.outvars[0]] = made
        if [a for a in variables(self.jaxpr.outvars) if a in led] != [after] or not isinstance(after, Var):
            return None
        return led[after] if np.isfinite(led[after]).all() else None

    def factor(self, eqn: JaxprEqn, led: Mapping[Var, np.ndarray], known: KnownValues) -> np.ndarray | None:
        """The factor in an equation's result, given those in its operands (none: it does not depend on the carry)."""
        of = [led.get(a) if isinstance(a, Var) else None for a in eqn.invars]
        factors = [np.zeros(self.scan.trips) if factor is None else factor for factor in of]
        to = eqn.outvars[0].aval.dtype if len(eqn.outvars) == 1 else None
        if to is None or not jnp.issubdtype(to, jnp.floating):
            return None
        match eqn.primitive.name, eqn.invars:
            case (("add" | "add_any"), _):
                return factors[0] + factors[1]
            case "sub", _:
                return factors[0] - factors[1]
            case "neg", _:
                return -factors[0]
            case "convert_element_type", [a] if jnp.promote_types(a.aval.dtype, to) == to:
                return factors[0]
            case "mul", [a, b] if of[0] is None or of[1] is None:
                number = known.in_trips(a if of[0] is None else b, self.scan)
                return None if number is None else (factors[0] + factors[1]) * number
            case "div", [_, b] if of[1] is None:
                number = known.in_trips(b, self.scan)
                return None if number is None else factors[0] / number
            case "select_n", [which, *_] if of[0] is None:
                number = known.in_trips(which, self.scan)
                return None if number is None else np.choose(number.astype(int), factors[1:])
        return None

    def ahead(self, found: Mapping[Binding, Carry]) -> list[Binding]:
        """The carries that go on by themselves; `found`: what others are."""
        shared = [b.var for b in self.scan.carries if isinstance(found.get(b), Count)]
        shared += [b.var for b in self.scan.consts]
        left = [b for b in self.scan.carries if b not in found]
        while True:
            given = {*shared, *(b.var for b in left)}
            kept = [b for b in left if self.is_of(given, b.value)]
            if len(kept) == len(left):
                return kept
            left = kept

    def is_of(self, given: Container[Var], value: Atom) -> bool:
        """Whether a value of the body depends on these of its inputs alone, and on no gradient."""
        eqns = needed(self.jaxpr.eqns, variables([value]), effects=False)
        read = read_by(eqns, [value])
        return not any(map(holds_backward, eqns)) and all(var in given for var in read if var not in self.made_by)

    def rest_is_behind(self, found: Mapping[Binding, Carry]) -> bool:
        """Whether nothing that takes gradients, and no other carry, depends on the carries that are not `found`.

        What they need of the trips is kept for all trips, and must be no larger than the sums.
        """
        rest, eqns = [b for b in self.scan.carries if b not in found], self.jaxpr.eqns
        led = descendants(eqns, given=[b.var for b in rest])
        others = [*(b.value for b in found), *(c.addend for c in found.values() if isinstance(c, Sum))]
        if any(var in led for var in variables(others)):
            return False
        if any(holds_backward(eqn) and any(var in led for var in inputs_of(eqn)) for eqn in eqns):
            return False
        kept = sum(var.aval.size for var in done_behind(self.scan, rest).read) * self.scan.trips
        return kept <= sum(b.var.aval.size for b, carry in found.items() if isinstance(carry, Sum | WeightedSum))


class Late(NamedTuple):
    """What a loop behind the trips does.

    Attributes:
        eqns: The equations of the body that depend on the carries that are `Behind`.
        stacks: The stacked results that do.
        read: What these equations and carries read of a trip.
    """

    eqns: list[JaxprEqn]
    stacks: list[Binding]
    read: list[Var]


def done_behind(scan: Region, behind: Sequence[Binding]) -> Late:
    """What behind the trips depends on these carries."""
    led = descendants(scan.bodies[0].eqns, given=[b.var for b in behind])
    eqns = [eqn for eqn in scan.bodies[0].eqns if any(var in led for var in eqn.outvars)]
    elsewhere = {*led, *(b.var for b in scan.consts)}
    read = [var for var in read_by(eqns, [b.value for b in behind]) if var not in elsewhere]
    return Late(eqns, [b for b in scan.ys if isinstance(b.value, Var) and b.value in led], read)
