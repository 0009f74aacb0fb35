"""Positions and names mean what they mean to `jax.jit`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import AutoparError, BatchError, TraceError
from autopar.ir.trace.parameters import check_hashable, chosen, parameters_of, static_of
from autopar.ir.trace.trace import trace_step


def step(state, batch, n=1, *, flag=False):
    return state


def rest(state, *others, flag=False):
    return state


CALLS = [
    ((1, 2, 3), {}),
    ((1, 2), {"n": 3}),
    ((1,), {"n": 3, "batch": 2}),
    ((), {"state": 1, "batch": 2, "n": 3}),
]


@pytest.mark.parametrize("args, kwargs", CALLS)
@pytest.mark.parametrize("given", [{"argnums": 2}, {"argnames": "n"}, {"argnums": (-2,)}, {"argnums": np.int64(2)}])
def test_a_parameter_is_static_however_it_is_passed(args, kwargs, given):
    call = static_of(parameters_of(step), **given).split(args, kwargs)
    assert call.static == (("n", 3),)
    assert {argument.name: argument.number for argument in call.arguments} == {"state": 0, "batch": 1}
    assert [*call.args, *(call.kwargs[name] for name in sorted(call.kwargs))] == (
        [1, 2] if len(call.args) else [2, 1]  # names are sorted, as in a dict's leaves
    )


def test_after_a_rest_positions_count_the_call():
    call = static_of(parameters_of(rest), -1, "flag").split((1, 2, 3), {"flag": True})
    assert call.args == (1, 2) and call.static == (("others/1", 3), ("flag", True))
    assert [(a.name, a.number) for a in call.arguments] == [("state", 0), ("others/0", 1)]


@pytest.mark.parametrize("argnums", [None, (), []])
def test_none_is_static(argnums):
    static = static_of(parameters_of(step), argnums, None)
    assert static.numbers == static.names == () and chosen("batch_argnums", argnums, static) == ()


@pytest.mark.parametrize(
    "argnums, argnames, part",
    [
        (4, (), "there is no argument 4"),
        (-5, (), "there is no argument -5"),
        ("n", (), "static_argnums='n'; its arguments are 0 (state), 1 (batch), 2 (n), 3 (flag)"),
        ((), "m", "static_argnames='m'"),
        ((), (2,), "pass names"),
    ],
)
def test_static_ones_that_are_not_there(argnums, argnames, part):
    with pytest.raises(AutoparError) as caught:
        static_of(parameters_of(step), argnums, argnames)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    "argnums, part",
    [
        (2, "argument 2 (n) is static"),
        (-2, "argument 2 (n) is static"),
        (4, "there is no argument 4"),
        ("batch", "'str' object cannot be interpreted as an integer"),
        (1.0, "batch_argnums=1.0"),
        ((0, None), "batch_argnums=(0, None)"),
    ],
)
def test_a_batch_that_is_not_there(argnums, part):
    with pytest.raises(BatchError) as caught:
        chosen("batch_argnums", argnums, static_of(parameters_of(step), 2))
    assert part in str(caught.value)


def test_counted_from_the_end():
    assert chosen("batch_argnums", (-3, 0), static_of(parameters_of(step))) == (1, 0)
    assert chosen("batch_argnums", "auto", static_of(parameters_of(step))) == "auto"


def test_a_static_argument_without_a_hash():
    with pytest.raises(TraceError, match="static argument `n` of `step` cannot be hashed") as caught:
        check_hashable([("flag", True), ("n", [3])], "step")
    assert caught.value.path == "n"
    with pytest.raises(TraceError, match="static argument `n`"):
        trace_step(step, (jnp.ones(2), jnp.ones(2)), {"n": [3]}, static_of(parameters_of(step), 2))


def test_what_a_call_leaves_out():
    program = trace_step(step, (jnp.ones(2),), {"batch": jax.ShapeDtypeStruct((4,), jnp.float32)})
    assert program.defaulted == (2, 3) and [a.number for a in program.arguments] == [0, 1]
