"""Checks that a program is flat and well-formed; runs after every pass in tests and with `AUTOPAR_CHECK=1`.

In:     a flat jaxpr.
Out:    nothing, or an `AssertionError` that names the equation: a bug of ours, never the user's.
Method: every variable is defined once and before it is used; bodies of loops and branches have the types of their equations;
        no captured constants, no typed keys, no calls that flattening should have inlined.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar._jax import Atom, Jaxpr, JaxprEqn, Literal, Var, is_key, open_jaxpr
from autopar.ir.printer import print_equation
from autopar.ir.region import Region, closed_bodies, is_region, region_of
from autopar.ir.source import source_line

_INLINED = frozenset({"custom_jvp_call", "custom_vjp_call", "closed_call", "remat2", "checkpoint", "composite"})


def check_program(jaxpr: Jaxpr) -> None:
    """Assert that a jaxpr is a flat program.

    Raises `AssertionError`: it is not; the message names the equation and the user's line.
    """
    _check_body(jaxpr, set(), "the program")


@dataclass(frozen=True, slots=True)
class _Place:
    """A location in the program; its text is made only if a check fails."""

    around: object
    eqn: JaxprEqn | None = None
    label: str = ""

    def __str__(self) -> str:
        text = str(self.around)
        if self.eqn is not None:
            text += f", {source_line(self.eqn)}: {print_equation(self.eqn)}"
        return f"{text}, {self.label}" if self.label else text


def _check_body(jaxpr: Jaxpr, defined_elsewhere: set[Var], where: object) -> None:
    assert not jaxpr.constvars, f"{where} has {len(jaxpr.constvars)} constvars"
    defined: set[Var] = set()

    def define(var: Var, at: _Place) -> None:
        assert isinstance(var, Var), f"{at}: {var} is no variable"
        assert var not in defined and var not in defined_elsewhere, f"{at}: {var} is defined twice"
        assert not is_key(var.aval), f"{at}: {var.aval} is a typed key"
        defined.add(var)
        defined_elsewhere.add(var)

    def use(atom: Atom, at: _Place) -> None:
        if isinstance(atom, Literal):
            assert not getattr(atom.aval, "shape", ()), f"{at}: an array stands as a literal"
            assert not is_key(atom.aval), f"{at}: {atom.aval} is a typed key"
        else:
            assert atom in defined, f"{at}: {atom} is used before it is defined"

    for var in jaxpr.invars:
        define(var, _Place(where))
    for eqn in jaxpr.eqns:
        at = _Place(where, eqn)
        for atom in eqn.invars:
            use(atom, at)
        assert eqn.primitive.name not in _INLINED, f"{at}: should have been inlined"
        if is_region(eqn):
            _check_region(region_of(eqn), defined_elsewhere, at)
        for var in eqn.outvars:
            define(var, at)
    for atom in jaxpr.outvars:
        use(atom, _Place(where, label="results"))


def _check_region(region: Region, defined: set[Var], at: _Place) -> None:
    """Check the bodies of a region, and that each binding has one type inside and outside (per row, if it is stacked)."""
    for label, closed, body in zip(region.labels, closed_bodies(region.eqn), region.bodies, strict=True):
        assert not open_jaxpr(closed)[1], f"{at}, {label}: constants inside"
        _check_body(body, defined, _Place(at, label=label))
    for b in region.bindings:
        lead = (region.trips,) * b.lead
        inside = [((*lead, *a.aval.shape), a.aval.dtype) for a in (*b.variables, *b.values)]
        outside = [(a.aval.shape, a.aval.dtype) for a in (b.operand, b.result) if a is not None]
        kinds = list(dict.fromkeys([*outside, *inside]))
        assert len(kinds) == 1, f"{at}, {b.role}: {' against '.join(map(str, kinds))}"
