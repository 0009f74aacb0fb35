"""Microbatches: a step worked through in parts equals the step.

Table tests: each form of loss and model at batch 8, in 2 or in 4 microbatches, against plain `jax.jit`.
"""

from __future__ import annotations

import jax

from tests.ir.split.cases import (
    BATCH,
    WIDTH,
    Case,
    Tree,
    assert_equals_full_batch,
    assert_same,
    cases,
    cases_in_parts,
    full_batch,
    primitives_in,
    run_split,
    sgd,
    split_case,
    squares,
)
from tests.ir.split.losses import LOSS_CASES
from tests.ir.split.models import MODELS, MORE_MODELS, low_rank_params


@cases_in_parts(LOSS_CASES)
def test_losses(case, count):
    assert_equals_full_batch(case, count)


@cases_in_parts(MODELS)
def test_models(case, count):
    assert_equals_full_batch(case, count)


@cases(MORE_MODELS)
def test_more_models(case):
    assert_equals_full_batch(case, 4)


def test_products_of_weights_are_done_once():
    """LoRA: the gradient of `a @ b` is a sum over the batch; those of a and b are made of it after the loop."""

    def loss(params: Tree, batch: Tree) -> jax.Array:
        return squares({**params, "w1": params["w1"] + params["a"] @ params["b"]}, batch).mean()

    case = Case(sgd(loss), low_rank_params)
    program, split = split_case(case, 4)
    assert_same(run_split(case, program, split), full_batch(case))
    assert primitives_in(split.before)["dot_general"] == 1
    assert all(r.var.aval.shape != (BATCH, WIDTH) for r in split.results)
