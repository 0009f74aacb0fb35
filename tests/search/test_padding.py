"""Dims that do not divide are split with padding where that is faster; what the user sees has the user's lengths."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.search import padding, planner
from autopar.search.padding import padded_length
from autopar.tuning import TUNING
from tests.sweep import check_faithful
from tests.tuned import tune

VOCABULARY, WIDTH, HEADS, LENGTH = 61, 16, 2, 8
SLOW = autopar.Device("slow", peak_flops=1e7, memory_bytes=1e9, memory_bytes_per_second=1e9)


def cluster(bytes_per_second=1e9):
    link = autopar.Link(1e-7, bytes_per_second)
    return autopar.Cluster.local(jax.devices()[:8], device=SLOW, intra=link)


def norm(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def layer(p, x):
    q, k, v = ((norm(x) @ p[name]).reshape(*x.shape[:2], HEADS, -1) for name in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return x + jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape) @ p["o"]


def train_step(params, batch):
    """GPT-2 in small: tied embedding, a vocabulary that no number of devices divides."""

    def loss_fn(params):
        x = params["table"][batch["ids"]]
        for p in params["layers"]:
            x = layer(p, x)
        scores = jax.nn.log_softmax(norm(x) @ params["table"].T)
        return -jnp.take_along_axis(scores, batch["next"][..., None], -1).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def arguments(batch, num_layers, length=LENGTH, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    layers = [{name: rng.normal(size=(WIDTH, WIDTH), scale=0.2) for name in "qkvo"} for _ in range(num_layers)]
    params = {"table": rng.normal(size=(VOCABULARY, WIDTH)), "layers": layers}
    ids = rng.integers(0, VOCABULARY, (2, batch, length)).astype(np.int32)
    params = jax.tree.map(lambda a: jnp.asarray(a, dtype), params)
    return params, {"ids": jnp.asarray(ids[0]), "next": jnp.asarray(ids[1])}


@pytest.mark.parametrize(
    "length, num_devices, longer",
    [
        (50257, 8, 50264),
        (50257, 64, 50304),
        (197, 8, 200),
        (5, 4, 8),
        (5, 8, 8),
        (12, 8, 16),
        (3, 8, 4),
        (768, 8, 768),
        (9, 16, 12),
        (2, 8, 2),
        (1, 8, 1),
        (50257, 1, 50257),
    ],
)
def test_longer_length(length, num_devices, longer):
    assert padded_length(length, num_devices) == longer


def test_padded_where_that_is_faster(tmp_path):
    args = arguments(1, 0, length=7)
    step = autopar.parallelize(
        train_step, cluster=cluster(1e7), method=autopar.ShardParallel(mesh_shape=(8,)), donate_argnums=()
    )
    plan = step.plan(*args)
    assert (VOCABULARY, 64) in plan.padded
    assert "61 as 64" in str(plan)
    plan.save(tmp_path / "plan.json")
    compiled = step.compile(*args, plan=autopar.Plan.load(tmp_path / "plan.json"))
    check_faithful(compiled)
    wanted, got = args, args
    for _ in range(2):
        wanted, got = (jax.jit(train_step)(wanted[0], args[1]), compiled(got[0], args[1]))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)
    assert got[0]["table"].shape == (VOCABULARY, WIDTH)
    loss = autopar.follow(lambda params, batch: train_step(params, batch)[1], step)
    np.testing.assert_allclose(loss(got[0], args[1]), jax.jit(train_step)(wanted[0], args[1])[1], rtol=1e-5)
    check_read_by_another_plan(got[0], args, tmp_path / "checkpoint")


def check_read_by_another_plan(params, args, path):
    """Checkpoints hold the user's lengths, whatever was longer inside of the step."""
    checkpoint = pytest.importorskip("autopar.checkpoint")
    checkpoint.save(path, params, 0).wait()
    pins = {"params/table": jax.sharding.PartitionSpec(None, "y")}
    method = autopar.ShardParallel(mesh_shape=(2, 4), constraints=pins)
    other = autopar.parallelize(train_step, cluster=cluster(), method=method)
    other.compile(*args)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    restored = checkpoint.restore(path, like, compiled=other)
    assert restored["table"].shape == (VOCABULARY, WIDTH) and restored["table"].sharding.spec[1] == "y"
    jax.tree.map(np.testing.assert_array_equal, restored, params)


def test_the_longer_step_is_searched_where_the_step_as_it_is_was_good(monkeypatch):
    shown, narrowed, real = [], [], planner._planned

    def planned(request, report):
        narrowed.append(request.narrowed)
        found = real(request, report)
        shown.append(found[-1])
        return found

    monkeypatch.setattr(planner, "_planned", planned)
    step = autopar.parallelize(train_step, cluster=cluster(1e7), method=autopar.Auto(), donate_argnums=())
    assert step.plan(*arguments(1, 0, length=7)).padded
    assert len(shown) > 1 and shown[0].meshes and narrowed == [None, *shown[:-1]]


