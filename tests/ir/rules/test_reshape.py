"""The rule of reshape: golden lines, and every strategy against the operation itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from autopar.ir.rules import rule_for
from tests.ir.rules.harness import FEW, MESH_SHAPES, check_equation, only_eqn


@pytest.mark.parametrize(
    "source, target, rule",
    [
        ((4, 6, 16), (4, 6, 2, 8), "ab(cd)->abcd"),  # heads
        ((4, 6, 2, 8), (4, 6, 16), "abcd->ab(cd)"),
        ((4, 6, 16), (24, 16), "abc->(ab)c"),
        ((24, 16), (4, 6, 16), "(ab)c->abc"),
        ((2, 32, 32, 3), (2, 4, 8, 4, 8, 3), "a(bc)(de)f->abcdef"),  # patches
        ((4, 6, 15), (4, 6, 5, 3), "ab(cd)->abcd"),  # 5 heads
        ((4, 197, 8), (788, 8), "abc->(ab)c"),
        ((8, 1, 4), (8, 4), "a1b->ab"),
        ((8, 4), (1, 8, 1, 4, 1), "ab->1a1b1"),
        ((12, 10), (8, 15), "(ab)e->(ac)d {whole b c d e}"),
        ((6,), (2, 3), "(ab)->ab"),
        ((2, 6, 4), (4, 3, 4), "a(bc)d->(ab)cd"),
        ((), (1, 1), "->11"),
        ((4, 0), (0, 7), "ab->cd {whole a b c d}"),
        ((8, 0, 2, 6), (8, 0, 1, 6), "abdc->ab1c {whole d}"),
    ],
)
def test_golden(source, target, rule):
    assert str(rule_for(only_eqn(lambda x: lax.reshape(x, target), source))) == rule


def shapes():
    """Two shapes of one size."""
    return st.lists(st.sampled_from([2, 3, 4, 8]), min_size=1, max_size=4).flatmap(
        lambda primes: st.tuples(groupings(primes), groupings(primes))
    )


def groupings(lengths):
    """Shapes made by merging runs of `lengths`, some after turning neighbours into their product's other factors."""

    def merge(cuts):
        shape, run = [], 1
        for length, cut in zip(lengths, cuts, strict=True):
            run *= length
            if cut:
                shape.append(run)
                run = 1
        return (*shape, run)

    return st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)).map(merge)


@FEW
@given(st.sampled_from(MESH_SHAPES), shapes(), st.integers(0, 2**16))
def test_against_the_operation(mesh_shape, pair, seed):
    source, target = pair
    if source != target:
        assert check_equation(only_eqn(lambda x: lax.reshape(x, target), source), seed, mesh_shape, limit=12) > 0


@pytest.mark.parametrize(
    "source, target", [((12, 8), (8, 12)), ((24, 8), (16, 12)), ((8, 12, 10), (8, 8, 15)), ((16, 9), (6, 24))]
)
def test_without_common_measure(source, target):
    assert check_equation(only_eqn(lambda x: lax.reshape(x, target), source), mesh_shape=(2, 4)) > 0


def test_dimensions():
    """A transpose within."""
    eqn = only_eqn(lambda x: lax.reshape(x, (12, 2), dimensions=(1, 0, 2)), (3, 4, 2))
    assert str(rule_for(eqn)) == "bac->(ab)c"
    check_equation(eqn, mesh_shape=(2, 4))
