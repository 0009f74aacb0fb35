"""The checker of flat programs, run between passes in tests and when a pass is developed.

In:     a flat jaxpr.
Out:    nothing, or an `AssertionError` that names the equation: this is a bug of ours, never the user's.
Method: every variable is defined once and before it is used; bodies of loops and branches agree with their equations;
        no constants inside, no typed keys, no calls that flattening should have opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar._jax import Atom, Jaxpr, JaxprEqn, Literal, Var, is_key, open_jaxpr, scan_counts
from autopar.ir.printer import print_equation
from autopar.ir.source import source_line

_OPENED = frozenset({"custom_jvp_call", "custom_vjp_call", "closed_call", "remat2", "checkpoint", "composite"})


def check_program(jaxpr: Jaxpr) -> None:
    """Assert that a jaxpr is a flat program.

    Raises:
        AssertionError: It is not; the message names the equation and the user's line.
    """
    _check_body(jaxpr, set(), "the program")


def _check_body(jaxpr: Jaxpr, defined_elsewhere: set[Var], where: str) -> None:
    assert not jaxpr.constvars, f"{where} has {len(jaxpr.constvars)} constvars"
    defined: set[Var] = set()

    def define(var: Var, at: str) -> None:
        assert isinstance(var, Var), f"{at}: {var} is no variable"
        assert var not in defined and var not in defined_elsewhere, f"{at}: {var} is defined twice"
        assert not is_key(var.aval), f"{at}: {var.aval} is a typed key"
        defined.add(var)
        defined_elsewhere.add(var)

    def use(atom: Atom, at: str) -> None:
        if isinstance(atom, Literal):
            assert not getattr(atom.aval, "shape", ()), f"{at}: an array stands as a literal"
            assert not is_key(atom.aval), f"{at}: {atom.aval} is a typed key"
        else:
            assert atom in defined, f"{at}: {atom} is used before it is defined"

    for var in jaxpr.invars:
        define(var, where)
    for eqn in jaxpr.eqns:
        at = f"{where}, {source_line(eqn)}: {print_equation(eqn)}"
        for atom in eqn.invars:
            use(atom, at)
        assert eqn.primitive.name not in _OPENED, f"{at}: should have been opened"
        _CHECKS.get(eqn.primitive.name, _check_nothing)(eqn, defined_elsewhere, at)
        for var in eqn.outvars:
            define(var, at)
    for atom in jaxpr.outvars:
        use(atom, f"{where}, results")


def _check_nothing(eqn: JaxprEqn, defined: set[Var], at: str) -> None:
    """Equations without bodies have nothing to agree on."""


def _same(left: Sequence[Any], right: Sequence[Any], at: str) -> None:
    left = [(aval.shape, aval.dtype) for aval in left]
    right = [(aval.shape, aval.dtype) for aval in right]
    assert left == right, f"{at}: {left} against {right}"


def _avals(atoms: Sequence[Atom]) -> list[Any]:
    return [atom.aval for atom in atoms]


def _body(closed: Any, defined: set[Var], at: str) -> Jaxpr:
    jaxpr, consts = open_jaxpr(closed)
    assert not consts, f"{at}: constants inside"
    _check_body(jaxpr, defined, at)
    return jaxpr


def _check_scan(eqn: JaxprEqn, defined: set[Var], at: str) -> None:
    body = _body(eqn.params["jaxpr"], defined, f"{at}, body")
    num_consts, num_carry = scan_counts(eqn.params)
    first_x = num_consts + num_carry
    _same(_avals(eqn.invars[:first_x]), _avals(body.invars[:first_x]), f"{at}, operands")
    _same(_avals(body.invars[num_consts:first_x]), _avals(body.outvars[:num_carry]), f"{at}, carry")
    _same(_avals(eqn.outvars[:num_carry]), _avals(body.outvars[:num_carry]), f"{at}, carry")
    outer = [*eqn.invars[first_x:], *eqn.outvars[num_carry:]]
    inner = [*body.invars[first_x:], *body.outvars[num_carry:]]
    for whole, part in zip(outer, inner, strict=True):
        stacked = (eqn.params["length"], *part.aval.shape)
        assert (whole.aval.shape, whole.aval.dtype) == (stacked, part.aval.dtype), f"{at}: {whole} against {part}"


def _check_while(eqn: JaxprEqn, defined: set[Var], at: str) -> None:
    test = _body(eqn.params["cond_jaxpr"], defined, f"{at}, test")
    body = _body(eqn.params["body_jaxpr"], defined, f"{at}, body")
    num_test, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carry = eqn.invars[num_test + num_body :]
    _same(_avals([*eqn.invars[:num_test], *carry]), _avals(test.invars), f"{at}, test")
    _same(_avals([*eqn.invars[num_test : num_test + num_body], *carry]), _avals(body.invars), f"{at}, body")
    _same(_avals(carry), _avals(body.outvars), f"{at}, carry")
    _same(_avals(carry), _avals(eqn.outvars), f"{at}, results")


def _check_cond(eqn: JaxprEqn, defined: set[Var], at: str) -> None:
    for i, closed in enumerate(eqn.params["branches"]):
        body = _body(closed, defined, f"{at}, branch {i}")
        _same(_avals(eqn.invars[1:]), _avals(body.invars), f"{at}, branch {i}")
        _same(_avals(eqn.outvars), _avals(body.outvars), f"{at}, branch {i}")


_CHECKS = {"scan": _check_scan, "while": _check_while, "cond": _check_cond}
