"""Chains of segments: borders against brute force; where equations of real steps go."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar._jax import Literal, make_jaxpr
from autopar.inter_op.chain import Chain, balanced_borders
from autopar.inter_op.cut import cut_step
from autopar.ir.trace.state import find_roles
from autopar.ir.trace.trace import trace_step
from autopar.ir.work import Work
from autopar.tuning import TUNING
from tests.models.registry import CASES
from tests.sweep import QUICK, SLOW

EMPTY = make_jaxpr([], [], [])


def hand_made(work, cut_bytes, marks=(), kinds=()):
    """A chain of which only the numbers are known."""
    assert len(cut_bytes) == len(work) + 1
    work, cut_bytes = np.array(work, float), np.array(cut_bytes, float)
    return Chain(EMPTY, (), (), len(work), work, cut_bytes, tuple(marks), tuple(kinds))


def draw(seed):
    """A chain of up to nine segments; integers, so that ties are frequent."""
    random = np.random.default_rng(seed)
    count = int(random.integers(2, 10))
    work = random.integers(0, 8, count) * random.choice([1, 1, 10], count)
    return hand_made(work, [0, *random.integers(1, 40, count - 1), 0])


def largest(chain, borders):
    """Work of the stage that has most."""
    ends = (*borders[1:], chain.num_segments)
    return max(chain.work[a:b].sum() for a, b in zip(borders, ends, strict=True))


def all_borders(chain, num_stages):
    return [(0, *rest) for rest in itertools.combinations(range(1, chain.num_segments), num_stages - 1)]


@pytest.mark.parametrize("block", range(4))
def test_borders_against_brute_force(block):
    off_balance = 0
    for seed in range(30 * block, 30 * block + 30):
        chain = draw(seed)
        for num_stages in range(1, min(4, chain.num_segments) + 1):
            for slack in (0.1, 0.5):
                borders = balanced_borders(chain, num_stages, slack)
                known = all_borders(chain, num_stages)
                assert borders in known, (seed, num_stages)
                least = min(largest(chain, b) for b in known)
                cap = (1 + slack) * least
                assert largest(chain, borders) <= cap * (1 + 1e-9), (seed, num_stages)
                fitting = [b for b in known if largest(chain, b) <= cap]
                wanted = min(chain.cut_bytes[list(b)].sum() for b in fitting)
                assert chain.cut_bytes[list(borders)].sum() == wanted, (seed, num_stages, slack)
                off_balance += largest(chain, borders) > least
    assert off_balance > 5, "balance is given up for bytes now and then"


def test_borders_by_hand():
    equal = hand_made([1] * 8, [0, *[5] * 7, 0])
    assert balanced_borders(equal, 1) == (0,)
    assert balanced_borders(equal, 2) == (0, 4)
    assert balanced_borders(equal, 4) == (0, 2, 4, 6)
    assert balanced_borders(equal, 8) == tuple(range(8))
    narrow = hand_made([10] * 8, [0, 9, 9, 9, 9, 1, 9, 9, 0])
    assert balanced_borders(narrow, 2) == (0, 4), "five tenths are more than a tenth over four"
    assert balanced_borders(narrow, 2, slack=0.25) == (0, 5)
    assert balanced_borders(hand_made([100, 1, 1, 1, 1], [0, 9, 5, 2, 5, 0]), 2) == (0, 3), "no one has less than 100"
    nothing = hand_made([0, 0, 0], [0, 3, 2, 0])
    assert balanced_borders(nothing, 2) == (0, 2)


def test_stages_begin_at_marks():
    equal = [1] * 8, [0, *[5] * 7, 0]
    assert balanced_borders(hand_made(*equal, marks=(1, 6)), 1) == (0,)
    assert balanced_borders(hand_made(*equal, marks=(1, 5, 7)), 2) == (0, 5), "of the marks the most balanced"
    assert balanced_borders(hand_made(*equal, marks=(1, 6)), 3) == (0, 1, 6)
    assert balanced_borders(hand_made(*equal, marks=(6,)), 4) == (0, 2, 4, 6), "further ones where most work is"
    assert balanced_borders(hand_made(*equal, marks=(1,)), 8) == tuple(range(8))


def test_stages_begin_at_the_same_place_of_equal_layers():
    # Ten layers of three segments, each with two places that send as little, and a head of two segments.
    chain = hand_made([2, 1, 1] * 10 + [1, 1], [0, *([9, 5, 5] * 11)[:31], 0], kinds=[0, 1, 2] * 10 + [3, 4])
    for num_stages in (2, 3, 4, 5):
        borders = balanced_borders(chain, num_stages, slack=0.3)
        assert len({chain.kinds[k] for k in borders[1:]}) == 1, borders
        assert set(chain.cut_bytes[list(borders[1:])]) == {5}


# Steps.

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
