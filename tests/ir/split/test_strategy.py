"""Operations in pieces: the ways as text, and every strategy against the whole operation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar._jax import JaxprEqn, Literal, bind_eqn, eval_jaxpr, open_jaxpr
from autopar.ir.check import check_program
from autopar.ir.rules import rule_for
from autopar.ir.split.placement import BY_EACH, OWN, REPLICATED, SUM, Partial, Placement, Replicated, Split, local_aval
from autopar.ir.split.strategy import (
    AxisStrategy,
    conversion_program,
    join_shards,
    shard_of,
    shard_program,
    strategies,
)
from autopar.ir.trace.flatten import flatten
from tests.ir.rules.harness import eqn_of, flat_eqns

IDS = jnp.array([[0, 3, 1], [2, 2, 7]])
ROWS = jnp.array([3, 1, 0, 7, 7, 2, 5, 6])
WILD = jnp.array([3, -1, 99, 7, -9, 2, 5, 8])
"""Negative, and beyond 8."""
FLAGS = jnp.arange(32).reshape(4, 8) % 3 == 0
NUMBERS = jnp.arange(32).reshape(4, 8) - 7


def text(strategy: AxisStrategy) -> str:
    """Such as "a: split along dim 0, whole -> split along dim 0"; `+` is a linear group."""
    return (
        f"{strategy.factor or '+'}: {', '.join(map(str, strategy.operands))} -> {', '.join(map(str, strategy.results))}"
    )


TABLE = {
    "dot_general": (jnp.matmul, [(4, 8), (8, 6)], [
        "a: split along dim 0, whole -> split along dim 0",
        "b: split along dim 1, split along dim 0 -> partial sum",
        "c: whole, split along dim 1 -> split along dim 1",
        "+: partial sum, whole -> partial sum",
        "+: whole, partial sum -> partial sum",
    ]),
    "dot_general of a batch": (jax.vmap(jnp.matmul), [(4, 2, 3), (4, 3, 6)], [
        "a: split along dim 0, split along dim 0 -> split along dim 0",
        "b: split along dim 1, whole -> split along dim 1",
        "d: whole, split along dim 2 -> split along dim 2",
        "+: partial sum, whole -> partial sum",
        "+: whole, partial sum -> partial sum",
    ]),
    "add": (lax.add, [(4, 3), (4, 3)], [
        "a: split along dim 0, split along dim 0 -> split along dim 0",
        "+: partial sum, partial sum -> partial sum",
    ]),
    "mul": (lax.mul, [(4, 3), (4, 3)], [
        "a: split along dim 0, split along dim 0 -> split along dim 0",
        "+: partial sum, whole -> partial sum",
        "+: whole, partial sum -> partial sum",
    ]),
    "div": (lax.div, [(4, 3), (4, 3)], [
        "a: split along dim 0, split along dim 0 -> split along dim 0",
        "+: partial sum, whole -> partial sum",
    ]),
    "exp": (lax.exp, [(4, 3)], ["a: split along dim 0 -> split along dim 0"]),
    "reduce_sum": (lambda x: x.sum(0), [(4, 3)], [
        "a: split along dim 0 -> partial sum",
        "+: partial sum -> partial sum",
    ]),
    "reduce_max": (lambda x: x.max(0), [(4, 2)], [
        "a: split along dim 0 -> partial max",
        "b: split along dim 1 -> split along dim 0",
    ]),
    "reduce_min": (lambda x: x.min(0), [(4, 3)], ["a: split along dim 0 -> partial min"]),
    "reduce_and": (lambda x: x.all(0), [FLAGS[:, :3]], ["a: split along dim 0 -> partial min"]),
    "reshape that merges": (lambda x: x.reshape(8, 3), [(4, 2, 3)], [
        "a: split along dim 0 -> split along dim 0",
        "+: partial sum -> partial sum",
    ]),
    "reshape that splits": (lambda x: x.reshape(4, 2, 3), [(8, 3)], [
        "a: split along dim 0 -> split along dim 0",
        "+: partial sum -> partial sum",
    ]),
    "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (4, 3), (1,)), [(3,)], [
        "a: whole -> split along dim 0",
        "+: partial sum -> partial sum",
    ]),
    "transpose": (lambda x: x.T, [(4, 3)], [
        "a: split along dim 0 -> split along dim 1",
        "+: partial sum -> partial sum",
    ]),
    "gather": (lambda t: t.at[IDS].get(mode="clip"), [(9, 6)], [
        "d: split along dim 1, whole -> split along dim 2",
        "a: whole, split along dim 0 -> split along dim 0",
        "+: partial sum, whole -> partial sum",
    ]),
    "gather of a table cut by rows": (lambda t: t.at[IDS].get(mode="clip"), [(8, 3)], [
        "c: split along dim 0, whole -> partial sum",
        "a: whole, split along dim 0 -> split along dim 0",
        "+: partial sum, whole -> partial sum",
    ]),
    "scatter-add": (lambda t, u: t.at[IDS].add(u), [(9, 5), (2, 3, 5)], [
        "a: partial sum, split along dim 0, split along dim 0 -> partial sum",
        "+: partial sum, whole, partial sum -> partial sum",
    ]),
    "scatter": (lambda t, u: t.at[ROWS].set(u), [(9, 3), (8, 3)], []),
    "iota": (lambda: lax.iota(jnp.int32, 8), [], ["a:  -> split along dim 0"]),
    "iota of two dims": (lambda: lax.broadcasted_iota(jnp.int32, (8, 6), 0), [], [
        "a:  -> split along dim 0",
        "b:  -> split along dim 1",
    ]),
    "cumsum": (lambda x: lax.cumsum(x, 0), [(4, 2)], [
        "b: split along dim 1 -> split along dim 1",
        "+: partial sum -> partial sum",
    ]),
    "sort": (lambda x: lax.sort(x, dimension=0), [(4, 3)], []),
    "dims that do not divide": (lax.exp, [(3, 5)], []),
}  # fmt: skip


@pytest.mark.parametrize("fun, args, expected", TABLE.values(), ids=TABLE)
def test_strategies(fun, args, expected):
    assert [text(strategy) for strategy in strategies(rule_for(_last(fun, args)), 2)] == expected


def _last(fun: Any, args: Sequence[Any]) -> JaxprEqn:
    """The last equation, before which stands only what makes its operands."""
    return flat_eqns(fun, *args)[-1]


def test_only_factors_that_divide():
    rule = rule_for(_last(jnp.matmul, [(4, 6), (6, 8)]))
    found = {
        count: [strategy.factor for strategy in strategies(rule, count) if strategy.factor] for count in (2, 3, 4, 5)
    }
    assert found == {2: ["a", "b", "c"], 3: ["b"], 4: ["a", "c"], 5: []}


# Every strategy of an operation against the operation.


def _take(t: Any) -> Any:
    return jnp.take_along_axis(t, IDS[:, :2], axis=-1)


OPERATIONS: dict[str, tuple[str, Any, list[Any]]] = {
    "dot_general": ("dot_general", jnp.matmul, [(4, 8), (8, 4)]),
    "dot_general of a batch": ("dot_general", lambda a, b: jnp.einsum("bqd,bkd->bqk", a, b), [(4, 4, 3), (4, 8, 3)]),
    "add": ("add", lax.add, [(4, 8), (4, 8)]),
    "sub": ("sub", lax.sub, [(4, 8), (4, 8)]),
    "neg": ("neg", lax.neg, [(4, 8)]),
    "mul": ("mul", lax.mul, [(4, 8), (4, 8)]),
    "div": ("div", lax.div, [(4, 8), (4, 8)]),
    "div of integers": ("div", lambda x: lax.div(x, jnp.full_like(x, 3)), [NUMBERS]),
    "max": ("max", lax.max, [(4, 8), (4, 8)]),
    "select_n": ("select_n", lambda x, y: lax.select_n(FLAGS, x, y), [(4, 8), (4, 8)]),
    "clamp": ("clamp", lambda x: lax.clamp(-0.5, x, 0.5), [(4, 8)]),
    "to integers": ("convert_element_type", lambda x: lax.convert_element_type(x, jnp.int32), [(4, 8)]),
    "to floats": ("convert_element_type", lambda x: lax.convert_element_type(x, jnp.float32), [NUMBERS]),
    "to booleans": ("convert_element_type", lambda x: lax.convert_element_type(x, jnp.bool_), [NUMBERS]),
    "reduce_sum": ("reduce_sum", lambda x: x.sum(0), [(4, 8)]),
    "reduce_sum of integers": ("reduce_sum", lambda x: x.sum((0, 1)), [NUMBERS]),
    "reduce_max": ("reduce_max", lambda x: x.max(0), [(4, 8)]),
    "reduce_min": ("reduce_min", lambda x: x.min((0, 1)), [NUMBERS]),
    "reduce_and": ("reduce_and", lambda x: x.all(0), [FLAGS]),
    "reduce_or": ("reduce_or", lambda x: x.any(0), [FLAGS]),
    "reduce_prod": ("reduce_prod", lambda x: x.prod(0), [(4, 8)]),
    "argmax": ("argmax", lambda x: lax.argmax(x, 0, jnp.int32), [(4, 8)]),
    "cumsum": ("cumsum", lambda x: lax.cumsum(x, 0), [(4, 8)]),
    "sort": ("sort", lambda x: lax.sort(x, dimension=0), [(4, 8)]),
    "reshape that merges": ("reshape", lambda x: x.reshape(16, 4), [(4, 4, 4)]),
    "reshape that splits": ("reshape", lambda x: x.reshape(4, 4, 4), [(16, 4)]),
    "broadcast_in_dim": ("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (4, 8), (1,)), [(8,)]),
    "transpose": ("transpose", lambda x: x.transpose(2, 0, 1), [(4, 8, 4)]),
    "concatenate": ("concatenate", lambda x, y: lax.concatenate([x, y], 0), [(4, 8), (4, 8)]),
    "pad": ("pad", lambda x: lax.pad(x, 0.5, [(1, 0, 0), (0, 0, 0)]), [(4, 8)]),
    "slice": ("slice", lambda x: x[1:3], [(4, 8)]),
    "rev": ("rev", lambda x: lax.rev(x, (0,)), [(4, 8)]),
    "gather of rows": ("gather", lambda t: t.at[IDS].get(mode="clip"), [(8, 4)]),
    "gather of wild rows": ("gather", lambda t: t.at[WILD].get(mode="fill", fill_value=0), [(8, 4)]),
    "gather along a dim": ("gather", _take, [(2, 8)]),
    "scatter-add of rows": ("scatter-add", lambda t, u: t.at[ROWS].add(u), [(8, 4), (8, 4)]),
    "scatter-add of wild rows": ("scatter-add", lambda t, u: t.at[WILD].add(u, mode="drop"), [(8, 4), (8, 4)]),
    "scatter-add along a dim": ("scatter-add", lambda t: jax.vjp(_take, t)[1](jnp.ones((2, 2)))[0], [(2, 8)]),
    "dynamic_slice": ("dynamic_slice", lambda x: lax.dynamic_slice(x, (jnp.int32(1), 0), (2, 8)), [(4, 8)]),
    "iota": ("iota", lambda: lax.broadcasted_iota(jnp.int32, (4, 8), 0), []),
    "counters of random bits": (
        "iota_2x32_shape",
        lambda k: jax.random.bits(jax.random.wrap_key_data(k), (4, 8)),
        [jnp.array([1, 2], jnp.uint32)],
    ),
    "convolution": (
        "conv_general_dilated",
        lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME"),
        [(4, 4, 5, 5), (8, 4, 3, 3)],
    ),
}


@pytest.mark.parametrize("primitive, fun, args", OPERATIONS.values(), ids=OPERATIONS)
def test_pieces_make_the_whole(primitive, fun, args, count=4):
    rng = np.random.default_rng(0)
    eqn = eqn_of(primitive, fun, *args)
    rule = rule_for(eqn)
    operands = _operands(eqn, fun, args, rng)
    expected = [np.asarray(r) for r in jax.jit(functools.partial(bind_eqn, eqn))(*operands)]
    found = strategies(rule, count)
    programs = []
    for strategy in found:
        program = shard_program(eqn, rule, strategy, count)
        check_program(program)
        for var, made, placement in zip(program.outvars, eqn.outvars, strategy.results, strict=True):
            piece = local_aval(made.aval, placement, count)
            assert (var.aval.shape, var.aval.dtype) == (piece.shape, piece.dtype), text(strategy)
        programs.append(program)

    def every_strategy(number: jax.Array, parts: Any) -> list[Any]:
        return [eval_jaxpr(p, (), number, *each) for p, each in zip(programs, parts, strict=True)]

    run = jax.jit(every_strategy)
    parts = [[_parts(v, s, count, rng) for v, s in zip(operands, strategy.operands, strict=True)] for strategy in found]
    pieces = [
        run(jnp.int32(k), [[each[k] for each in strategy_parts] for strategy_parts in parts]) for k in range(count)
    ]
    for number, strategy in enumerate(found):
        for r, placement in enumerate(strategy.results):
            _assert_joined([np.asarray(piece[number][r]) for piece in pieces], placement, expected[r], text(strategy))


def _operands(wanted: JaxprEqn, fun: Any, args: Sequence[Any], rng: np.random.Generator) -> list[np.ndarray]:
    """What `wanted` is given when `fun` runs on random floats: indices then mean something."""
    arrays = [rng.normal(size=a).astype(np.float32) if isinstance(a, tuple) else a for a in args]
    flat, consts = flatten(*open_jaxpr(jax.make_jaxpr(fun)(*arrays)))
    value_of = dict(zip(flat.invars, (*arrays, *consts), strict=True))
    for eqn in flat.eqns:
        operands = [atom.val if isinstance(atom, Literal) else value_of[atom] for atom in eqn.invars]
        if eqn.primitive is wanted.primitive:
            return [np.asarray(operand) for operand in operands]
        value_of.update(zip(eqn.outvars, bind_eqn(eqn, *operands), strict=True))
    raise AssertionError(f"no {wanted.primitive}")


def _parts(value: np.ndarray, placement: Placement, count: int, rng: np.random.Generator) -> list[np.ndarray]:
    """What each piece is given of an operand: of a sum, random parts that add up to it."""
    match placement:
        case Replicated():
            return [value] * count
        case Split(dim):
            return np.split(value, count, dim)
        case Partial("sum"):
            others = [(3 * rng.normal(size=value.shape)).astype(value.dtype) for _ in range(count - 1)]
            return [value - sum(others), *others]
    raise AssertionError(f"no operand is wanted as {placement}")


def _assert_joined(parts: Sequence[np.ndarray], placement: Placement, whole: np.ndarray, name: str) -> None:
    match placement:
        case Split(dim):
            joined = np.concatenate(parts, dim)
        case Partial("sum"):
            joined = sum(parts[1:], parts[0])
        case Partial(kind):
            joined = functools.reduce(np.maximum if kind == "max" else np.minimum, parts)
        case Replicated():
            for part in parts:
                np.testing.assert_allclose(part, whole, rtol=1e-6, atol=1e-6, err_msg=name)
            return
        case _:
            raise AssertionError(f"no result is {placement}")
    assert (joined.shape, joined.dtype) == (whole.shape, whole.dtype), name
    if whole.dtype.kind == "f":
        scale = np.abs(whole).max(initial=1.0)
        np.testing.assert_allclose(joined / scale, whole / scale, rtol=0, atol=2e-5, err_msg=name)
    else:
        np.testing.assert_array_equal(joined, whole, err_msg=name)


# Between placements.


def _run(program: Any, number: int, value: np.ndarray) -> np.ndarray:
    (result,) = eval_jaxpr(program, (), jnp.int32(number), jnp.asarray(value))
    return np.asarray(result)


@pytest.mark.parametrize("dim", [0, 1])
def test_slice(dim):
    value = np.arange(32, dtype=np.float32).reshape(4, 8)
    program = conversion_program((4, 8), value.dtype, Split(dim), 4)
    check_program(program)
    assert program is conversion_program((4, 8), value.dtype, Split(dim), 4)
    np.testing.assert_array_equal(np.concatenate([_run(program, k, value) for k in range(4)], dim), value)


def test_slice_of_blocks():
    """Shard k has columns 2k and 2k + 1 of each half."""
    value = np.arange(32, dtype=np.float32).reshape(4, 8)
    program = conversion_program((4, 8), value.dtype, Split(1, blocks=2), 2)
    check_program(program)
    for k in range(2):
        np.testing.assert_array_equal(_run(program, k, value), value[:, [2 * k, 2 * k + 1, 4 + 2 * k, 5 + 2 * k]])


@pytest.mark.parametrize("dtype", [np.float32, np.int32, jnp.bfloat16])
def test_mask(dtype):
    value = np.arange(1, 7).reshape(2, 3).astype(dtype)
    program = conversion_program((2, 3), value.dtype, SUM, 4)
    parts = [_run(program, k, value) for k in range(3)]
    np.testing.assert_array_equal(parts[0], value)
    assert not parts[1].any() and not parts[2].any() and parts[0].dtype == dtype


def test_mask_of_what_is_not_finite():
    value = np.array([np.inf, -np.inf, np.nan], np.float32)
    assert not _run(conversion_program((3,), value.dtype, SUM, 4), 1, value).any()


@pytest.mark.parametrize("dtype", [np.float32, np.int32, jnp.bfloat16])
def test_scale(dtype):
    value = np.arange(6).reshape(2, 3).astype(dtype)
    scaled = _run(conversion_program((2, 3), value.dtype, OWN, 4), 2, value)
    np.testing.assert_array_equal(scaled, value * np.asarray(4, dtype))
    assert scaled.dtype == dtype


@pytest.mark.parametrize("placement", [Split(0), Split(1), Split(1, blocks=2)])
def test_parts_whose_number_is_known(placement):
    """They are what the program of a counted number makes, and joined they are the whole."""
    value = jnp.arange(32, dtype=jnp.float32).reshape(4, 8)
    parts = [shard_of(value, placement, k, 2) for k in range(2)]
    program = conversion_program((4, 8), value.dtype, placement, 2)
    for k, part in enumerate(parts):
        np.testing.assert_array_equal(part, _run(program, k, value))
    np.testing.assert_array_equal(join_shards(parts, placement), value)


def test_type_of_a_shard():
    aval = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    shares = [REPLICATED, SUM, BY_EACH, OWN, Partial("max"), Split(0), Split(1)]
    assert [local_aval(aval, placement, 2).shape for placement in shares] == [(4, 8)] * 5 + [(2, 8), (4, 4)]
    assert {local_aval(aval, placement, 2).dtype for placement in shares} == {np.dtype(np.float32)}
