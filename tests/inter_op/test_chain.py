"""Chains of segments: where equations of real steps go."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar._jax import Literal
from autopar.inter_op.cut import cut_step
from autopar.ir.trace.state import find_roles
from autopar.ir.trace.trace import trace_step
from autopar.ir.work import Work
from autopar.tuning import TUNING
from tests.models.registry import CASES
from tests.sweep import QUICK, SLOW

MODELS = (
    "mlp_schedule_clip",
    "gpt_unrolled",
    "gpt_tied_dropout",
    "haiku_lstm",
    "moe_top2_capacity",
    "matrix_factorization",
)


@functools.cache
def chain_of(name, num_microbatches):
    case = CASES[name]()
    program = trace_step(case.step, (case.state, case.batches[0]))
    return cut_step(program, find_roles(program, (1,)), 2, num_microbatches).chain


def operands_of(eqn):
    return [a for a in eqn.invars if not isinstance(a, Literal)]


@pytest.mark.parametrize("name", MODELS)
def test_every_equation_has_a_segment_or_is_light(name):
    chain = chain_of(name, 2)
    assert len(chain.segment) == len(chain.backward) == len(chain.loop.eqns)
    assert len(chain.cut_bytes) == chain.num_segments + 1 and len(chain.work) == chain.num_segments
    assert set(chain.segment) - {-1} <= set(range(chain.num_segments))
    work = Work().of_equations(chain.loop.eqns)
    light = set()
    for eqn, segment, cost in zip(chain.loop.eqns, chain.segment, work, strict=True):
        if segment == -1:
            assert cost <= TUNING.repeated_work * sum(work) and not eqn.effects
            assert all(a in light or a in chain.loop.invars for a in operands_of(eqn))
            light.update(eqn.outvars)
    sums = np.zeros(chain.num_segments)
    for segment, cost in zip(chain.segment, work, strict=True):
        if segment >= 0:
            sums[segment] += cost
    np.testing.assert_allclose(chain.work, sums)
    in_order = [s for s, behind in zip(chain.segment, chain.backward, strict=True) if s >= 0 and not behind]
    assert in_order == sorted(in_order) and set(in_order) == set(range(chain.num_segments))


@pytest.mark.parametrize("name", MODELS)
def test_values_flow_forward_and_cotangents_back(name):
    chain = chain_of(name, 2)
    made = {}
    crossing: dict[int, dict] = {k: {} for k in range(chain.num_segments + 1)}
    for eqn, segment, behind in zip(chain.loop.eqns, chain.segment, chain.backward, strict=True):
        for var in operands_of(eqn):
            maker, made_by_backward = made.get(var, (-1, False))
            if maker < 0 or segment < 0:
                continue
            assert not (made_by_backward and not behind), "the forward pass reads no cotangent"
            if made_by_backward == behind:
                assert maker >= segment if behind else maker <= segment, f"{eqn.primitive} reads from {maker}"
                for border in range(min(maker, segment) + 1, max(maker, segment) + 1):
                    crossing[border][var] = var.aval.size * var.aval.dtype.itemsize
        made |= {var: (segment, behind) for var in eqn.outvars}
    assert list(chain.cut_bytes) == [sum(crossing[k].values()) for k in range(chain.num_segments + 1)]
    assert chain.cut_bytes[0] == chain.cut_bytes[-1] == 0


def masked_step(params, batch):
    """Recomputed layers that read a mask made of the samples, which the first product reads too."""

    @jax.checkpoint
    def layer(x, samples, kernel):
        return x + jnp.tanh(jnp.where(samples[:, :1] > 0, x, 0) @ kernel)

    def loss_fn(params):
        x = batch["x"] @ params[0]
        for kernel in params[1:]:
            x = layer(x, batch["x"], kernel)
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def test_the_batch_holds_no_backward_pass_in_one_place():
    """Every stage has its part of the batch: a layer's backward pass runs where its parameters are."""
    array = jax.ShapeDtypeStruct((8, 64), np.float32)
    arguments = [jax.ShapeDtypeStruct((64, 64), np.float32)] * 5, {"x": array, "y": array}
    program = trace_step(masked_step, arguments)
    chain = cut_step(program, find_roles(program, (1,)), 2, 4).chain
    at = {side: [0] * chain.num_segments for side in (False, True)}
    for eqn, segment, behind in zip(chain.loop.eqns, chain.segment, chain.backward, strict=True):
        at[behind][segment] += eqn.primitive.name == "dot_general"
    assert max(at[False]) == 1
    assert sum(at[True]) == 13 and max(at[True]) <= 4, "each of four layers has a product again, and two gradients"


def marked_step(params, batch):
    def loss_fn(params):
        x = batch["x"]
        for number, kernel in enumerate(params):
            x = jnp.tanh(x @ kernel)
            x = autopar.mark_stage(x) if number in (0, 2) else x
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_marks(num_microbatches):
    array = jax.ShapeDtypeStruct((8, 12), np.float32)
    plan = autopar.parallelize(
        marked_step,
        cluster=autopar.Cluster(1, 3, SLOW, QUICK),
        method=autopar.PipelineParallel(num_microbatches=num_microbatches),
        batch_argnums=(1,),
    ).plan([jax.ShapeDtypeStruct((12, 12), np.float32)] * 4, {"x": array, "y": array})
    pipeline = plan.origin.pipeline
    chain, forward = pipeline.cut.chain, [each.forward for (each,) in pipeline.tasks.rounds]
    assert pipeline.borders == (0, *chain.marks) and len(chain.marks) == 2
    assert [[e.primitive.name for e in eqns].count("dot_general") for eqns in forward] == [1, 2, 1]
    for eqns in forward[:-1]:
        assert eqns[-1].primitive.name == "mark_stage"


def test_no_work_in_a_loop_without_equations():
    chain = dataclasses.replace(chain_of("mlp_schedule_clip", 2), passes=(), segment=(), work_of=(), num_segments=1)
    assert chain.work.tolist() == [0.0]
