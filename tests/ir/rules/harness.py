"""The property that every rule must have: whatever a strategy splits, the devices together compute the operation.

In:     an equation, or a function whose flat program, gradient included, is taken equation by equation.
Out:    nothing, or an AssertionError that names the primitive, the rule and the strategy.
Method: `run_equation` under `shard_map` on 8 virtual devices, against the primitive on one. Operands come in as the
        strategy asks; one that is asked for as a partial sum comes in as random parts with that sum. Half of them come
        in whole and are sliced there, and so are results, as programs do it: XLA joins such slices with an operation's
        own. All strategies of all equations of a function are compiled as one program, for compiling is what these tests
        spend their time on.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import settings
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from autopar._jax import DropVar, Jaxpr, JaxprEqn, Literal, Var, bind_eqn, open_jaxpr
from autopar.cost.steps import Slice
from autopar.intra_op.strategies import Strategy, enumerate_strategies
from autopar.ir.rules import ShardingRule, rule_for
from autopar.ir.rules.replicated import list_of
from autopar.ir.trace.flatten import flatten
from autopar.mesh import Sharding
from autopar.partition.collectives import apply_step
from autopar.partition.program import run_equation

MESH_SHAPES = ((8,), (2, 4), (2, 2, 2))
FEW = settings(max_examples=5, deadline=None, derandomize=True)
"""Hypothesis settings: each example compiles a program."""


def only_eqn(fun: Callable[..., Any], *args: Any) -> JaxprEqn:
    """The one equation of `fun`; an argument that is a tuple of numbers is the shape of a float32 array."""
    eqns = flat_eqns(fun, *args)
    assert len(eqns) == 1, f"{len(eqns)} equations: {[str(eqn.primitive) for eqn in eqns]}"
    return eqns[0]


def eqn_of(primitive: str, fun: Callable[..., Any], *args: Any) -> JaxprEqn:
    """The one equation of `primitive` in the flat program of `fun`."""
    eqns = [eqn for eqn in flat_eqns(fun, *args) if eqn.primitive.name == primitive]
    assert len(eqns) == 1, f"{len(eqns)} equations of {primitive}"
    return eqns[0]


def flat_eqns(fun: Callable[..., Any], *args: Any) -> list[JaxprEqn]:
    """The equations of the flat program of `fun`."""
    return list(_flat(fun, [_array(arg) for arg in args])[0].eqns)


def _array(arg: Any) -> Any:
    is_shape = isinstance(arg, tuple) and all(isinstance(size, int) for size in arg)
    return jnp.ones(arg, jnp.float32) if is_shape else arg


def _flat(fun: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    return flatten(*open_jaxpr(jax.make_jaxpr(fun)(*args)))


def gradient_of(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The function together with its vector-Jacobian product at a cotangent that is not constant."""

    def both(*args: Any) -> Any:
        results, pullback = jax.vjp(fun, *args)
        return results, pullback(jax.tree.map(jnp.sin, results))

    return both


def check_function(
    fun: Callable[..., Any],
    *args: Any,
    seed: int = 0,
    mesh_shape: tuple[int, ...] = (2, 4),
    only: Collection[str] | None = None,
    limit: int = 10,
    which: Callable[[Strategy], object] = lambda strategy: True,
) -> int:
    """Check every equation of `fun` at the values it has there; see `check_equations`.

    Args:
        fun: `gradient_of(f)` to check the gradient's too.
        args: Arrays, or shapes, which stand for random arrays.
        seed: Of values and of the choice of strategies.
        mesh_shape: Of the 8 devices.
        only: Primitives to check; None for all.
        limit: Strategies of each equation.
        which: Among those for which this is true.

    Returns:
        How many strategies were checked.
    """
    rng = np.random.default_rng(seed)
    arrays = [_random(_array(arg), rng) if isinstance(arg, tuple) else jnp.asarray(arg) for arg in args]
    flat, consts = _flat(fun, arrays)
    eqns = [
        eqn
        for eqn in flat.eqns
        if list_of(eqn.primitive.name) != "STRUCTURED" and (only is None or eqn.primitive.name in only)
    ]
    operands = _operands_of(eqns, flat, [*jax.tree.leaves(arrays), *consts])
    return check_equations(eqns, seed, mesh_shape, operands=operands, limit=limit, which=which)


