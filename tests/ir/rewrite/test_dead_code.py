"""Dead code goes, in loops and branches too; what is read and what has effects stays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar._jax import DropVar, open_jaxpr, scan_counts
from autopar.ir.check import check_program
from autopar.ir.trace.trace import trace_step
from tests.ir.traced import evaluate

X = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)


def flat(fn, *args):
    program = trace_step(fn, args)
    check_program(program.jaxpr)
    actual = evaluate(program.jaxpr, *program.flatten_inputs(jax.tree.leaves(args)))
    np.testing.assert_allclose(actual[0], jax.tree.leaves(jax.jit(fn)(*args))[0], rtol=1e-5)
    return program.jaxpr


def test_equations():
    jaxpr = flat(lambda x: (jnp.sin(x).sum(), jnp.cos(x))[0], X)
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["sin", "reduce_sum"]


def test_carries_and_stacks_of_scan():
    def step(x):
        def body(carry, row):
            used, feeds_used, unused = carry
            return (used + feeds_used, feeds_used * 2, unused + row.sum()), (row, jnp.sin(row))

        (used, _, _), (_, stacked) = lax.scan(body, (0.0, 1.0, 0.0), x)
        return used + stacked.sum()

    (scan,) = [eqn for eqn in flat(step, X).eqns if eqn.primitive.name == "scan"]
    assert scan_counts(scan.params) == (0, 2)
    assert len(scan.outvars) == 3 and isinstance(scan.outvars[1], DropVar)


def test_carries_of_while():
    def step(n, x):
        def body(state):
            i, used, unused = state
            return i + 1, used * 2, unused + x.sum()

        return lax.while_loop(lambda state: state[0] < n, body, (0, 1.0, 0.0))[1]

    (loop,) = flat(step, 3, X).eqns
    assert len(loop.outvars) == 2 and loop.params["body_nconsts"] == 0


def test_results_of_cond():
    def step(x):
        return lax.cond(x.sum() > 0, lambda x: (x, x @ x.T), lambda x: (x * 2, x @ x.T + 1), x)[0]

    (cond,) = [eqn for eqn in flat(step, X).eqns if eqn.primitive.name == "cond"]
    assert len(cond.outvars) == 1
    assert [len(open_jaxpr(branch)[0].eqns) for branch in cond.params["branches"]] == [1, 0]


def test_operands_of_a_barrier():
    jaxpr = flat(lambda x: lax.optimization_barrier((x, jnp.sin(x)))[0], X)
    (barrier,) = jaxpr.eqns
    assert len(barrier.invars) == len(barrier.outvars) == 1


def test_effects_in_a_loop_stay():
    def step(x):
        def body(carry, row):
            jax.debug.callback(lambda row: None, row)
            return carry, None

        lax.scan(body, 0.0, x)
        return x * 2

    assert "scan" in [eqn.primitive.name for eqn in flat(step, X).eqns]
