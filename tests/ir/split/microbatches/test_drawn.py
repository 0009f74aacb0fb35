"""Samples that a step draws for itself: found where parameters read them, and in microbatches if told so."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from autopar.ir.split.microbatches.drawn import drawn_samples, work_on_drawn
from autopar.ir.split.microbatches.phases import find_phases
from tests.ir.split.cases import BATCH, LENGTH, WIDTH, Case, mlp, sgd, squares, traced


def _losses(params, batch):
    key = jax.random.fold_in(jax.random.key(0), 3)
    drawn = 0.5 * jax.random.normal(key, (BATCH, WIDTH))
    places = jnp.sin(jnp.arange(LENGTH))[:, None] * params["w1"][:LENGTH]  # rows, but not as many as the batch has
    return squares(params, batch).mean() + (mlp(params, drawn) ** 2).mean() + places.sum()


def _drawn():
    program, batch = traced(Case(sgd(_losses)))
    return program.jaxpr, batch, drawn_samples(program.jaxpr, batch)


def test_what_parameters_read_of_what_is_drawn():
    _, _, drawn = _drawn()
    assert {(var.aval.shape, dim) for var, dim in drawn.items()} == {((BATCH, WIDTH), 0)}


def test_samples_that_are_drawn_leave_the_work_to_microbatches():
    jaxpr, batch, drawn = _drawn()

    def at_once(found):
        return work_on_drawn([eqn for eqn in jaxpr.eqns if found.phase[eqn] != "loop"], drawn)

    without, along = find_phases(jaxpr, 2, batch), find_phases(jaxpr, 2, batch, drawn=drawn)
    assert at_once(along) == 0 < at_once(without)