def _operands_of(eqns: Sequence[JaxprEqn], flat: Jaxpr, arguments: Sequence[Any]) -> list[list[Any]]:
    """What each of these equations takes when the program has these arguments."""

    def run(*arguments: Any) -> list[list[Any]]:
        value_of: dict[Var, Any] = dict(zip(flat.invars, arguments, strict=True))

        def read(eqn: JaxprEqn) -> list[Any]:
            return [atom.val if isinstance(atom, Literal) else value_of[atom] for atom in eqn.invars]

        for eqn in flat.eqns:
            value_of.update(zip(eqn.outvars, bind_eqn(eqn, *read(eqn)), strict=True))
        return [read(eqn) for eqn in eqns]

    return jax.jit(run)(*arguments)


def check_equation(
    eqn: JaxprEqn,
    seed: int = 0,
    mesh_shape: tuple[int, ...] = (2, 4),
    *,
    operands: Sequence[Any] | None = None,
    limit: int = 10,
) -> int:
    """`check_equations` of one, whose operands may be given."""
    return check_equations([eqn], seed, mesh_shape, operands=None if operands is None else [operands], limit=limit)


def check_equations(
    eqns: Sequence[JaxprEqn],
    seed: int = 0,
    mesh_shape: tuple[int, ...] = (2, 4),
    *,
    operands: Sequence[Sequence[Any]] | None = None,
    limit: int = 10,
    which: Callable[[Strategy], object] = lambda strategy: True,
) -> int:
    """Check strategies of each of some equations: all, or `limit` of them at random.

    Args:
        eqns: The equations, of whose operands none is taken from another's results.
        seed: Of operands, parts of partial sums, and the choice of strategies; for each equation anew.
        mesh_shape: Of the 8 devices; axes are x, y, z.
        operands: Their values; random if not given.
        limit: How many strategies of each.
        which: Among those for which this is true.

    Returns:
        How many strategies were checked.
    """
    axis_sizes = dict(zip("xyz", mesh_shape, strict=False))
    values = [None] * len(eqns) if operands is None else operands
    checks = [_draw_check(eqn, seed, axis_sizes, given, limit, which) for eqn, given in zip(eqns, values, strict=True)]
    alone = jax.jit(lambda values: [bind_eqn(eqn, *each) for eqn, each in zip(eqns, values, strict=True)])
    expected = alone([check.operands for check in checks])
    actual = _on_devices(checks, Mesh(np.array(jax.devices()).reshape(mesh_shape), tuple(axis_sizes)))
    for check, wanted, found in zip(checks, expected, actual, strict=True):
        for strategy, results in zip(check.strategies, found, strict=True):
            problem = _first_difference(check.eqn, results, wanted)
            assert not problem, f"{check.rule}, {strategy} on {mesh_shape}: {problem}\n{check.eqn}"
    return sum(len(check.strategies) for check in checks)


@dataclass(frozen=True)
class _Check:
    """Strategies of one equation: the operands' parts for each, how these enter, and how its results leave."""

    eqn: JaxprEqn
    rule: ShardingRule
    strategies: list[Strategy]
    operands: list[np.ndarray]
    parts: list[list[np.ndarray]]
    entering: list[list[Sharding]]
    leaving: list[list[Sharding]]


