"""Plans against the compiler, for the devices of this process."""

import dataclasses
from collections import Counter

import jax
import pytest

import autopar
from autopar import Cluster, DataParallel, PipelineParallel, ShardParallel
from autopar.errors import AutoparError
from autopar.runtime.compile import compile_step
from autopar.streams.instructions import Run
from autopar.verify import verify
from tests.planned_mlp import arguments, train_step

METHODS = [DataParallel(zero=3), ShardParallel(mesh_shape=(2, 4)), PipelineParallel(num_stages=2, num_microbatches=2)]


def planned(method):
    step = autopar.parallelize(train_step, cluster=Cluster.local(), method=method)
    return step.plan(*arguments())


@pytest.fixture(scope="module")
def verified():
    plan = planned(DataParallel(zero=3))
    return plan, plan.verify()


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_the_compiler_agrees(method):
    plan = planned(method)
    found = plan.verify()
    assert found.ok and found.problems == () and "the compiler agrees" in str(found)
    runs = Counter(i.program for stream in plan.streams.values() for i in stream if isinstance(i, Run))
    assert {p.name: p.runs for p in found.programs} == runs
    total = sum(p.runs * n for p in found.programs for n in p.emitted.values())
    assert total == sum(c.bytes * c.times for c in plan.cost.collectives) > 0
    assert found.predicted_bytes == plan.cost.peak_bytes
    for mesh, peak in enumerate(found.compiled_bytes):
        assert peak >= max(p.compiled_bytes for p in found.programs if p.stage == mesh)


def test_other_bytes_than_planned_are_told(verified):
    plan, _ = verified
    first, *rest = plan.cost.collectives
    told = (dataclasses.replace(first, bytes=first.bytes + 4), *rest)
    found = dataclasses.replace(plan, cost=dataclasses.replace(plan.cost, collectives=told)).verify()
    kind = plan.cost.collectives[0].kind
    assert not found.ok and found.problems[0].startswith(f"{found.programs[0].name}: {kind} of")
    assert "NOT verified" in str(found) and "DIFFERENT" in str(found)


def test_what_xla_cannot_print_is_told(verified, monkeypatch):
    class Unprintable:
        def __init__(self, compiled):
            self.memory_analysis = compiled.memory_analysis

        def as_text(self):
            raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure")

    def compiled(*how):
        made = compile_step(*how)
        return dataclasses.replace(made, programs={name: Unprintable(p) for name, p in made.programs.items()})

    monkeypatch.setattr(verify, "compile_step", compiled)
    with pytest.raises(AutoparError, match="cannot print") as error:
        verified[0].verify()
    assert "RET_CHECK" in str(error.value) and f"jax[tpu]=={jax.__version__}" in error.value.do


def test_a_peak_over_the_budget_is_told(verified):
    plan, found = verified
    assert found.ok
    (peak,) = found.compiled_bytes
    found = dataclasses.replace(plan, budget_bytes=peak - 1).verify()
    assert not found.ok and "over the budget" in found.problems[0]


def test_shown(verified, tmp_path):
    _, found = verified
    page = found.save_html(tmp_path / "found.html").read_text()
    for words in ("all-gather", "all-reduce", "train_step", "the compiler agrees"):
        assert words in page and words in str(found)
    assert repr(found).startswith("Verification(train_step for")


def test_what_kernels_lose_to_collectives_is_told_as_predicted_and_as_compiled(verified):
    plan, found = verified
    (program,) = found.programs
    assert (
        program.predicted_exposed_seconds == pytest.approx(sum(plan.cost.exposed_seconds)) and found.exposed_share > 0
    )
    assert f"{found.exposed_share:.0%} exposed ({found.predicted_exposed_share:.0%} predicted)" in str(found)


def test_a_plan_from_a_file_is_attached_first(verified, tmp_path):
    plan, _ = verified
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    with pytest.raises(AutoparError, match="attach"):
        loaded.verify()
    step = autopar.parallelize(train_step, cluster=Cluster.local(), method=DataParallel(zero=3))
    assert step.attach(*arguments(), plan=loaded).verify().ok
