"""Reads values in host memory: each is copied to the device before its readers, and again where they are far apart.

In:     equations, and which of the values that they read are in host memory.
Out:    the same equations, with copies to the device. A scan copies stacks that it reads, or sends there, row by row.
Method: a copy is used again by readers before which few others are copied, and begins while the one before is being read.
        What is computed from such a value alone, and is not larger (a cast, a slice), is computed anew from each copy:
        otherwise it would wait on the device in its place, as the cast weights of a forward pass for the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax

from autopar._jax import Atom, Aval, JaxprEqn, Var, in_host_memory, new_var, replace_eqn, resized
from autopar.grouping import grouped
from autopar.ir.build import Equations
from autopar.ir.dataflow import inputs_of, makers, reading, variables
from autopar.ir.region import Binding, Region, bodies_of, kind_of, region_of, rows_in, rows_out
from autopar.ir.rewrite.views import is_derived
from autopar.ir.work import EqualRules
from autopar.tuning import TUNING


def copy_to(atom: Atom, made: Var, space: jax.memory.Space, near: JaxprEqn | None = None) -> JaxprEqn:
    """A copy of `atom` to a memory space, with the source location of `near`."""
    source = None if near is None else near.source_info
    return replace_eqn(_copy(atom.aval, space), invars=[atom], outvars=[made], source_info=source)


@functools.lru_cache(maxsize=1024)
def _copy(aval: Aval, space: jax.memory.Space) -> JaxprEqn:
    """A copy of such a value: to trace one for each of thousands would take seconds."""
    copied = Equations()
    copied.call(lambda x: jax.device_put(x, space), [new_var(aval)])
    return copied[-1]


def read_from_host(
    eqns: Sequence[JaxprEqn], there: Mapping[Var, Var], results: Iterable[Atom] = (), reach: int = TUNING.fetched_reach
) -> tuple[list[JaxprEqn], dict[Var, Var]]:
    """Equations that read values in host memory.

    Args:
        eqns: Equations that read these values on the device.
        there: Such a value -> its name in host memory.
        results: What else is read on the device, in the end.
        reach: A copy is used again if no more than so many others have been read since.

    Returns:
        The equations, and names of those results that are such values, or computed from one.
    """
    reads = _Reads(there, {*variables(results)}, reach)
    for eqn in eqns:
        reads.equation(eqn)
    end = Equations()
    names = {a: reads.name(a, end, None) for a in variables(results) if a in reads.value_of}
    return reads.written(end), names


def send_rows(eqn: JaxprEqn, there: Mapping[Var, Var]) -> JaxprEqn:
    """A scan that copies rows of stacks to host memory as it makes them.

    `there`: stack that the scan makes -> its name in host memory.
    """
    scan, copies, bindings = region_of(eqn), Equations(), list[Binding]()
    made = makers(scan.bodies[0].eqns)
    for b in scan.bindings:
        if b.result in there:
            row = new_var(in_host_memory(b.value.aval))
            copies.append(copy_to(b.value, row, jax.memory.Space.Host, made.get(b.value)))  # type: ignore[arg-type]
            b = rows_out(row, there[b.result])
        bindings.append(b)
    return scan.rebuild(bindings, [[*scan.bodies[0].eqns, *copies]])


@dataclass(frozen=True, slots=True)
class _Fetch:
    """A copy of a value to the device: its name, the equation that it is made for, and the item before which it begins."""

    value: Var
    name: Var
    near: JaxprEqn | None
    begins: int


class _Reads:
    """Writes equations that read values in host memory.

    Attributes:
        there: Such a value -> its name in host memory.
        value_of: Such a value, or one computed from it alone -> the value.
        views: What is computed from one such value alone -> how.
        here: Value -> names of it, and of its views, on the device; those read last come last.
        items: What is written so far: equations, copies.
        begins: The item before which the next copy begins: the last that reads a copy; or it comes behind the last loop.
            None: there is neither, and it begins where it is read.
    """

    def __init__(self, there: Mapping[Var, Var], results: set[Var], reach: int):
        self.there, self.results, self.reach = dict(there), results, reach
        self.value_of = {var: var for var in there}
        self.views: dict[Var, JaxprEqn] = {}
        self.here: dict[Var, dict[Var, Var]] = {}
        self.items: list[JaxprEqn | _Fetch] = []
        self.begins: int | None = None
        self.rules = EqualRules()

    def equation(self, eqn: JaxprEqn) -> None:
        """Write an equation, after copies of what it reads."""
        read = [a for a in dict.fromkeys(inputs_of(eqn)) if a in self.value_of]
        if read and self.is_view(eqn):
            self.views.update(dict.fromkeys(eqn.outvars, eqn))
            self.value_of.update(dict.fromkeys(eqn.outvars, self.value_of[read[0]]))
            return
        if read and kind_of(eqn) == "scan":
            eqn = self.reading_rows(region_of(eqn))
        before = Equations()
        names = {a: self.name(a, before, eqn) for a in inputs_of(eqn) if a in self.value_of}
        if names:
            self.begins = len(self.items)
        self.items += [*before, reading(eqn, names)]
        if bodies_of(eqn):
            self.begins = len(self.items)

    def is_view(self, eqn: JaxprEqn) -> bool:
        """Whether an equation derives something from one value in host memory alone."""
        is_one = len({self.value_of.get(a) for a in inputs_of(eqn)}) == 1
        return is_one and self.results.isdisjoint(eqn.outvars) and is_derived(eqn, self.rules)

    def name(self, var: Var, before: list[JaxprEqn], near: JaxprEqn | None) -> Var:
        """The name of a value on the device; what is to be computed for `near` is added to `before`."""
        value = self.value_of[var]
        if value not in self.here:
            begins = len(self.items) if self.begins is None else self.begins
            fetch = _Fetch(value, new_var(value.aval), near, begins)
            self.items.append(fetch)
            self.here[value] = {value: fetch.name}
        names = self.here[value] = self.here.pop(value)  # it is read last now
        for earlier in [*self.here][: -self.reach]:
            del self.here[earlier]
        if var not in names:
            view = self.views[var]
            operands = {a: self.name(a, before, near) for a in inputs_of(view)}
            for made in view.outvars:
                names[made] = new_var(made.aval)
            source = view.source_info if near is None else near.source_info
            before.append(
                replace_eqn(reading(view, operands), outvars=[names[v] for v in view.outvars], source_info=source)
            )
        return names[var]

    # Scans that read stacks row by row.

    def reading_rows(self, scan: Region) -> JaxprEqn:
        """A scan that copies rows of stacks in host memory, in its trips."""
        casts = {b.operand: self.casts(b.operand) for b in scan.xs}
        rows: dict[Var, tuple[Var, Var]] = {}  # value -> its row, and the name of that in host memory
        bindings, body = list[Binding](), Equations()
        for b in scan.bindings:
            steps = casts.get(b.operand) if b.role == "xs" else None
            if steps is None:
                bindings.append(b)
                continue
            value = self.value_of[b.operand]  # type: ignore[index]
            shape = b.var.aval.shape
            if value not in rows:
                row = new_var(resized(value.aval, shape)) if steps else b.var
                rows[value] = row, new_var(in_host_memory(row.aval))
                bindings.append(rows_in(self.there[value], rows[value][1]))
            names = {value: rows[value][0]}
            for step in steps:
                made = b.var if step is steps[-1] else new_var(resized(step.outvars[0].aval, shape))
                body.append(replace_eqn(reading(step, names), outvars=[made]))
                names[step.outvars[0]] = made
            if not steps and names[value] is not b.var:
                body.name(b.var, names[value])
        if not rows:
            return scan.eqn
        self.here.clear()  # the trips take long
        (inner,) = scan.bodies
        eqns, names = read_from_host([*body, *inner.eqns], dict(rows.values()), inner.outvars, len(rows))
        outputs = [names.get(a, a) for a in inner.outvars]  # type: ignore[arg-type]
        template = scan.rebound(outputs=[outputs])
        leaving = dict(zip(scan.bindings, template, strict=True))
        return scan.rebuild([leaving.get(b, b) for b in bindings], [eqns])

    def casts(self, stack: Atom | None) -> list[JaxprEqn] | None:
        """The equations that compute a stack element by element from a value in host memory; None: it is no such stack."""
        steps: list[JaxprEqn] = []
        while stack in self.views:
            step = self.views[stack]
            rule, (var,) = self.rules.of(step), step.outvars
            if len(step.invars) != 1 or rule.local is not None or rule.operands != rule.results:
                return None
            steps.append(step)
            (stack,) = inputs_of(step)
            if stack.aval.shape != var.aval.shape:
                return None
        return steps[::-1] if stack in self.there else None

    def written(self, end: Iterable[JaxprEqn]) -> list[JaxprEqn]:
        """All equations, with each copy where it begins: while the array before is being read."""
        copies = grouped((item.begins, item) for item in self.items if isinstance(item, _Fetch))
        found: list[JaxprEqn] = []
        for k, item in enumerate([*self.items, *end]):
            for fetch in copies.get(k, ()):
                found.append(copy_to(self.there[fetch.value], fetch.name, jax.memory.Space.Device, fetch.near))
            found += [] if isinstance(item, _Fetch) else [item]
        return found
