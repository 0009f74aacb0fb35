"""Regions: equations that hold programs (`scan`, `while`, `cond`) and the barrier, by what crosses their boundary.

In:     a structured equation of the program.
Out:    `Region`: its bodies and its `Binding`s, one for each value that crosses the boundary: what it is outside, and in
        each body. `rebuild` writes the equation that other bindings and other bodies make.
Method: an equation's operands are the bindings that have one, in order; so are its results, and each body's inputs and
        results. What is said of bindings is said of all kinds of regions; no other file counts operands.
"""

from __future__ import annotations

import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from autopar._jax import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Var,
    close_jaxpr,
    find_primitives,
    make_jaxpr,
    new_eqn,
    new_scan_params,
    new_var,
    open_jaxpr,
    replace_eqn,
    resized,
    scan_counts,
    scan_params,
    shaped,
)

Kind: typing.TypeAlias = typing.Literal["scan", "while", "cond", "barrier"]
Role: typing.TypeAlias = typing.Literal["test", "const", "carry", "xs", "ys", "result", "through"]
_ORDER: tuple[Role, ...] = ("test", "const", "carry", "xs", "ys", "result", "through")
REGIONS: dict[str, Kind] = {"scan": "scan", "while": "while", "cond": "cond", "optimization_barrier": "barrier"}
"""The primitives that are taken apart."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """One value at the boundary of a region.

    Attributes:
        role: `"const"` enters all trips or branches alike, `"xs"` row by row; `"carry"` goes from trip to trip; `"ys"`
            leaves row by row, `"result"` leaves the branch that is taken; `"test"` decides: the index of a `cond`, the
            result of a `while`'s first body; `"through"` passes a barrier.
        outer: The operand.
        inner: For each body the variable as which it enters.
        inside: For each body the result that leaves it.
        result: The equation's result. None, here and above: there is none.
    """

    role: Role
    outer: Atom | None = None
    inner: tuple[Var | None, ...] = ()
    inside: tuple[Atom | None, ...] = ()
    result: Var | None = None

    @property
    def is_stacked(self) -> bool:
        """Whether a body has a row of what is outside."""
        return self.role in ("xs", "ys")

    @property
    def lead(self) -> int:
        """How many dims stand outside in front of those that a body has."""
        return int(self.is_stacked)

    @property
    def variables(self) -> list[Var]:
        """What it is called in bodies that it enters."""
        return [var for var in self.inner if var is not None]

    @property
    def values(self) -> list[Atom]:
        """What of bodies leaves them for it."""
        return [atom for atom in self.inside if atom is not None]

    @property
    def var(self) -> Var:
        """What it is called in the body of a loop."""
        return self.variables[-1]

    @property
    def value(self) -> Atom:
        """What of the body of a loop leaves it."""
        return self.values[-1]


def rows_in(stack: Atom, row: Var) -> Binding:
    """Each trip of a scan reads a row of a stack."""
    return Binding("xs", stack, (row,), (None,))


def rows_out(value: Atom, stack: Var | None) -> Binding:
    """What each trip of a scan makes is a row of a stack."""
    return Binding("ys", None, (None,), (value,), stack)


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A structured equation, taken apart.

    Attributes:
        eqn: The equation.
        kind: Which.
        bodies: Its programs, in the order of its parameters; of a `while` the test and the body, of a barrier none.
        bindings: What crosses its boundary.
    """

    eqn: JaxprEqn
    kind: Kind
    bodies: tuple[Jaxpr, ...] = field(repr=False)
    bindings: tuple[Binding, ...]

    @property
    def trips(self) -> int:
        """How often a body runs, as far as that is known."""
        return trip_count(self.eqn)

    @property
    def labels(self) -> list[str]:
        """What to call each body."""
        if self.kind == "cond":
            return [f"branch {k}" for k in range(len(self.bodies))]
        return ["test", "body"][-len(self.bodies) :] if self.bodies else []

    def of_role(self, *roles: Role) -> list[Binding]:
        """Bindings of these roles, in order."""
        return [b for b in self.bindings if b.role in roles]

    @property
    def consts(self) -> list[Binding]:
        """What enters and stays."""
        return self.of_role("const")

    @property
    def carries(self) -> list[Binding]:
        """What goes from trip to trip."""
        return self.of_role("carry")

    @property
    def xs(self) -> list[Binding]:
        """What enters row by row."""
        return self.of_role("xs")

    @property
    def ys(self) -> list[Binding]:
        """What leaves row by row."""
        return self.of_role("ys")

    def named(self) -> Iterator[tuple[tuple[Role, int], Binding]]:
        """Each binding, and which of its role it is."""
        seen: Counter[Role] = Counter()
        for b in self.bindings:
            yield (b.role, seen[b.role]), b
            seen[b.role] += 1

    def new_stack(self, value: Var) -> Var:
        """A variable for the stack of what the trips make of a value."""
        return new_var(resized(value.aval, (self.trips, *value.aval.shape)))

    # Something for each binding, in the order in which the equation or a body has it.

    def of_operands(self, each: Iterable[_T]) -> list[_T]:
        """What bindings that have an operand have."""
        return [value for b, value in zip(self.bindings, each, strict=True) if b.outer is not None]

    def of_results(self, each: Iterable[_T]) -> list[_T]:
        """What bindings that have a result have."""
        return [value for b, value in zip(self.bindings, each, strict=True) if b.result is not None]

    def entering(self, body: int, each: Iterable[_T]) -> list[_T]:
        """What bindings that enter a body have."""
        return [value for b, value in zip(self.bindings, each, strict=True) if b.inner and b.inner[body] is not None]

    def leaving(self, body: int, each: Iterable[_T]) -> list[_T]:
        """What bindings that leave a body have."""
        return [value for b, value in zip(self.bindings, each, strict=True) if b.inside and b.inside[body] is not None]

    # The equation anew.

    def rebound(
        self,
        operands: Sequence[Atom] | None = None,
        inputs: Sequence[Sequence[Var]] | None = None,
        outputs: Sequence[Sequence[Atom]] | None = None,
        results: Sequence[Var] | None = None,
    ) -> list[Binding]:
        """The bindings, with other operands, inputs and results of bodies, or results; None: as they are."""
        outer = iter(self.eqn.invars if operands is None else operands)
        entering = [iter(vs) for vs in (inputs if inputs is not None else [b.invars for b in self.bodies])]
        leaving = [iter(atoms) for atoms in (outputs if outputs is not None else [b.outvars for b in self.bodies])]
        made = iter(self.eqn.outvars if results is None else results)
        return [
            Binding(
                b.role,
                None if b.outer is None else next(outer),
                tuple(None if var is None else next(vs) for var, vs in zip(b.inner, entering, strict=False)),
                tuple(None if atom is None else next(atoms) for atom, atoms in zip(b.inside, leaving, strict=False)),
                None if b.result is None else next(made),
            )
            for b in self.bindings
        ]

    def with_bodies(self, bodies: Sequence[Jaxpr]) -> JaxprEqn:
        """The equation with bodies that have as many inputs and results."""
        bindings = self.rebound(inputs=[b.invars for b in bodies], outputs=[b.outvars for b in bodies])
        return self.rebuild(bindings, [b.eqns for b in bodies])

    def rebuild(
        self, bindings: Sequence[Binding], equations: Sequence[Sequence[JaxprEqn]] = (), **params: object
    ) -> JaxprEqn:
        """The equation of these bindings, in any order, and of bodies with these equations.

        `bindings`: a constant of a `while` may enter both of its bodies.
        `params`: what else changes, such as the `length` of a scan.
        """
        bindings = _in_order(self.kind, bindings)
        template = replace(self, bindings=tuple(bindings))
        bodies = [
            make_jaxpr(
                [var or new_var(b.outer.aval) for b, var in template._inputs(k)],  # type: ignore[union-attr]
                [atom for b in bindings if b.inside and (atom := b.inside[k]) is not None],
                eqns,
            )
            for k, eqns in enumerate(equations)
        ]
        return replace_eqn(
            self.eqn,
            invars=[b.outer for b in bindings if b.outer is not None],
            outvars=[b.result for b in bindings if b.result is not None],
            params=_params(self.kind, {**self.eqn.params, **params}, bindings, bodies),
        )

    def _inputs(self, body: int) -> list[tuple[Binding, Var | None]]:
        """Bindings that enter a body; every branch has an input for what any has."""
        every = self.kind == "cond"
        pairs = [(b, b.inner[body]) for b in self.bindings if b.role == "const" or (b.inner and b.inner[body])]
        return [(b, var) for b, var in pairs if every or var is not None]


