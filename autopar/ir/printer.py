"""Prints programs: one equation per line, with short stable names, types, and the user's source line.

In:     a flat jaxpr; `program.py` adds the header and footer of a traced step.
Out:    text that is the same in every run; bodies of loops are indented below their equation.
Method: variables are named a, b, ..., z, aa, ... in the order in which they are defined.
"""

from __future__ import annotations

import functools
import itertools
import string
from collections.abc import Iterator
from typing import Any

import numpy as np

from autopar._jax import Atom, ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Params, Var
from autopar.ir.region import REGIONS, is_region, region_of
from autopar.ir.source import name_scope, source_line

_SOURCE_COLUMN = 100


def print_jaxpr(jaxpr: Jaxpr) -> str:
    """A flat jaxpr as text, without source lines."""
    names = Names()
    lines = ["in " + ", ".join(map(names.define, [*jaxpr.constvars, *jaxpr.invars]))]
    lines += equations_text(jaxpr, names, "  ", source=False)
    lines.append("out " + ", ".join(map(names.use, jaxpr.outvars)))
    return "\n".join(line.rstrip() for line in lines)


def print_equation(eqn: JaxprEqn) -> str:
    """One equation on one line; its variables are named anew, from a."""
    names = Names()
    operands = ", ".join(names.define(x) if isinstance(x, Var) else names.use(x) for x in eqn.invars)
    results = ", ".join(map(names.define, eqn.outvars))
    return f"{results} = {eqn.primitive}{_params(eqn)} {operands}"


class Names:
    """The names of the variables printed so far."""

    def __init__(self) -> None:
        self._fresh = _letters()
        self._name_of: dict[Var, str] = {}

    def define(self, var: Var) -> str:
        if isinstance(var, DropVar):
            return f"_:{_type(var)}"
        if var not in self._name_of:
            self._name_of[var] = next(self._fresh)
        return f"{self._name_of[var]}:{_type(var)}"

    def use(self, atom: Atom) -> str:
        if isinstance(atom, Literal):
            return f"{np.asarray(atom.val, atom.aval.dtype)[()]!s}:{_type(atom)}"
        return self._name_of.get(atom, "?")


def _letters() -> Iterator[str]:
    for length in itertools.count(1):
        yield from map("".join, itertools.product(string.ascii_lowercase, repeat=length))


def _type(atom: Atom) -> str:
    return _short(atom.aval)


@functools.lru_cache(maxsize=4096)
def _short(aval: Any) -> str:
    return str(aval.str_short(short_dtypes=True))


def equations_text(jaxpr: Jaxpr, names: Names, indent: str, source: bool) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        operands = " ".join(map(names.use, eqn.invars))
        results = " ".join(map(names.define, eqn.outvars))
        line = f"{indent}{results} = {eqn.primitive}{_params(eqn)} {operands}".rstrip()
        if source:
            scope = name_scope(eqn)
            line = f"{line:{_SOURCE_COLUMN}}  # {source_line(eqn)}{f' {scope}' if scope else ''}"
        yield line
        region = region_of(eqn) if is_region(eqn) else None
        for label, body in zip(region.labels, region.bodies, strict=True) if region else ():
            yield f"{indent}  {label} {', '.join(map(names.define, body.invars))}:".replace(" :", ":")
            yield from equations_text(body, names, indent + "    ", source)
            yield f"{indent}    -> {' '.join(map(names.use, body.outvars))}"


_BODIES = frozenset(
    {"jaxpr", "cond_jaxpr", "body_jaxpr", "branches", "ft_in", "ft_out", "num_consts", "num_carry", "cond_nconsts",
     "body_nconsts"}
)  # fmt: skip
_SILENT = frozenset({"sharding", "out_sharding", "weak_type"})


def _params(eqn: JaxprEqn) -> str:
    shown = _shown_params(eqn.primitive.name, eqn.params)
    return f"[{' '.join(f'{name}={text}' for name, text in shown)}]" if shown else ""


def _shown_params(primitive: str, params: Params) -> list[tuple[str, str]]:
    if primitive in ("jit", "pjit"):
        return [("name", params["name"])]
    hidden = _SILENT | _BODIES if primitive in REGIONS else _SILENT
    shown = []
    for name, value in params.items():
        is_empty = isinstance(value, tuple | str) and not value
        if not (value is None or value is False or is_empty or name in hidden):
            shown.append((name, _value(value)))
    return shown


def _value(value: object) -> str:
    """A parameter's value as text that is the same in every process: no addresses, no programs."""
    if isinstance(value, np.generic):
        return str(value.item())
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, Jaxpr | ClosedJaxpr):
        return "<program>"
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return f"({','.join(map(_value, value))})"
    if isinstance(value, bool | int | float | complex | str):
        return str(value)
    if callable(value):
        return f"<{getattr(value, '__name__', type(value).__name__)}>"
    text = str(value)
    return f"<{type(value).__name__}>" if " at 0x" in text else "".join(text.split())
