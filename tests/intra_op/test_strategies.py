"""Strategies are those that a search over all choices on all axes finds; operations of one form share them."""

import itertools
import math

import jax
import jax.numpy as jnp
import pytest

from autopar.intra_op.strategies import IDLE, enumerate_strategies
from autopar.ir.rules import rule_for
from autopar.ir.split.placement import Partial, Split
from autopar.ir.split.strategy import strategies
from autopar.mesh import Sharding

PRODUCT = (lambda a, b: a @ b), [(24, 16), (16, 10)]
SUM = (lambda a: a.sum(1)), [(8, 12)]
MOST = (lambda a: a.max(0)), [(8, 12)]
JOINED = (lambda a: a.reshape(-1, 6)), [(4, 12, 6)]
ADDED = (lambda a, b: a + b), [(6, 4), (6, 4)]
MESHES = [{"x": 4}, {"x": 2, "y": 3}, {"x": 2, "y": 1, "z": 4}]


def rule_of(function, shapes):
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return rule_for(jax.make_jaxpr(function)(*types).eqns[-1])


def all_strategies(rule, axis_sizes):
    """One axis after the other, without pruning; {(operands, results, reductions): names}."""
    found = {}
    ways = [[*strategies(rule, size), None] if size > 1 else [None] for size in axis_sizes.values()]
    for chosen in itertools.product(*ways):
        axes_of = {}
        for axis, way in zip(axis_sizes, chosen, strict=True):
            if way is not None and way.factor is not None:
                axes_of[way.factor] = (*axes_of.get(way.factor, ()), axis)
        if any(rule.sizes[f] % math.prod(axis_sizes[a] for a in axes) for f, axes in axes_of.items()):
            continue

        def sharding(term, k, side, chosen=chosen):
            dims, partial = [()] * len(term), ()
            for axis, way in zip(axis_sizes, chosen, strict=True):
                placement = getattr(way, side)[k] if way is not None else None
                if isinstance(placement, Split):
                    dims[placement.dim] = (*dims[placement.dim], axis)
                elif isinstance(placement, Partial) and placement.kind == "sum":
                    partial = (*partial, axis)
            return Sharding(tuple(dims), partial)

        operands = tuple(sharding(term, k, "operands") for k, term in enumerate(rule.operands))
        results = tuple(sharding(term, k, "results") for k, term in enumerate(rule.results))
        reductions = tuple((kind, axes_of[f]) for f, kind in rule.reduced.items() if f in axes_of)
        names = tuple(IDLE if way is None else way.factor or f"+{way.group}" for way in chosen)
        found.setdefault((operands, results, reductions), names)
    return found


@pytest.mark.parametrize("axis_sizes", MESHES, ids=str)
@pytest.mark.parametrize("case", [PRODUCT, SUM, MOST, JOINED, ADDED], ids=["product", "sum", "max", "reshape", "add"])
def test_as_by_search_over_all_choices(case, axis_sizes):
    rule = rule_of(*case)
    found = enumerate_strategies(rule, axis_sizes)
    assert {(s.operands, s.results, s.reductions): s.choice for s in found} == all_strategies(rule, axis_sizes)
    assert [s.choice for s in found] == list(all_strategies(rule, axis_sizes).values())


def test_lengths_that_the_devices_divide_alike_are_of_one_form():
    one, other, fewer = (rule_of(PRODUCT[0], [(n, 16), (16, 10)]) for n in (24, 56, 28))
    assert one.form(8) == other.form(8) != fewer.form(8)
    known = enumerate_strategies(one, {"x": 2, "y": 4})
    assert enumerate_strategies(other, {"x": 2, "y": 4}) == known != enumerate_strategies(fewer, {"x": 2, "y": 4})


def test_no_device_splits_a_dim_without_elements():
    """The odd half of a scan over one element is empty; it took the strategies of lengths that all devices divide."""
    known, empty, odd = (rule_of(lambda a, b: a * b, [(4, length, 3)] * 2) for length in (8, 0, 5))
    assert known.form(8) != empty.form(8) == odd.form(8)
    assert enumerate_strategies(empty, {"x": 2}) == enumerate_strategies(odd, {"x": 2})
