"""Regions: structured equations (`scan`, `while`, `cond`, and the barrier) as bodies and bindings.

In:     a structured equation.
Out:    `Region`: its bodies and its `Binding`s, one for each value that crosses the boundary, with its names outside and in
        each body. `rebuild` writes the equation from other bindings and bodies.
Method: an equation's operands are those of its bindings, in order; so are its results, and each body's inputs and results.
        One interface for all kinds: no other file counts operands of structured equations.
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
_ORDER: tuple[Role, ...] = typing.get_args(Role)
ASSUMED_TRIPS = 10
"""Trips of a `while`, whose number depends on data, where its work and what it sends are counted. Fixed points, roots and
adaptive solvers take 5 to 50, searches along a line 1 to 5; XLA assumes 5 where it assigns memory and 100 where it shards."""
REGIONS: dict[str, Kind] = {"scan": "scan", "while": "while", "cond": "cond", "optimization_barrier": "barrier"}
"""The primitives that are regions."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """One value at the boundary of a region.

    Attributes:
        role: `"const"`: the same in all trips or branches; `"xs"`: a stack, of which each trip reads a row; `"carry"`: from
            trip to trip; `"ys"`: a stack, of which each trip makes a row; `"result"`: a result of the branch taken;
            `"test"`: the index of a `cond`, or the result of a `while`'s first body; `"through"`: passes a barrier.
        operand: The equation's operand. None, here and below: the binding has none.
        inputs: For each body, its input.
        outputs: For each body, its result.
        result: The equation's result.
    """

    role: Role
    operand: Atom | None = None
    inputs: tuple[Var | None, ...] = ()
    outputs: tuple[Atom | None, ...] = ()
    result: Var | None = None

    @property
    def is_stacked(self) -> bool:
        """Whether a body reads or makes one row of the value outside."""
        return self.role in ("xs", "ys")

    @property
    def lead(self) -> int:
        """How many leading dims the value has outside and not in a body."""
        return int(self.is_stacked)

    @property
    def variables(self) -> list[Var]:
        """The inputs of bodies that it is bound to."""
        return [var for var in self.inputs if var is not None]

    @property
    def values(self) -> list[Atom]:
        """The results of bodies that it is bound to."""
        return [atom for atom in self.outputs if atom is not None]

    @property
    def var(self) -> Var:
        """The input of the loop body."""
        return self.variables[-1]

    @property
    def value(self) -> Atom:
        """The result of the loop body."""
        return self.values[-1]


def rows_in(stack: Atom, row: Var) -> Binding:
    """The binding of a scan whose trips each read a row of `stack`."""
    return Binding("xs", stack, (row,), (None,))


def rows_out(value: Atom, stack: Var | None) -> Binding:
    """The binding of a scan whose trips each make `value`, a row of `stack`."""
    return Binding("ys", None, (None,), (value,), stack)


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A structured equation as bodies and bindings.

    Attributes:
        eqn: The equation.
        kind: Its kind.
        bodies: In the order of the equation's parameters: of a `while` the test, then the body; of a barrier none.
        bindings: One for each value that crosses the boundary.
    """

    eqn: JaxprEqn
    kind: Kind
    bodies: tuple[Jaxpr, ...] = field(repr=False)
    bindings: tuple[Binding, ...]

    @property
    def trips(self) -> int:
        """As `trip_count`."""
        return trip_count(self.eqn)

    @property
    def labels(self) -> list[str]:
        """A name for each body, for messages."""
        if self.kind == "cond":
            return [f"branch {k}" for k in range(len(self.bodies))]
        return ["test", "body"][-len(self.bodies) :] if self.bodies else []

    def of_role(self, *roles: Role) -> list[Binding]:
        """Bindings of these roles, in order."""
        return [b for b in self.bindings if b.role in roles]

    @property
    def consts(self) -> list[Binding]:
        """Values that are the same in all trips or branches."""
        return self.of_role("const")

    @property
    def carries(self) -> list[Binding]:
        """Values that go from trip to trip."""
        return self.of_role("carry")

    @property
    def xs(self) -> list[Binding]:
        """Stacks of which each trip reads a row."""
        return self.of_role("xs")

    @property
    def ys(self) -> list[Binding]:
        """Stacks of which each trip makes a row."""
        return self.of_role("ys")

    def named(self) -> Iterator[tuple[tuple[Role, int], Binding]]:
        """Each binding, under a key: its role, and its number among those of that role."""
        seen: Counter[Role] = Counter()
        for b in self.bindings:
            yield (b.role, seen[b.role]), b
            seen[b.role] += 1

    def new_stack(self, value: Var) -> Var:
        """A new variable for the stack of a value of all trips."""
        return new_var(resized(value.aval, (self.trips, *value.aval.shape)))

    # From one item per binding to one per operand, per result, or per input or result of a body.

    def of_operands(self, each: Iterable[_T]) -> list[_T]:
        """The items of bindings that have an operand: one per operand."""
        return [value for b, value in zip(self.bindings, each, strict=True) if b.operand is not None]

    def of_results(self, each: Iterable[_T]) -> list[_T]:
        """The items of bindings that have a result: one per result."""
        return [value for b, value in zip(self.bindings, each, strict=True) if b.result is not None]

    def entering(self, body: int, each: Iterable[_T]) -> list[_T]:
        """The items of bindings that enter a body: one per input of the body."""
        return [value for b, value in zip(self.bindings, each, strict=True) if b.inputs and b.inputs[body] is not None]

    def leaving(self, body: int, each: Iterable[_T]) -> list[_T]:
        """The items of bindings that leave a body: one per result of the body."""
        return [
            value for b, value in zip(self.bindings, each, strict=True) if b.outputs and b.outputs[body] is not None
        ]

    # Rebuilding the equation.

    def rebound(
        self,
        operands: Sequence[Atom] | None = None,
        inputs: Sequence[Sequence[Var]] | None = None,
        outputs: Sequence[Sequence[Atom]] | None = None,
        results: Sequence[Var] | None = None,
    ) -> list[Binding]:
        """The bindings with other operands, body inputs, body results or results; None: those of the equation."""
        given = iter(self.eqn.invars if operands is None else operands)
        entering = [iter(vs) for vs in (inputs if inputs is not None else [b.invars for b in self.bodies])]
        leaving = [iter(atoms) for atoms in (outputs if outputs is not None else [b.outvars for b in self.bodies])]
        made = iter(self.eqn.outvars if results is None else results)
        return [
            Binding(
                b.role,
                None if b.operand is None else next(given),
                tuple(None if var is None else next(vs) for var, vs in zip(b.inputs, entering, strict=False)),
                tuple(None if atom is None else next(atoms) for atom, atoms in zip(b.outputs, leaving, strict=False)),
                None if b.result is None else next(made),
            )
            for b in self.bindings
        ]

    def with_bodies(self, bodies: Sequence[Jaxpr]) -> JaxprEqn:
        """The equation with other bodies, which have as many inputs and results as its own."""
        bindings = self.rebound(inputs=[b.invars for b in bodies], outputs=[b.outvars for b in bodies])
        return self.rebuild(bindings, [b.eqns for b in bodies])

    def rebuild(
        self, bindings: Sequence[Binding], equations: Sequence[Sequence[JaxprEqn]] = (), **params: object
    ) -> JaxprEqn:
        """The equation with these bindings, and bodies of these equations.

        `bindings`: in any order; a constant of a `while` may enter both of its bodies.
        `params`: other parameters that change, such as the `length` of a scan.
        """
        bindings = _in_order(self.kind, bindings)
        template = replace(self, bindings=tuple(bindings))
        bodies = [
            make_jaxpr(
                [var or new_var(b.operand.aval) for b, var in template._inputs(k)],  # type: ignore[union-attr]
                [atom for b in bindings if b.outputs and (atom := b.outputs[k]) is not None],
                eqns,
            )
            for k, eqns in enumerate(equations)
        ]
        return replace_eqn(
            self.eqn,
            invars=[b.operand for b in bindings if b.operand is not None],
            outvars=[b.result for b in bindings if b.result is not None],
            params=_params(self.kind, {**self.eqn.params, **params}, bindings, bodies),
        )

    def _inputs(self, body: int) -> list[tuple[Binding, Var | None]]:
        """Bindings that enter a body, and its input; None: a branch needs an input for what another branch reads."""
        every = self.kind == "cond"
        pairs = [(b, b.inputs[body]) for b in self.bindings if b.role == "const" or (b.inputs and b.inputs[body])]
        return [(b, var) for b, var in pairs if every or var is not None]