def _draw_check(
    eqn: JaxprEqn,
    seed: int,
    axis_sizes: dict[str, int],
    operands: Sequence[Any] | None,
    limit: int,
    which: Callable[[Strategy], object],
) -> _Check:
    rng = np.random.default_rng(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rule = rule_for(eqn)
    _check_shapes(eqn, rule)
    strategies = list(filter(which, enumerate_strategies(rule, axis_sizes)))
    if len(strategies) > limit:
        strategies = [strategies[k] for k in sorted(rng.choice(len(strategies), limit, replace=False))]
    if operands is None:
        operands = [atom.val if isinstance(atom, Literal) else _random(atom.aval, rng) for atom in eqn.invars]
    operands = [np.asarray(operand) for operand in operands]
    parts = [
        [_parts(value, sharding, axis_sizes, rng) for value, sharding in zip(operands, each.operands, strict=True)]
        for each in strategies
    ]
    entering = [[_whole_or_not(s, rng) for s in each.operands] for each in strategies]
    leaving = [
        [_split_further(s, v.aval.shape, axis_sizes, rng) for s, v in zip(each.results, eqn.outvars, strict=True)]
        for each in strategies
    ]
    return _Check(eqn, rule, strategies, operands, parts, entering, leaving)


def _first_difference(eqn: JaxprEqn, results: Sequence[Any], wanted: Sequence[Any]) -> str:
    """What is wrong with the first result that differs; empty if none does."""
    for var, ours, theirs in zip(eqn.outvars, results, wanted, strict=True):
        # What a kernel leaves where nothing reads it may be anything.
        problem = not isinstance(var, DropVar) and _difference(np.asarray(ours), np.asarray(theirs), _tolerance(eqn))
        if problem:
            return problem
    return ""


def _check_shapes(eqn: JaxprEqn, rule: ShardingRule) -> None:
    for var, term in zip((*eqn.invars, *eqn.outvars), (*rule.operands, *rule.results), strict=True):
        lengths = [math.prod(rule.sizes[factor] for factor in dim) for dim in term]
        longer = [size for size, length in zip(var.aval.shape, lengths, strict=True) if size != length]
        assert not longer, f"{eqn.primitive} {rule}: an array {var.aval.shape} has a term of lengths {lengths}"


def _on_devices(checks: Sequence[_Check], mesh: Mesh) -> list[list[list[jax.Array]]]:
    """Results of each strategy of each equation, whole."""

    def program(parts: Sequence[Sequence[Sequence[jax.Array]]]) -> list[list[list[jax.Array]]]:
        return [
            [_run_strategy(check, k, operands, mesh.shape) for k, operands in enumerate(each)]
            for check, each in zip(checks, parts, strict=True)
        ]

    in_specs = [[[P(s.partial or None, *_spec(s)) for s in have] for have in check.entering] for check in checks]
    out_specs = [[[P(*_spec(s)) for s in want] for want in check.leaving] for check in checks]
    mapped = jax.shard_map(program, mesh=mesh, in_specs=(in_specs,), out_specs=out_specs, check_vma=False)
    return jax.jit(mapped)([check.parts for check in checks])


def _run_strategy(
    check: _Check, number: int, operands: Sequence[jax.Array], axis_sizes: Mapping[str, int]
) -> list[jax.Array]:
    """On one device: its parts of the results as they leave, from its parts of the operands as they enter."""
    strategy, have, want = check.strategies[number], check.entering[number], check.leaving[number]
    local = [
        _sliced(operand[0], before, after, axis_sizes)
        for operand, before, after in zip(operands, have, strategy.operands, strict=True)
    ]
    results = run_equation(check.eqn, check.rule, strategy, axis_sizes, local)
    whole = [lax.psum(r, s.partial) if s.partial else r for r, s in zip(results, strategy.results, strict=True)]
    return [_sliced(r, s, w, axis_sizes) for r, s, w in zip(whole, strategy.results, want, strict=True)]


def _whole_or_not(sharding: Sharding, rng: np.random.Generator) -> Sharding:
    """The same, or with no dim split."""
    return sharding if rng.random() < 0.5 else Sharding(((),) * len(sharding.dims), sharding.partial)


def _split_further(
    sharding: Sharding, shape: Sequence[int], axis_sizes: Mapping[str, int], rng: np.random.Generator
) -> Sharding:
    """The same, or with the axes that split nothing, nor held partial sums, on some dim that they divide."""
    used = {axis for axes in (*sharding.dims, sharding.partial) for axis in axes}
    free = tuple(axis for axis in axis_sizes if axis not in used)
    parts = [math.prod(axis_sizes[axis] for axis in (*axes, *free)) for axes in sharding.dims]
    fitting = [d for d, (size, count) in enumerate(zip(shape, parts, strict=True)) if size and size % count == 0]
    if not free or not fitting or rng.random() < 0.5:
        return sharding
    at = int(rng.choice(fitting))
    return Sharding(tuple((*axes, *free) if d == at else axes for d, axes in enumerate(sharding.dims)))


def _sliced(array: jax.Array, have: Sharding, want: Sharding, axis_sizes: Mapping[str, int]) -> jax.Array:
    """This device's part of what is split in `want` and not in `have`."""
    for dim, (before, after) in enumerate(zip(have.dims, want.dims, strict=True)):
        if before != after:
            array = apply_step(array, Slice(after[len(before) :], dim), axis_sizes)
    return array


def _spec(sharding: Sharding) -> list[tuple[str, ...] | None]:
    return [axes or None for axes in sharding.dims]


def _parts(value: np.ndarray, sharding: Sharding, axis_sizes: dict[str, int], rng: np.random.Generator) -> np.ndarray:
    """Parts whose sum is `value`, one for each device along the partial axes, stacked in front."""
    count = math.prod(axis_sizes[axis] for axis in sharding.partial)
    if count == 1:
        return value[None]
    parts = np.stack([_random(value, rng) for _ in range(count)])
    parts[-1] = value - parts[:-1].sum(axis=0, dtype=value.dtype)
    return parts


def _random(like: Any, rng: np.random.Generator) -> np.ndarray:
    """Random values of this shape and dtype: floats around 0, integers 0 to 4, booleans."""
    shape, dtype = like.shape, like.dtype
    if dtype == np.bool_:
        return rng.random(shape) < 0.5
    if jnp.issubdtype(dtype, jnp.integer):
        return np.asarray(rng.integers(0, 5, shape)).astype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(dtype)
    return np.asarray(rng.normal(size=shape)).astype(dtype)


def _tolerance(eqn: JaxprEqn) -> float:
    """Relative to the result's scale: parts of a partial sum are rounded in the coarsest dtype at hand."""
    dtypes = [atom.aval.dtype for atom in (*eqn.invars, *eqn.outvars)]
    epsilon = max([float(jnp.finfo(dtype).eps) for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)], default=0.0)
    return epsilon * (256 if epsilon < 1e-5 else 16)


def _difference(actual: np.ndarray, expected: np.ndarray, tolerance: float) -> str:
    """What is wrong with `actual`; empty if nothing is."""
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return f"{actual.dtype}{actual.shape} instead of {expected.dtype}{expected.shape}"
    if not jnp.issubdtype(expected.dtype, jnp.inexact):
        return "" if (actual == expected).all() else f"{(actual != expected).sum()} elements differ"
    wide = np.complex128 if jnp.issubdtype(expected.dtype, jnp.complexfloating) else np.float64
    actual, expected = actual.astype(wide), expected.astype(wide)
    finite = np.isfinite(expected)
    if not np.array_equal(np.where(finite, 0, actual), np.where(finite, 0, expected), equal_nan=True):
        return "differs where it is not finite"
    scale = max(1.0, np.abs(expected[finite]).max(initial=0.0))
    error = np.abs(np.where(finite, actual, 0) - np.where(finite, expected, 0)).max(initial=0.0) / scale
    return "" if error <= tolerance else f"off by {error:.1e} of its scale"
