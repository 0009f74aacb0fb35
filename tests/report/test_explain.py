"""Why this sharding: the figures are those of planning with the alternative pinned, and what forbids it is named."""

from __future__ import annotations

import dataclasses
import re

import pytest
from jax.sharding import PartitionSpec as P

from autopar import Cluster, DataParallel, Device, Link, PipelineParallel, Plan, ShardParallel
from autopar.errors import AutoparError
from autopar.plan.words import seconds_text
from autopar.report.alternatives import studies
from autopar.report.topics import operations_of

KERNEL = "state/params/layers/0/kernel"


def rows_of(text, title):
    """Words of the rows of one table."""
    lines = text[text.index(title) :].splitlines()[3:]
    rows = []
    for line in lines:
        if not line.strip() or line.startswith("  and"):
            break
        rows.append(re.split(r"\s{2,}", line.strip()))
    return rows


@pytest.fixture(scope="module")
def small(make_step, types):
    """One layer: quick to solve again and again."""
    return make_step().plan(*types(batch=32, num_layers=1))


def test_alternatives_cost_what_planning_with_a_pin_costs(small, make_step, types):
    text = small.explain(KERNEL)
    rows = {row[0]: row[2] for row in rows_of(text, "Alternatives")}
    assert len(rows) == 9 and rows_of(text, "Alternatives")[0][3] == "chosen"
    for spec, name in ((P("x", None), "[x, -]"), (P(None, None), "[-, -]")):
        pinned = make_step(ShardParallel(mesh_shape=(2, 4), constraints={KERNEL: spec})).plan(
            *types(batch=32, num_layers=1)
        )
        origin = studies(pinned)[0]
        assert rows[name] == seconds_text(origin.base)
    assert "Read by" in text and "Its new value" in text
    assert f"{seconds_text(small.cost.step_seconds)} predicted" in text, "as the plan's page says"


def test_no_alternative_beats_an_optimal_plan(small):
    study = studies(small)[0]
    for node in study.graph.inputs:
        for outcome in study.outcomes(study.class_of[node]):
            assert outcome.seconds >= study.base * (1 - 1e-5)


def test_the_end_of_a_path_and_globs(small):
    assert small.explain("params/layers/0/bias").startswith("state/params/layers/0/bias")
    assert small.explain("batch/*").count("Alternatives") == 2


def test_a_pin_forbids(make_step, types):
    pinned = make_step(ShardParallel(mesh_shape=(2, 4), constraints={"*/kernel": P(None, "y")})).plan(
        *types(32, num_layers=1)
    )
    text = pinned.explain(KERNEL)
    assert [row[0] for row in rows_of(text, "Alternatives")] == ["[-, y]"]
    assert "constraint '*/kernel' pins" in text and "step time without that" in text


def test_the_method_forbids(make_step, types):
    text = make_step(DataParallel(zero=2)).plan(*types(32, num_layers=1)).explain(KERNEL)
    assert "the method, DataParallel(zero=2)" in text and "all-gather" in text


def test_what_does_not_divide_forbids(make_step, types):
    text = make_step().plan(*types(batch=32, width=6, num_layers=1)).explain(KERNEL)
    assert "dim 0 has length 6, which y does not divide" in text
    assert "b has length 6, which y does not divide" in make_step().plan(*types(32, 6, 1)).explain("dot_general")


def test_the_memory_budget_forbids(small):
    text = dataclasses.replace(small, budget_bytes=100).explain(KERNEL)
    others = rows_of(text, "Alternatives")[1:]
    assert len(others) == 8 and all(row[2] == "-" for row in others)
    assert all(row[3].startswith("does not fit in 100 B: at its fastest it needs") for row in others)


def test_an_operation(small):
    text = small.explain("dot_general at planned_mlp.py")
    assert "ab,bc->ac {sum b}" in text and "axis: factor" in text
    assert rows_of(text, "Alternatives")[0][-1] == "chosen"


def test_names_that_are_none(small):
    with pytest.raises(AutoparError, match="did you mean state/params/layers/0/kernel") as caught:
        small.explain("state/params/layer/0/kernel")
    assert KERNEL in caught.value.near
    with pytest.raises(AutoparError, match="no such argument or operation"):
        small.explain("qqqq")
    with pytest.raises(AutoparError, match="this plan has no stages"):
        small.explain("stages")


def test_a_file_must_be_attached_first(small, make_step, types, tmp_path):
    small.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    with pytest.raises(AutoparError, match=r"call compiled = step.compile\(..., plan=plan\) first"):
        loaded.explain(KERNEL)
    attached = make_step().attach(*types(batch=32, num_layers=1), plan=loaded)
    assert attached.explain(KERNEL) == small.explain(KERNEL)


