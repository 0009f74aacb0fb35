"""A stage's backward pass at its levels: what it keeps, what it runs again and where."""

from __future__ import annotations

import functools

import pytest

from autopar.inter_op.backward import find_levels
from autopar.inter_op.borders import balanced_borders
from autopar.inter_op.cut import cut_step
from autopar.inter_op.residuals import ALL, CHEAP
from autopar.inter_op.tasks import make_tasks
from autopar.ir.dataflow import inputs_of
from autopar.ir.trace.state import find_roles
from autopar.ir.trace.trace import trace_step
from autopar.ir.work import num_bytes
from tests.small_transformer import BATCH, LENGTH, WIDTH, arguments, train_step

COUNT = 4
HIDDEN_BYTES = BATCH // COUNT * LENGTH * WIDTH * 4
"""Of what passes between layers, for one microbatch."""


@functools.cache
def cut(kind, num_stages, num_layers):
    program = trace_step(train_step, arguments(kind, num_layers))
    return cut_step(program, find_roles(program, (1,)), num_stages, COUNT)


def tasks_of(kind, num_stages, num_layers=4, split_backward="nowhere", level=CHEAP):
    made = cut(kind, num_stages, num_layers)
    borders = balanced_borders(made.chain, num_stages)
    levels = [level] * num_stages
    return make_tasks(made, borders, split_backward, levels)


def only_rounds(tasks):
    """Of each stage, what it does of a microbatch: once forwards, once backwards."""
    return [only for (only,) in tasks.rounds]


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("kind", ["unrolled", "scan"])
def test_all_keeps_what_enters(kind, num_stages):
    tasks = tasks_of(kind, num_stages, level=ALL)
    first, *rounds = only_rounds(tasks)
    assert first.backward.kept.values == (), "of the first stage the batch, which is there anyway"
    for each in rounds:
        kept = each.backward.kept
        assert set(kept.values) == set(each.passes.received) and kept.num_bytes == HIDDEN_BYTES
    cheap = only_rounds(tasks_of(kind, num_stages))
    for a, b in zip(cheap, only_rounds(tasks), strict=True):
        assert a.backward.kept.num_bytes > 3 * b.backward.kept.num_bytes


def test_levels_keep_less_and_run_more():
    passes = only_rounds(tasks_of("unrolled", 2))[1].passes
    levels = find_levels(passes)
    assert levels[0] == CHEAP and levels[-1] == ALL and list(levels) == sorted(set(levels)) and len(levels) > 2
    kept = [passes.kept(level) for level in levels]
    sizes, heavy = [k.num_bytes for k in kept], [len(k.heavy) for k in kept]
    assert sizes == sorted(set(sizes), reverse=True) and heavy[0] == 0 and heavy[1] < heavy[-1]
    assert sizes[-1] == HIDDEN_BYTES
    assert tuple(find_levels(passes)) == levels, "the same each time"


def test_selective_levels_begin_with_attention_and_keep_layer_borders():
    """Scores take most bytes for their work; a layer's input takes fewest for the work that it saves."""
    passes = only_rounds(tasks_of("unrolled", 2))[1].passes
    first, *_, last = [passes.kept(level) for level in find_levels(passes)[1:-1]]
    assert {eqn.outvars[0].aval.shape[-1] for eqn in first.heavy} == {LENGTH}, "products over the heads"
    assert [num_bytes(v) for v in last.values] == [HIDDEN_BYTES] * 3, "what enters two layers and the loss"


def test_a_scan_has_two_levels():
    passes = only_rounds(tasks_of("scan", 2))[1].passes
    assert find_levels(passes) == (CHEAP, ALL)
    assert [eqn.primitive.name for eqn in passes.kept(ALL).heavy] == ["scan"] * len(passes.kept(ALL).heavy)