def is_region(eqn: JaxprEqn) -> bool:
    """Whether the equation is a region, and so has bodies instead of a sharding rule."""
    return eqn.primitive.name in REGIONS


def region_of(eqn: JaxprEqn) -> Region:
    """A structured equation as bodies and bindings."""
    kind = REGIONS[eqn.primitive.name]
    bodies = bodies_of(eqn)
    shape = Region(eqn, kind, bodies, tuple(_shape(kind, eqn, bodies)))
    return replace(shape, bindings=tuple(shape.rebound()))


def bodies_of(eqn: JaxprEqn) -> tuple[Jaxpr, ...]:
    """The bodies of an equation; () for a barrier, and for an equation that is no region."""
    return tuple([open_jaxpr(closed)[0] for closed in closed_bodies(eqn)]) if is_region(eqn) else ()


def closed_bodies(eqn: JaxprEqn) -> tuple[Jaxpr | ClosedJaxpr, ...]:
    """The bodies as the equation holds them, closed over constants; in flat programs there are none."""
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
    """Every equation and how often it runs (as `trip_count` knows); those of bodies follow the equation that holds them."""
    for eqn in jaxpr.eqns:
        yield eqn, times
        for body in bodies_of(eqn):
            yield from equations_within(body, times * trip_count(eqn))


