"""Ten random small programs under random plans equal plain `jax.jit`; `make sweep` runs a thousand (`random_sweep.py`)."""

import collections

import numpy as np
import pytest

from autopar.ir.rules.registry import has_rule
from autopar.ir.trace.trace import trace_step
from tests.random_programs import draw_program
from tests.random_sweep import GROUP, _difference, case_of, check_group

NUMBERS = range(10, 20)


@pytest.mark.parametrize("first", NUMBERS[::GROUP])
def test_equal_to_jit(first):
    found = check_group(range(first, first + GROUP))
    assert not found, "\n".join(found)


def test_programs_are_of_all_kinds():
    """Gradients, half precision, NaN among the inputs, loops and branches; most of what a training step is made of."""
    many = [draw_program(seed) for seed in range(200)]
    programs, kinds = (
        [many[number] for number in NUMBERS],
        collections.Counter(line.name.split()[0] for program in many for line in program.lines),
    )
    assert {"dot", "write", "scan", "branch", "sum,", "cholesky", "max", "convolution", "top_k", "random"} <= set(kinds)
    assert 1 < sum(program.gradient for program in programs) < 9
    assert any(np.isnan(np.asarray(x, np.float32)).any() for program in programs for x in program.state)
    case = case_of(programs)
    eqns = trace_step(case.step, (case.state, case.batches[0])).jaxpr.eqns
    assert len({eqn.primitive.name for eqn in eqns if has_rule(eqn.primitive)}) > 50


def test_the_judge_can_say_no():
    good = np.array([1.0, np.nan, 3.0], np.float32)
    allowed = (good.astype(np.float64), 1e-7)
    assert not _difference(good, good, allowed)
    for k, wrong in ((0, 1.001), (0, np.inf), (1, 0.0), (2, np.nan)):
        bad = good.copy()
        bad[k] = wrong
        assert _difference(bad, good, allowed)