def test_explaining_changes_nothing(small):
    before, rows = str(small), len(small.origin.pipeline.stages[0].sharded.problem.rows)
    assert small.explain(KERNEL) == small.explain(KERNEL)
    assert str(small) == before and len(small.origin.pipeline.stages[0].sharded.problem.rows) == rows


def test_a_scan_is_looked_into():
    import jax
    import jax.numpy as jnp

    import autopar

    def step(stack, x):
        def loss(stack):
            return jnp.sum(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack)[0] ** 2)

        return jax.tree.map(lambda p, g: p - g, stack, jax.grad(loss)(stack))

    cluster = Cluster(
        hosts=1, devices_per_host=4, device=Device("toy", 40e6, 1e9, 1e9), intra=Link(1e-6, 1e6), inter=Link(1e-6, 1e6)
    )
    types = jax.ShapeDtypeStruct((5, 16, 16), jnp.float32), jax.ShapeDtypeStruct((64, 16), jnp.float32)
    text = (
        autopar.parallelize(step, cluster=cluster, method=ShardParallel(mesh_shape=(4,))).plan(*types).explain("stack")
    )
    assert "5 times" in text and "dot_general" in text


def test_where_compute_goes(small, piped):
    for plan in (small, piped):
        operations = operations_of(plan)
        total = sum(operation.seconds for operation in operations)
        assert total == pytest.approx(sum(work.seconds for work in plan.profile.work), rel=1e-6)
        products = [operation for operation in operations if operation.name.startswith("dot_general")]
        assert all(operation.flops > 0 for operation in products) and any("backward" in o.name for o in products)
        rows = rows_of(plan.explain("compute"), "Compute in one step")
        assert rows[0][0] == operations[0].name and rows[0][3] == seconds_text(operations[0].seconds)


# Stages


@pytest.fixture(scope="module")
def piped(make_step, types):
    return make_step(PipelineParallel(num_stages=4, num_microbatches=4)).plan(*types(batch=32))


def test_an_argument_of_a_stage(piped):
    text = piped.explain(KERNEL)
    stage = next(v.stage for v in piped.values if v.name == KERNEL)
    assert text.startswith(f"{KERNEL}\n  stage        {stage}")
    rows = rows_of(text, "Alternatives: the whole stage")
    assert rows[0][3] == "chosen" and len(rows) > 1
    assert "Read by" in text and "Its new value" in text and "4 times" in text


def test_no_alternative_beats_a_stage(piped):
    for study in studies(piped):
        for node in study.graph.inputs:
            for outcome in study.outcomes(study.class_of[node]):
                assert outcome.seconds >= study.base * (1 - 1e-5)


def test_equal_stages_are_told_together(piped):
    text = piped.explain("params/layers/*/kernel")
    assert text.count("Alternatives") < 4 and re.search(r"stages +1,2, equal", text)
    assert "layers/{1,2}/kernel" in text


def test_an_operation_of_a_stage(piped):
    text = piped.explain("dot_general at planned_mlp.py")
    assert "stage time" in text and rows_of(text, "Alternatives")[0][-1] == "chosen"
    with pytest.raises(AutoparError, match="did you mean state/params/layers/0/kernel"):
        piped.explain("state/params/layer/0/kernel")


def test_why_the_stages(piped):
    text = piped.explain("stages")
    rows = rows_of(text, "Borders, and where else they could be")
    chosen = [row for row in rows if row[-1] == "chosen"]
    assert [row[0] for row in chosen] == ["0 | 1", "1 | 2", "2 | 3"]
    assert all(row[2] == "2.05 kB" for row in chosen), "8 samples of 32 numbers, both ways"
    assert "PipelineParallel(num_stages=4" in text


def test_a_pipeline_from_a_file_explains(piped, make_step, types, tmp_path):
    piped.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    with pytest.raises(AutoparError, match="compile"):
        loaded.explain(KERNEL)
    step = make_step(PipelineParallel(num_stages=4, num_microbatches=4))
    attached = step.attach(*types(batch=32), plan=loaded)
    assert attached.explain("stages") == piped.explain("stages")
    assert rows_of(attached.explain(KERNEL), "Alternatives")[0] == rows_of(piped.explain(KERNEL), "Alternatives")[0]


def test_parts_of_a_stack_by_the_users_name():
    import autopar
    from tests.sweep import QUICK, SLOW
    from tests.test_follow import BATCH, init, step

    cluster = Cluster(hosts=1, devices_per_host=2, device=SLOW, intra=QUICK)
    method = PipelineParallel(num_stages=2, num_microbatches=2)
    plan = autopar.parallelize(step, cluster=cluster, method=method, batch_argnums=(1,)).plan(init(), BATCH)
    text = plan.explain("params/layers")
    assert "state/params/layers[0:2]" in text and "state/params/layers[2:4]" in text