def in_bodies(eqn: JaxprEqn, rewritten: Callable[[Jaxpr], Jaxpr]) -> JaxprEqn:
    """The equation with `rewritten` applied to its bodies, over as many inputs and results; the same object if none changes."""
    if not is_region(eqn):
        return eqn
    bodies = bodies_of(eqn)
    made = [rewritten(body) for body in bodies]
    same = all(a is b for a, b in zip(made, bodies, strict=True))
    return eqn if same else region_of(eqn).with_bodies(made)


def kind_of(eqn: JaxprEqn) -> Kind | None:
    """The kind of region that an equation is; None: it is none."""
    return REGIONS.get(eqn.primitive.name)


def trip_count(eqn: JaxprEqn) -> int:
    """How often a body runs: the length of a `scan`, assumed trips of a `while` (whose test runs once more), else 1."""
    match eqn.primitive.name:
        case "scan":
            return int(eqn.params["length"])
        case "while":
            return ASSUMED_TRIPS
        case _:
            return 1


def new_scan(length: int, bindings: Sequence[Binding], equations: Sequence[JaxprEqn]) -> JaxprEqn:
    """A new scan, from first row to last."""
    (primitive,) = find_primitives("scan")
    empty = new_eqn(primitive, [], [], new_scan_params(length))
    return Region(empty, "scan", (make_jaxpr([], [], []),), ()).rebuild(bindings, [equations])


def _in_order(kind: Kind, bindings: Sequence[Binding]) -> list[Binding]:
    """Bindings in the order of their equation's operands: by role, and in a `while` the constants of the test first."""
    if kind == "while":
        apart: list[Binding] = []
        for b in bindings:
            both = b.role == "const" and all(var is not None for var in b.inputs)
            apart += [replace(b, inputs=(b.inputs[0], None)), replace(b, inputs=(None, b.inputs[1]))] if both else [b]
        bindings = sorted(apart, key=lambda b: b.role == "const" and b.inputs[0] is None)
    return sorted(bindings, key=lambda b: _ORDER.index(b.role))


_HERE = new_var(shaped(0))  # placeholder in `_shape`


def _shape(kind: Kind, eqn: JaxprEqn, bodies: Sequence[Jaxpr]) -> list[Binding]:
    """The bindings of an equation with placeholders: which of operand, inputs, body results and result each has."""
    n = len(bodies)

    def each(
        count: int, role: Role, operand: bool, inputs: Sequence[bool], outputs: Sequence[bool], result: bool
    ) -> list[Binding]:
        entering, leaving = (tuple(_HERE if has else None for has in which) for which in (inputs, outputs))
        return [Binding(role, _HERE if operand else None, entering, leaving, _HERE if result else None)] * count

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
            num_tests = sum(b.inputs[0] is not None for b in consts)
            closed = {"cond_jaxpr": close_jaxpr(bodies[0]), "body_jaxpr": close_jaxpr(bodies[1])}
            return {**params, **closed, "cond_nconsts": num_tests, "body_nconsts": len(consts) - num_tests}
        case "cond":
            return {**params, "branches": tuple(map(close_jaxpr, bodies))}
        case "barrier":
            return params
