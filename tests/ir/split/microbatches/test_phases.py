"""Which equations run before the loop, in it and after it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from autopar.ir.check import check_program
from autopar.ir.printer import print_jaxpr
from autopar.ir.split.microbatches.accumulate import accumulate
from autopar.ir.split.placement import SUM
from tests.ir.split.cases import BATCH, WIDTH, Case, Tree, equations, mlp_params, primitives_in, split_case, trace_case
from tests.ir.split.losses import LOSSES
from tests.ir.split.models import MODELS
from tests.ir.traced import split_microbatches

ADAM = optax.adam(1e-2)


def plain_adam_step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    value, grads = jax.value_and_grad(LOSSES["masked mean"])(state["params"], batch)
    updates, optimizer = ADAM.update(grads, state["optimizer"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, {"loss": value}


PLAIN = Case(plain_adam_step, extra=lambda: {"optimizer": ADAM.init(mlp_params())})


def test_phases():
    program, split = split_case(PLAIN, 4)
    check_program(split.loop)
    assert not primitives_in(split.loop.eqns)["sqrt"] and not primitives_in(split.before)["sqrt"]
    assert primitives_in(split.after)["sqrt"] == len(mlp_params())
    mask = program.jaxpr.invars[program.in_paths.index("batch/mask")]
    (denominator,) = [eqn for eqn in split.before if eqn.primitive.name == "reduce_sum"]
    assert denominator.invars == [mask]
    assert mask in split.pieces and not primitives_in(split.after)["dot_general"]


def test_what_the_loop_reads_and_makes():
    program, split = split_case(PLAIN, 4)
    assert split.count == 4
    assert len(split.loop.invars) == 1 + len(split.invariants) + len(split.pieces)
    number, *rest = split.loop.invars
    assert (number.aval.shape, number.aval.dtype) == ((), jnp.int32)
    inside = rest[len(split.invariants) :]
    assert [v.aval.shape for v in inside] == [(v.aval.shape[0] // 4, *v.aval.shape[1:]) for v in split.pieces]
    path_of = dict(zip(program.jaxpr.invars, program.in_paths, strict=False))
    assert sorted(path_of[v] for v in split.pieces) == ["batch/mask", "batch/x", "batch/y"]
    assert {path_of.get(v) for v in split.invariants} >= {"state/params/w1", "state/params/w2"}
    assert not any("optimizer" in path_of.get(v, "") for v in split.invariants)


def test_gradients_of_each_layer_are_sums():
    _, split = split_case(PLAIN, 4)
    assert {r.placement for r in split.results} == {SUM}
    sizes = sorted(r.var.aval.size for r in split.results)
    assert sizes == [1, *sorted(p.size for p in mlp_params().values())]  # the loss, and every parameter's gradient


@pytest.mark.parametrize("name", ["dropout", "dropout, old key"])
def test_random_bits_are_made_in_the_loop(name):
    case = MODELS[name]
    _, split = split_case(case, 4)

    def bits(eqns: Any) -> list[tuple[int, ...]]:
        drawn = [eqn.outvars[0].aval.shape for eqn in equations(eqns) if eqn.primitive.name == "threefry2x32"]
        return [shape for shape in drawn if len(shape) == 2]

    assert not bits(split.before) and not bits(split.after)
    assert (BATCH // 4, WIDTH) in bits(split.loop.eqns) and (BATCH, WIDTH) not in bits(split.loop.eqns)


def test_random_bits_of_a_scan_are_made_in_parts():
    case = MODELS["dropout in scan"]
    _, split = split_case(case, 4)
    drawn = {eqn.outvars[0].aval.shape for eqn in equations(split.loop.eqns) if eqn.primitive.name == "threefry2x32"}
    assert (BATCH // 4, WIDTH) in drawn and (BATCH, WIDTH) not in drawn


@pytest.mark.parametrize("name", ["adam", "dropout in scan", "cond with sums"])
def test_same_program_twice(name):
    case = MODELS[name]

    def text() -> str:
        program, batch = trace_case(case)
        return print_jaxpr(accumulate(program.jaxpr, split_microbatches(program.jaxpr, 2, batch)))

    assert text() == text()