def test_what_runs_again_runs_late():
    """Of two layers the second runs again first, and the first not before the second's backward has begun."""
    tasks = tasks_of("unrolled", 2, level=find_levels(only_rounds(tasks_of("unrolled", 2))[1].passes)[-2])
    backward = only_rounds(tasks)[1].backward
    again = set(backward.kept.heavy)
    order = [eqn in again for eqn in backward.eqns]
    runs = [a for a, b in zip(order, [*order[1:], None], strict=True) if a != b]
    assert runs.count(True) > 2, "they stand apart"
    made = set()
    for eqn in backward.eqns:
        assert not any(var in made for var in eqn.outvars), "nothing twice"
        made.update(eqn.outvars)
    gates = backward.gates["B"]
    assert gates and set(gates) <= set(backward.eqns)
    for eqn in backward.eqns:
        earlier, *gated = gates.get(eqn, [None])
        assert set(gated) <= {*backward.kept.values, *only_rounds(tasks)[1].passes.pieces} and (
            earlier is None or gated
        )
    places = {var: k for k, eqn in enumerate(backward.eqns) for var in eqn.outvars}
    assert all(places.get(a, -1) < k for k, eqn in enumerate(backward.eqns) for a in inputs_of(eqn))


def test_what_is_cheap_is_made_again_late_too():
    """What the first layer's backward makes again is not there while the second's goes on."""
    backward = only_rounds(tasks_of("unrolled", 2))[1].backward
    again = set(backward.kept.again)
    assert again and not backward.kept.heavy
    order = [eqn in again for eqn in backward.eqns]
    runs = [a for a, b in zip(order, [*order[1:], None], strict=True) if a != b]
    assert runs.count(True) > 2, "they stand apart"
    places = {var: k for k, eqn in enumerate(backward.eqns) for var in eqn.outvars}
    assert all(places.get(a, -1) < k for k, eqn in enumerate(backward.eqns) for a in inputs_of(eqn))


@pytest.mark.parametrize("kind", ["unrolled", "scan"])
def test_nothing_heavy_runs_again_in_both_halves(kind):
    tasks = tasks_of(kind, 2, split_backward="everywhere", level=ALL)
    passed = 0
    for backward in (each.backward for each in only_rounds(tasks)):
        heavy = set(backward.kept.heavy)
        halves = [[eqn for eqn in eqns if eqn in heavy] for eqns in (backward.eqns, backward.weight)]
        assert sum(map(len, halves)) == len(heavy) and (not halves[1] or not backward.eqns)
        made = {var for eqn in backward.eqns for var in eqn.outvars}
        assert set(backward.passed) <= made and not set(backward.passed.values()) & made
        passed += len(backward.passed)
    assert passed or kind == "scan"


def test_one_stage_changes_alone():
    tasks = tasks_of("unrolled", 4)
    changed = tasks.at_level(2, ALL)
    assert changed.levels == (CHEAP, CHEAP, ALL, CHEAP)
    assert [a is b for a, b in zip(tasks.rounds, changed.rounds, strict=True)] == [True, True, False, True]
    assert only_rounds(changed)[2].forward == only_rounds(tasks)[2].forward and changed.update is tasks.update


@pytest.mark.parametrize("split_backward", ["nowhere", "everywhere"])
def test_who_reads_what(split_backward):
    """Of each value of the loop its readers elsewhere, told stage by stage and equation by equation."""
    tasks = tasks_of("unrolled", 3, split_backward=split_backward)
    expected = {}
    for stage in range(3):
        eqns = tasks.in_loop(stage)
        made = {var for eqn in eqns for var in eqn.outvars}
        for eqn in eqns:
            for var in inputs_of(eqn):
                if var not in made:
                    expected.setdefault(var, set()).add(stage)
    assert tasks.readers == expected
    crossing = {var: stages for var, stages in expected.items() if var in tasks.made_at}
    assert {frozenset(stages) for stages in crossing.values()} >= {frozenset({0}), frozenset({1}), frozenset({2})}