def is_region(eqn: JaxprEqn) -> bool:
    """Whether the equation is taken apart instead of having a rule."""
    return eqn.primitive.name in REGIONS


def region_of(eqn: JaxprEqn) -> Region:
    """A structured equation, taken apart."""
    kind = REGIONS[eqn.primitive.name]
    bodies = bodies_of(eqn)
    shape = Region(eqn, kind, bodies, tuple(_shape(kind, eqn, bodies)))
    return replace(shape, bindings=tuple(shape.rebound()))


def bodies_of(eqn: JaxprEqn) -> tuple[Jaxpr, ...]:
    """The programs that an equation holds; () for a barrier, and for what is no region."""
    return tuple(open_jaxpr(closed)[0] for closed in closed_bodies(eqn))


def closed_bodies(eqn: JaxprEqn) -> tuple[Jaxpr | ClosedJaxpr, ...]:
    """The same, with their constants, of which flat programs have none."""
    match eqn.primitive.name:
        case "scan":
            return (eqn.params["jaxpr"],)
        case "while":
            return eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        case "cond":
            return tuple(eqn.params["branches"])
        case _:
            return ()


def equations_within(jaxpr: Jaxpr, times: int = 1) -> Iterator[tuple[JaxprEqn, int]]:
    """Every equation, those in bodies behind the one that holds them, and how often it runs, as far as that is known."""
    for eqn in jaxpr.eqns:
        yield eqn, times
        for body in bodies_of(eqn):
            yield from equations_within(body, times * trip_count(eqn))


