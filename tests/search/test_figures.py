"""What a plan counts beside its seconds: multiplications needed and done, bytes by level, energy and price."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import Cluster, DataParallel, Device, Link, ThreeD
from autopar.cost.collectives import sent_bytes
from autopar.mesh import LogicalMesh

ROWS, WIDTH, LAYERS = 64, 32, 4
PRODUCT = 2 * ROWS * WIDTH * WIDTH
MACHINE = Cluster(
    2,
    2,
    Device("toy", 1e9, memory_bytes_per_second=1e9, watts=100.0),
    Link(1e-6, 1e9),
    Link(1e-5, 1e8),
    price_per_hour=0.5,
)


def step_of(layer):
    def step(w, batch):
        def loss_of(w):
            return jnp.mean(jax.lax.scan(lambda x, w: (layer(x, w), None), batch["x"], w)[0] ** 2)

        loss, grads = jax.value_and_grad(loss_of)(w)
        return w - 0.1 * grads, loss

    return step


def layer(x, w):
    return jnp.tanh(x @ w)


def plan_of(fun, method=None, cluster=MACHINE):
    types = (
        jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), "float32"),
        {"x": jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")},
    )
    return autopar.parallelize(fun, cluster=cluster, method=method or DataParallel()).plan(*types)


def test_what_is_computed_again_is_no_use_but_work():
    plain, again = plan_of(step_of(layer)), plan_of(step_of(jax.checkpoint(layer)))
    # Forward, and backward to the weights and to what goes in.
    assert plain.cost.figures.model_seconds == pytest.approx(3 * LAYERS * PRODUCT / 4e9)
    assert plain.cost.figures.hardware_seconds == plain.cost.figures.model_seconds
    assert again.cost.figures.model_seconds == pytest.approx(plain.cost.figures.model_seconds)
    assert again.cost.figures.hardware_seconds == pytest.approx(4 * LAYERS * PRODUCT / 4e9)
    assert again.cost.mfu == pytest.approx(again.cost.figures.model_seconds / again.cost.step_seconds)
    assert again.cost.hfu == pytest.approx(4 / 3 * again.cost.mfu)
    assert f"MFU {again.cost.mfu:.0%}" in str(again) and "with what is computed again" in str(again)


def test_microbatches_and_stages_do_the_same_work():
    one = plan_of(step_of(layer)).cost.figures
    for method in (
        autopar.ShardParallel(num_microbatches=4),
        ThreeD(data=2, tensor=1, pipeline=2, num_microbatches=4),
    ):
        found = plan_of(step_of(layer), method).cost.figures
        assert found.model_seconds == pytest.approx(one.model_seconds)
        assert found.hardware_seconds == pytest.approx(one.model_seconds)
        assert (found.amount, found.unit) == (ROWS, "samples")


def test_rate_energy_and_price():
    cost = plan_of(step_of(layer)).cost
    assert cost.rate == pytest.approx(ROWS / cost.step_seconds)
    assert cost.joules == pytest.approx(400 * cost.step_seconds)
    assert cost.price == pytest.approx(2.0 * cost.step_seconds / 3600)
    silent = dataclasses.replace(MACHINE, device=dataclasses.replace(MACHINE.device, watts=None), price_per_hour=None)
    unknown = plan_of(step_of(layer), cluster=silent).cost
    assert unknown.joules is None and unknown.price is None
    assert unknown.step_seconds == cost.step_seconds and silent == MACHINE, "nothing is decided by them"


def test_bytes_by_level():
    method = autopar.ShardParallel(mesh_shape=(2, 2), constraints={"w": jax.sharding.PartitionSpec()})
    plan = plan_of(step_of(layer), method)
    sent = dict(plan.cost.figures.link_bytes)
    assert len(plan.cost.collectives) >= 1 and len(sent) == 2
    expected = {"within a host": 0.0, "between hosts": 0.0}
    for c in plan.cost.collectives:
        for axis, size in sent_bytes(c.kind, c.bytes, c.axes, plan.mesh):
            expected["within a host" if axis == "y" else "between hosts"] += c.times * size
    assert sent == {level: round(size) for level, size in expected.items() if size}


def test_stages_send_between_hosts():
    plan = plan_of(step_of(layer), ThreeD(data=2, tensor=1, pipeline=2, num_microbatches=4))
    crossing = sum(c.bytes for c in plan.profile.crossings)
    assert crossing and dict(plan.cost.figures.link_bytes)["between hosts"] == round(crossing / 4)


@pytest.mark.parametrize(
    "kind, axes, sent",
    [
        ("all-reduce", ("x",), {"x": 2 * 800 / 2}),
        ("all-reduce", ("x", "y"), {"y": 2 * 800 * 3 / 4, "x": 2 * 200 / 2}),
        ("all-gather", ("x", "y"), {"y": 800 * 3 / 4, "x": 200 / 2}),
        ("reduce-scatter", ("y",), {"y": 800 * 3 / 4}),
        ("all-to-all", ("y",), {"y": 800 * 3 / 4}),
        ("collective-permute", ("x",), {"x": 800}),
    ],
)
def test_sent_bytes(kind, axes, sent):
    assert dict(sent_bytes(kind, 800, axes, LogicalMesh((2, 4)))) == sent


def test_figures_are_saved(tmp_path):
    plan = plan_of(step_of(layer))
    plan.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json").cost.figures == plan.cost.figures


def test_bytes_between_pods():
    machine = dataclasses.replace(MACHINE, hosts_per_pod=1, across=MACHINE.inter)
    method = autopar.ShardParallel(mesh_shape=(2, 2), constraints={"w": jax.sharding.PartitionSpec()})
    levels = [name for name, _ in plan_of(step_of(layer), method, machine).cost.figures.link_bytes]
    assert levels == ["within a host", "between pods"]