def test_not_where_the_batch_is_split():
    step = autopar.parallelize(train_step, cluster=cluster(), method=autopar.DataParallel())
    assert step.plan(*arguments(8, 1)).padded == ()


def test_not_where_next_to_nothing_is_won(monkeypatch):
    """Of a step of milliseconds no more can be won than is worth a thousandth of a step of planning."""
    tune(monkeypatch, padding, repaying_steps=1e-3)
    step = autopar.parallelize(train_step, cluster=cluster(1e7), method=autopar.ShardParallel(mesh_shape=(8,)))
    plan = step.plan(*arguments(1, 0, length=7))
    assert plan.padded == () and len(plan.cost.search.tried) == 1


METHODS = {
    "auto": autopar.Auto(),
    "zero3": autopar.DataParallel(zero=3),
    "three_d": autopar.ThreeD(data=2, tensor=2, pipeline=2, num_microbatches=2),
    "microbatches": autopar.ShardParallel(mesh_shape=(2, 4), num_microbatches=2),
}


def take_the_longer_step(monkeypatch):
    """Whether it is faster or not."""
    always = dataclasses.replace(TUNING, padding_looks=0.0, padding_gains=-np.inf)
    monkeypatch.setattr(padding, "planning_seconds", lambda problem: 0.0)
    for module in ("padding", "planner"):
        monkeypatch.setattr(f"autopar.search.{module}.TUNING", always)


@pytest.mark.parametrize("name", METHODS)
def test_gpt_with_an_odd_vocabulary(name, monkeypatch):
    """As the costs have it data parallelism is best; here the longer step is taken all the same, where there is one.

    In 64 bits, where nothing hides behind rounding.
    """
    take_the_longer_step(monkeypatch)
    with jax.enable_x64(True):
        args = arguments(8, 1, dtype=jnp.float64)
        step = autopar.parallelize(train_step, cluster=cluster(), method=METHODS[name], donate_argnums=())
        compiled = step.compile(*args)
        assert compiled.plan.padded == (() if name == "zero3" else ((VOCABULARY, 64),))
        check_faithful(compiled)
        got, wanted = compiled(*args), jax.jit(train_step)(*args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13), got, wanted)


PATCHES, ODD_HEADS, CLASSES = 196, 5, 10


def vit_step(params, batch):
    """A ViT: 196 patches and a class token, five heads."""

    def loss_fn(params):
        x = batch["patches"] @ params["embed"]
        token = jnp.broadcast_to(params["class"], (x.shape[0], 1, x.shape[-1]))
        x = jnp.concatenate([token, x], 1) + params["positions"]
        for p in params["layers"]:
            q, k, v = (jnp.einsum("btd,dhe->bthe", norm(x), p[name]) for name in "qkv")
            scores = jax.nn.softmax(jnp.einsum("bqhe,bkhe->bhqk", q, k))
            x = x + jnp.einsum("bhqk,bkhe,hed->bqd", scores, v, p["o"])
            x = x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]
        scores = jax.nn.log_softmax(norm(x)[:, 0] @ params["head"])
        return -jnp.take_along_axis(scores, batch["label"][:, None], -1).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def vit_arguments(batch, dtype=jnp.float32):
    rng, head, width = np.random.default_rng(0), 8, 40
    shapes = {name: (width, ODD_HEADS, head) for name in "qkv"} | {"o": (ODD_HEADS, head, width)}
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    layers = [{name: rng.normal(size=shape, scale=0.2) for name, shape in shapes.items()}]
    params = {"embed": (12, width), "class": (width,), "positions": (PATCHES + 1, width), "head": (width, CLASSES)}
    params = {name: rng.normal(size=shape, scale=0.3) for name, shape in params.items()} | {"layers": layers}
    params = jax.tree.map(lambda a: jnp.asarray(a, dtype), params)
    patches = jnp.asarray(rng.normal(size=(batch, PATCHES, 12)), dtype)
    return params, {"patches": patches, "label": jnp.asarray(rng.integers(0, CLASSES, batch), jnp.int32)}


def test_vit_of_197_tokens_and_five_heads():
    """Where links are slow, what each device has of its own heads and tokens saves more than longer dims cost."""
    args, method = vit_arguments(1), autopar.ShardParallel(mesh_shape=(4,))
    four = autopar.Cluster.local(jax.devices()[:4], device=SLOW, intra=autopar.Link(1e-7, 1e5))
    step = autopar.parallelize(vit_step, cluster=four, method=method, batch_argnums=(1,), donate_argnums=())
    compiled = step.compile(*args)
    assert compiled.plan.padded == ((ODD_HEADS, 8), (PATCHES + 1, 200))
    check_faithful(compiled)
    got, wanted = compiled(*args), jax.jit(vit_step)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)
    assert got[0]["positions"].shape == (PATCHES + 1, 40) and got[0]["layers"][0]["q"].shape == (40, ODD_HEADS, 8)
