"""`autopar.compare`: a row is the plan that would be run; figures follow from it; and names that people use."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import Cluster, DataParallel, Device, Link, PipelineParallel, ShardParallel
from autopar.errors import AutoparError, ClusterError
from autopar.search.figures import least_seconds
from autopar.search.method_names import method_of

ROWS, WIDTH = 64, 32
FLOPS = 3 * 2 * ROWS * WIDTH * WIDTH
"""Of a step: forward, and backward to the weights and (of the second product only) to what goes in."""


def train_step(w, batch):
    def loss_fn(w):
        return jnp.mean((jnp.tanh(batch["x"] @ w) - batch["y"]) ** 2)

    loss, grad = jax.value_and_grad(loss_fn)(w)
    return w - 0.1 * grad, loss


def arguments(dtype="float32"):
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), dtype)
    return jax.ShapeDtypeStruct((WIDTH, WIDTH), dtype), {"x": batch, "y": batch}


def cluster(devices, flops=1e9, name="toy", memory_bytes=1e9):
    link = Link(1e-6, 1e9)
    return Cluster(1, devices, Device(name, flops, memory_bytes, 1e10), link, link)


def test_a_row_is_the_plan_that_would_be_run():
    found = autopar.compare(train_step, arguments(), [cluster(2), cluster(4)], [DataParallel(), "fsdp"])
    assert found.name == "train_step" and len(found.rows) == 4
    for row in found.rows:
        devices = 2 if row.cluster == "2 toy" else 4
        method = DataParallel(zero=3) if "zero" in row.method else DataParallel()
        plan = autopar.parallelize(train_step, cluster=cluster(devices), method=method).plan(*arguments())
        assert row.step_seconds == plan.cost.step_seconds and row.plan.stages[0].choices == plan.stages[0].choices
        assert row.unit == "samples" and row.rate == pytest.approx(ROWS / plan.cost.step_seconds)
        assert row.left_bytes == 1e9 - max(plan.cost.peak_bytes)
        assert row.mfu == pytest.approx(2 * 2 * ROWS * WIDTH * WIDTH / (devices * 1e9) / row.step_seconds)
    seconds = [row.step_seconds for row in found.rows]
    assert seconds == sorted(seconds)


def test_the_steps_own_method_and_strings():
    step = autopar.parallelize(train_step, cluster=cluster(2), method=ShardParallel(mesh_shape=(4,)))
    found = autopar.compare(step, arguments(), ["4 h100"])
    assert [(row.cluster, row.method) for row in found.rows] == [("4 h100", "ShardParallel(mesh_shape=(4,))")]
    assert step.cluster.num_devices == 2, "the step is as it was"


def test_prices_and_energy():
    """Of all devices, for a million; what is not stated is not made up."""
    prices = {"currency": "EUR", "h100": {"per_hour": 2.0, "watts": 700}, "toy": {"per_hour": 0.01}}
    found = autopar.compare(
        train_step, arguments(), ["4xh100", cluster(2), "2 l4"], ["ddp"], prices=prices, sort="price"
    )
    toy, h100, l4 = sorted(found.rows, key=lambda row: ["2 toy", "4xh100", "2 l4"].index(row.cluster))
    assert h100.price_per_million == pytest.approx(4 * 2.0 / 3600 * h100.step_seconds / ROWS * 1e6)
    assert h100.kwh_per_million == pytest.approx(4 * 0.7 / 3600 * h100.step_seconds / ROWS * 1e6)
    assert toy.price_per_million is not None and toy.kwh_per_million is None
    assert l4.price_per_million is None and found.rows[-1] is l4, "without a price it comes last"
    assert "EUR per million" in str(found) and "EUR" not in str(autopar.compare(train_step, arguments(), [cluster(2)]))
    both = autopar.compare(train_step, arguments(), ["4 h100 + 4 l4"], ["ddp"], prices=prices).rows[0]
    assert both.price_per_million is None, "a part of the cluster has none"


def test_a_page(tmp_path):
    """Bars of what a step consists of, and the same figures; no file is loaded."""
    found = autopar.compare(train_step, arguments(), [cluster(2), cluster(4)], ["ddp", PipelineParallel(num_stages=9)])
    page = found.save_html(tmp_path / "page.html").read_text()
    assert found._repr_html_() in page and page.startswith("<!DOCTYPE html>")
    for row in found.rows[:2]:
        assert f"{row.cluster}, {row.method}" in page and f'<td class="number">{row.rate:,.0f}</td>' in page
    assert page.count("<rect") == 4, "kernels and exposed communication, of two plans"
    assert "no plan" in page and found.rows[2].problem.split("'")[0] in page


def test_tokens():
    def step(w, batch):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean(w[batch["ids"]] ** 2))(w)
        return w - grad, loss

    types = jax.ShapeDtypeStruct((128, WIDTH), "float32"), {"ids": jax.ShapeDtypeStruct((ROWS, 16), "int32")}
    row = autopar.compare(step, types, [cluster(2)], ["ddp"]).rows[0]
    assert (row.amount, row.unit) == (ROWS * 16, "tokens")


def test_what_has_no_plan_says_why():
    small = cluster(2, memory_bytes=2000.0)
    found = autopar.compare(
        train_step, arguments(), [small, cluster(2)], [ShardParallel(), PipelineParallel(num_stages=9)]
    )
    text = str(found)
    assert found.rows[0].plan is not None and [row.plan for row in found.rows[1:]] == [None] * 3
    assert text.count("no plan") == 3 and "2 toy, ShardParallel(): " in text
    assert "9" in next(row.problem for row in found.rows if "Pipeline" in row.method)


def test_the_peak_is_that_of_the_dtype():
    rates = {"bfloat16": 4e9, "float32": 1e9}
    machine = cluster(2, rates)
    for dtype, rate in rates.items():
        program = autopar.parallelize(train_step).program(*arguments(dtype))
        assert least_seconds(program, machine) == pytest.approx(2 * 2 * ROWS * WIDTH * WIDTH / (2 * rate))

    def scanned(w, batch):
        x, _ = jax.lax.scan(lambda x, w: (x @ w, None), batch["x"], w)
        return w, x.mean()

    types = jax.ShapeDtypeStruct((3, WIDTH, WIDTH), "float32"), arguments()[1]
    program = autopar.parallelize(scanned).program(*types)
    assert least_seconds(program, machine) == pytest.approx(3 * 2 * ROWS * WIDTH * WIDTH / 2e9), "each trip counts"


def test_mistakes(tmp_path):
    (tmp_path / "bad.toml").write_text("h100 = ")
    for kind, words, options in (
        (ClusterError, "nothing to compare", {"clusters": []}),
        (ClusterError, "unreadable cluster", {"clusters": ["four"]}),
        (AutoparError, "unknown method", {"methods": ["fancy"]}),
        (AutoparError, "no such `sort`", {"sort": "beauty"}),
        (AutoparError, "No such file", {"prices": tmp_path / "none.toml"}),
        (AutoparError, "prices cannot be read", {"prices": tmp_path / "bad.toml"}),
        (AutoparError, "per_hour = '2'", {"prices": {"h100": {"per_hour": "2"}}}),
        (AutoparError, "`per_hour` and `watts`", {"prices": {"h100": 2.0}}),
    ):
        with pytest.raises(kind, match="do:"):
            try:
                autopar.compare(train_step, arguments(), **{"clusters": [cluster(2)], "methods": ["ddp"], **options})
            except AutoparError as error:
                assert words.strip("'") in str(error) or words in str(error)
                raise


# Names that people use.


@pytest.mark.parametrize(
    "text, method",
    [
        ("fsdp", DataParallel(zero=3)),
        ("ZeRO-3", DataParallel(zero=3)),
        ("zero_2", DataParallel(zero=2)),
        ("DDP", DataParallel()),
        ("auto", autopar.Auto()),
        ("DataParallel", DataParallel()),
        (
            "PipelineParallel(num_stages=4, submeshes=(1, 1, 2, 4))",
            PipelineParallel(num_stages=4, submeshes=(1, 1, 2, 4)),
        ),
        ("autopar.ThreeD(2, tensor=2)", autopar.ThreeD(2, 2)),
    ],
)
def test_method_names(text, method):
    assert method_of(text) == method
    assert autopar.parallelize(train_step, method=text).method == method


@pytest.mark.parametrize(
    "text, part",
    [
        ("zero", "did you mean zero1, zero2 or zero3"),
        ("fsdpp", "did you mean fsdp"),
        ("fspd", "did you mean fsdp"),
        ("pipeline", "did you mean PipelineParallel(num_stages=...)"),
        ("PipelineParalel", "did you mean PipelineParallel(...)"),
        ("megatron", "did you mean ThreeD(data=..., tensor=..., pipeline=...)"),
        ("DataParallel(zero=9)", "no such stage"),
        ("DataParallel(stage=3)", "unexpected keyword argument 'stage'"),
        ("DataParallel(zero=three())", "neither a number nor a text"),
        ("__import__('os')", "unknown method"),
        ("???", "Names are auto"),
    ],
)
def test_what_is_no_method(text, part):
    with pytest.raises(AutoparError) as caught:
        method_of(text)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    "text, hosts, devices, name",
    [
        ("8xh100", 1, 8, "H100"),
        ("8h100", 1, 8, "H100"),
        ("8x8h100", 8, 8, "H100"),
        ("2 * 8 h100", 2, 8, "H100"),
        ("v5p-64", 8, 4, "TPU v5p"),
        ("v5p-8", 1, 4, "TPU v5p"),
        ("tpu v4-16", 2, 4, "TPU v4"),
        ("v5litepod-16", 2, 8, "TPU v5e"),
        ("v5e-4", 1, 4, "TPU v5e"),
        ("v6e-256", 32, 8, "TPU v6e"),
        ("4 v100-32", 1, 4, "V100-32GB"),
        ("2x4 tpu-v5p", 2, 4, "TPU v5p"),
    ],
)
def test_cluster_names(text, hosts, devices, name):
    found = Cluster.of(text)
    assert (found.hosts, found.devices_per_host, found.device.name) == (hosts, devices, name)


@pytest.mark.parametrize(
    "text, part",
    [
        ("h100", 'did you mean "8 h100"?'),
        ("h100 x 4", 'did you mean "4 h100"?'),
        ("h100:2", 'did you mean "2 h100"?'),
        ("v5p-3", "1.5 chips, and hosts have 4 each"),
        ("v5p-26", "13 chips, and hosts have 4 each"),
        ("v9-8", "no such device"),
    ],
)
def test_what_is_no_cluster(text, part):
    with pytest.raises(ClusterError) as caught:
        Cluster.of(text)
    assert part in str(caught.value)


def test_arrays_do_as_arguments():
    arrays = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), arguments())
    assert autopar.compare(train_step, arrays, [cluster(2)], ["ddp"]).rows[0].plan is not None


def test_a_step_that_computes_nothing():
    row = str(autopar.compare(lambda params: params, ({"w": jnp.eye(8)},), ["8 h100"], ["auto"])).splitlines()[-1]
    assert "0%" in row
