"""What all forward passes make together is there between them and the backward passes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopar.errors import MicrobatchError
from autopar.ir.dataflow import inputs_of
from autopar.ir.source import is_backward
from autopar.ir.split.microbatch import check_phases, split_at_joins
from tests.ir.split.cases import Case, Tree, mlp, sgd, squares, trace_case


def balance_loss(params: Tree, batch: Tree) -> jax.Array:
    """As of a mixture of experts: each expert's share of the samples times its mean probability."""
    p = jax.nn.softmax(mlp(params, batch["x"]))
    share = jax.nn.one_hot(p.argmax(-1), p.shape[-1]).mean(0)
    return squares(params, batch).mean() + (share * p.mean(0)).sum()


def centred_loss(params: Tree, batch: Tree) -> jax.Array:
    """A forward pass that waits."""
    z = mlp(params, batch["x"])
    return ((z - z.mean(0)) ** 2).mean() + (jnp.tanh(z - z.mean(0)) ** 2).mean()


def test_only_backward_passes_read_what_is_joined():
    program, batch = trace_case(Case(sgd(balance_loss)))
    jaxpr, split = split_at_joins(program.jaxpr, 2, batch)
    check_phases(jaxpr)(split)
    assert {str(eqn.primitive) for eqn in split.between} <= {"copy", "mul", "div", "broadcast_in_dim"}
    made = {var for eqn in split.between for var in eqn.outvars}
    inside = dict(zip(split.loop.invars[1:], split.invariants, strict=False))
    readers = [eqn for eqn in split.loop.eqns if any(inside.get(a) in made for a in inputs_of(eqn))]
    assert readers and all(is_backward(eqn) for eqn in readers)


def test_without_waiting_nothing_is_joined():
    program, batch = trace_case(Case(sgd(lambda params, batch: squares(params, batch).mean())))
    jaxpr, split = split_at_joins(program.jaxpr, 2, batch)
    assert jaxpr is program.jaxpr and not split.between


def test_forward_passes_that_wait_are_refused():
    program, batch = trace_case(Case(sgd(centred_loss)))
    with pytest.raises(MicrobatchError, match="which `reduce_sum`"):
        split_at_joins(program.jaxpr, 2, batch)