def in_bodies(eqn: JaxprEqn, rewritten: Callable[[Jaxpr], Jaxpr]) -> JaxprEqn:
    """The equation with its programs rewritten, over as many inputs and results; itself, if none is another."""
    bodies = bodies_of(eqn)
    made = [rewritten(body) for body in bodies]
    same = all(a is b for a, b in zip(made, bodies, strict=True))
    return eqn if same else region_of(eqn).with_bodies(made)


def kind_of(eqn: JaxprEqn) -> Kind | None:
    """Which region an equation is; None: it is none."""
    return REGIONS.get(eqn.primitive.name)


def trip_count(eqn: JaxprEqn) -> int:
    """How often a body runs, as far as that is known: 1 of what is no `scan`."""
    return int(eqn.params["length"]) if eqn.primitive.name == "scan" else 1


def new_scan(length: int, bindings: Sequence[Binding], equations: Sequence[JaxprEqn]) -> JaxprEqn:
    """A scan of ours, first to last."""
    (primitive,) = find_primitives("scan")
    empty = new_eqn(primitive, [], [], new_scan_params(length))
    return Region(empty, "scan", (make_jaxpr([], [], []),), ()).rebuild(bindings, [equations])


def _in_order(kind: Kind, bindings: Sequence[Binding]) -> list[Binding]:
    """Bindings as their equation has them: by role, and of the constants of a `while` those of the test first."""
    if kind == "while":
        apart: list[Binding] = []
        for b in bindings:
            both = b.role == "const" and all(var is not None for var in b.inner)
            apart += [replace(b, inner=(b.inner[0], None)), replace(b, inner=(None, b.inner[1]))] if both else [b]
        bindings = sorted(apart, key=lambda b: b.role == "const" and b.inner[0] is None)
    return sorted(bindings, key=lambda b: _ORDER.index(b.role))


_HERE = new_var(shaped(0))  # stands where a binding has something


def _shape(kind: Kind, eqn: JaxprEqn, bodies: Sequence[Jaxpr]) -> list[Binding]:
    """Where each binding of an equation has something."""
    n = len(bodies)

    def each(
        count: int, role: Role, outer: bool, inner: Sequence[bool], inside: Sequence[bool], result: bool
    ) -> list[Binding]:
        entering, leaving = (tuple(_HERE if has else None for has in which) for which in (inner, inside))
        return [Binding(role, _HERE if outer else None, entering, leaving, _HERE if result else None)] * count

    match kind:
        case "scan":
            consts, carries = scan_counts(eqn.params)
            return [
                *each(consts, "const", True, [True], [False], False),
                *each(carries, "carry", True, [True], [True], True),
                *each(len(eqn.invars) - consts - carries, "xs", True, [True], [False], False),
                *each(len(eqn.outvars) - carries, "ys", False, [False], [True], True),
            ]
        case "while":
            return [
                *each(1, "test", False, [False, False], [True, False], False),
                *each(eqn.params["cond_nconsts"], "const", True, [True, False], [False, False], False),
                *each(eqn.params["body_nconsts"], "const", True, [False, True], [False, False], False),
                *each(len(eqn.outvars), "carry", True, [True, True], [False, True], True),
            ]
        case "cond":
            return [
                *each(1, "test", True, [False] * n, [False] * n, False),
                *each(len(eqn.invars) - 1, "const", True, [True] * n, [False] * n, False),
                *each(len(eqn.outvars), "result", False, [False] * n, [True] * n, True),
            ]
        case "barrier":
            return each(len(eqn.outvars), "through", True, [], [], True)


def _params(
    kind: Kind, params: dict[str, object], bindings: Sequence[Binding], bodies: Sequence[Jaxpr]
) -> dict[str, object]:
    consts = [b for b in bindings if b.role == "const"]
    match kind:
        case "scan":
            return scan_params(params, bodies[0], len(consts), sum(b.role == "carry" for b in bindings))
        case "while":
            num_tests = sum(b.inner[0] is not None for b in consts)
            closed = {"cond_jaxpr": close_jaxpr(bodies[0]), "body_jaxpr": close_jaxpr(bodies[1])}
            return {**params, **closed, "cond_nconsts": num_tests, "body_nconsts": len(consts) - num_tests}
        case "cond":
            return {**params, "branches": tuple(map(close_jaxpr, bodies))}
        case "barrier":
            return params
