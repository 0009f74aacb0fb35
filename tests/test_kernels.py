"""A train step with flash attention as a Pallas kernel, interpreted: under every method it equals plain `jax.jit`."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.gpu import attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import PartitionSpec

import autopar
from autopar._jax import all_equations
from tests.sweep import check_faithful

SIZES = "block_q block_k block_q_dkv block_kv_dkv block_q_dq block_kv_dq".split()
BLOCKS = attention.BlockSizes(**dict.fromkeys(SIZES, 16))
attend = functools.partial(attention.mha, segment_ids=None, causal=True, block_sizes=BLOCKS, interpret=True)
WIDTH, HEADS, LENGTH, BATCH = 16, 4, 32, 8


def layer(x, params):
    q, k, v = jnp.einsum("bsd,ndhe->nbshe", x, params["qkv"])
    x = x + jnp.einsum("bshe,hed->bsd", attend(q, k, v), params["out"])
    return x + jnp.tanh(x @ params["up"])


def unrolled(params, x):
    for each in range(len(params["up"])):
        x = layer(x, jax.tree.map(lambda leaf, each=each: leaf[each], params))
    return x


def scanned(params, x):
    return jax.lax.scan(lambda x, each: (layer(x, each), None), x, params)[0]


def make_step(model):
    def step(params, batch):
        loss, gradients = jax.value_and_grad(lambda p: jnp.mean((model(p, batch["x"]) - batch["y"]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    return step


def arguments(num_layers):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return np.float32(rng.normal(size=shape) * 0.2)

    layers = {
        "qkv": draw(num_layers, 3, WIDTH, HEADS, 16),
        "out": draw(num_layers, HEADS, 16, WIDTH),
        "up": draw(num_layers, WIDTH, WIDTH),
    }
    return layers, {"x": draw(BATCH, LENGTH, WIDTH), "y": draw(BATCH, LENGTH, WIDTH)}


BY_HEADS = {"params/out": PartitionSpec(None, "y"), "params/qkv": PartitionSpec(None, None, None, "y")}
METHODS = {
    "auto": (autopar.Auto(), unrolled, 1),
    "zero 3": (autopar.DataParallel(zero=3), unrolled, 1),
    "two axes": (autopar.ShardParallel(mesh_shape=(2, 4), constraints=BY_HEADS), unrolled, 1),
    "microbatches": (autopar.ShardParallel(mesh_shape=(2, 2), num_microbatches=2), scanned, 2),
    "pipeline": (autopar.PipelineParallel(num_stages=2, num_microbatches=2), scanned, 2),
}


@pytest.mark.parametrize("name", METHODS)
def test_flash_attention(name):
    method, model, num_layers = METHODS[name]
    step, args = make_step(model), arguments(num_layers)
    devices = jax.devices()[: 4 if num_layers > 1 else 8]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is computed whole
        parallel = autopar.parallelize(step, cluster=autopar.Cluster.local(devices), method=method)
        results = parallel(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), results, jax.jit(step)(*args))


def test_heads_are_split_where_the_batch_cannot_be():
    """One long sample on eight devices: Megatron's attention, one sum of what the heads contribute."""

    def step(params, batch):
        def loss(params):
            q, k, v = jnp.einsum("bsd,ndhe->nbshe", batch["x"], params["qkv"])
            heads = attention.mha(q, k, v, segment_ids=None, causal=True)
            out = jnp.einsum("bshe,hed->bsd", heads, params["out"])
            return jnp.mean((out - batch["y"]).astype(jnp.float32) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(jnp.subtract, params, gradients), value

    def of(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    params = {"qkv": of(3, 4096, 32, 128), "out": of(32, 128, 4096)}
    batch = {"x": of(1, 2048, 4096), "y": of(1, 2048, 4096)}
    cluster, method = autopar.Cluster.of("1x8 h100"), autopar.ShardParallel(mesh_shape=(8,))
    plan = autopar.parallelize(step, cluster=cluster, method=method).plan(params, batch)
    specs = plan.shardings[0][0]
    assert specs == {"qkv": PartitionSpec(None, None, "x", None), "out": PartitionSpec("x", None, None)}
    assert [(each.kind, each.bytes) for each in plan.cost.collectives] == [("all-reduce", 2048 * 4096 * 2)]


def splash(q, k, v):
    """Attention for TPUs, whose heads of queries share heads of keys."""
    masks = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((128, 128))] * HEADS)
    kernel = splash_attention_kernel.make_splash_mha_single_device(masks, interpret=True)
    return jax.vmap(kernel)(*(x.swapaxes(1, 2) for x in (q, k, v))).swapaxes(1, 2)


def test_splash_attention_with_shared_keys():
    """In layers that run again, in stages and microbatches: of each stage both devices have heads of all samples."""

    def block(x, params):
        q, k, v = jnp.split(jnp.einsum("bsd,dhe->bshe", x, params["qkv"]), [HEADS, HEADS + 2], axis=2)
        return x + jnp.einsum("bshe,hed->bsd", splash(q, k, v), params["out"]), None

    step = make_step(lambda params, x: jax.lax.scan(jax.checkpoint(block), x, params)[0])
    rng = np.random.default_rng(0)
    params = {"qkv": (2, WIDTH, HEADS + 4, 16), "out": (2, HEADS, 16, WIDTH)}
    params = {name: np.float32(rng.normal(size=shape) * 0.2) for name, shape in params.items()}
    batch = {name: np.float32(rng.normal(size=(2, 128, WIDTH)) * 0.2) for name in "xy"}
    method = autopar.ThreeD(data=1, tensor=2, pipeline=2, num_microbatches=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the Pallas kernel")
        parallel = autopar.parallelize(step, cluster=autopar.Cluster.local(jax.devices()[:4]), method=method)
        compiled = parallel.compile(params, batch)
    kernels = [
        eqn.outvars[-1].aval.shape
        for function in compiled.functions.values()
        for eqn in all_equations(
            jax.make_jaxpr(function.code)(*(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in function.inputs)).jaxpr
        )
        if eqn.primitive.name == "pallas_call"
    ]
    assert {heads for _, heads, *_ in kernels} == {HEADS // 2, 1}  # of queries, of keys
    results = parallel(params, batch)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), results, jax.jit(step)(params, batch)
    )


NUM_EXPERTS = 4


def experts(x, pick, up, down):
    """Each row goes through the expert that it picked, however many pick the same: sorted, multiplied in groups, put back."""
    order, sizes = jnp.argsort(pick), jnp.bincount(pick, length=len(up)).astype(jnp.int32)
    hidden = jnp.tanh(jax.lax.ragged_dot(x[order], up, sizes))
    return jnp.zeros_like(x).at[order].set(jax.lax.ragged_dot(hidden, down, sizes))


def experts_backward(x, pick, up, down, gradient):
    return jax.vjp(lambda x, up, down: experts(x, pick, up, down), x, up, down)[1](gradient)


by_rows = jax.custom_vjp(autopar.sharding_rule("t d, t, e d f, e f d -> t d")(experts))
by_rows_backward = autopar.sharding_rule("t d, t, e d f, e f d, t d -> t d, e d f, e f d {sum t}")(experts_backward)


def keep(*arguments):
    return by_rows(*arguments), arguments


def backward(kept, gradient):
    x, up, down = by_rows_backward(*kept, gradient)
    return x, None, up, down


by_rows.defvjp(keep, backward)


def routed(params, x, mixed=by_rows):
    for k in range(len(params["up"])):
        rows = x.reshape(-1, WIDTH)
        gates = jax.nn.softmax(rows @ params["router"][k])
        out = mixed(rows, gates.argmax(-1), params["up"][k], params["down"][k]) * gates.max(-1, keepdims=True)
        x = x + out.reshape(x.shape)
    return x


MICROBATCHES = autopar.ShardParallel(mesh_shape=(4,), num_microbatches=2)
STAGES = autopar.ThreeD(data=2, pipeline=2, num_microbatches=2)
SAMPLES = autopar.DataParallel(zero=3)


@pytest.mark.parametrize(
    "method, mixed",
    [(MICROBATCHES, experts), (STAGES, by_rows), (SAMPLES, by_rows), (SAMPLES, experts)],
    ids=["microbatches", "stages", "samples, one operation", "samples"],
)
def test_experts_without_capacity(method, mixed):
    """Rows that are sorted in the model, of which each is by itself: as one operation, or as they stand."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return np.float32(rng.normal(size=shape) * 0.3)

    params = {
        "router": draw(2, WIDTH, NUM_EXPERTS),
        "up": draw(2, NUM_EXPERTS, WIDTH, 8),
        "down": draw(2, NUM_EXPERTS, 8, WIDTH),
    }
    args = params, {"x": draw(BATCH, 4, WIDTH), "y": draw(BATCH, 4, WIDTH)}
    model = functools.partial(routed, mixed=mixed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cluster = autopar.Cluster.local(jax.devices()[:4])
        results = autopar.parallelize(make_step(model), cluster=cluster, method=method)(*args)
    plain = make_step(functools.partial(routed, mixed=experts))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), results, jax.jit(plain)(*args))


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_devices_sort_their_own_rows(num_microbatches):
    """Of a model whose experts lie on every device nothing but gradients, and the loss, is communicated; before microbatches
    the batch, so that each device has parts of each."""

    def of(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {
        "router": of(2, WIDTH, NUM_EXPERTS),
        "up": of(2, NUM_EXPERTS, WIDTH, 8),
        "down": of(2, NUM_EXPERTS, 8, WIDTH),
    }
    step = autopar.parallelize(
        make_step(functools.partial(routed, mixed=experts)),
        cluster=autopar.Cluster.of("4 h100"),
        method=autopar.DataParallel(num_microbatches=num_microbatches),
    )
    plan = step.plan(params, {name: of(BATCH, 4, WIDTH) for name in ("x", "y")})
    weights = sum(leaf.size for leaf in params.values())
    once = [each for each in plan.cost.collectives if "reshape at unknown line" not in each.operation]
    assert {(each.kind, each.times) for each in once} == {("all-reduce", 1)}
    assert sum(each.bytes for each in once) == 4 * (weights + 1)


BY_EXPERTS = {"params/up": PartitionSpec(None, "x"), "params/down": PartitionSpec(None, "x")}


def test_rows_travel_to_experts():
    """Experts of which each device has some, over links so slow that neither they nor all rows are sent: only the rows that
    picked them, forward and backward. So it is planned, and that is the step; in numbers of rows that are far from equal."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return np.float32(rng.normal(size=shape) * 0.3)

    params = {"router": draw(2, WIDTH, 8), "up": draw(2, 8, WIDTH, 32), "down": draw(2, 8, 32, WIDTH)}
    args = params, {"x": draw(BATCH, 8, WIDTH) + 0.5, "y": draw(BATCH, 8, WIDTH)}
    step, device = make_step(functools.partial(routed, mixed=experts)), autopar.Cluster.of("4 h100").device
    link = autopar.Link(1e-9, 1e8)
    cluster = autopar.Cluster.local(jax.devices()[:4], device=device, intra=link, inter=link)
    method = autopar.ShardParallel(mesh_shape=(4,), constraints=BY_EXPERTS)
    parallel = autopar.parallelize(step, cluster=cluster, method=method)
    compiled = parallel.compile(*args)
    check_faithful(compiled)
    sent = [c for c in compiled.plan.cost.collectives if c.kind == "ragged-all-to-all"]
    # Of two layers' two products: what enters and what is made, and of the gradients of both operands; none of the batch.
    assert sum(c.times for c in sent) == 2 * 2 * (2 + 2 + 2) - 2
    assert {c.bytes for c in sent} == {BATCH * 8 // 4 * width * 4 for width in (WIDTH, 32)}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), compiled(*args), jax.jit(step)(*args)
    )


def summed_up(x, pick, up, down):
    """Sizes of groups that are the last of running sums: nothing says that they count what rows are sorted by."""
    order = jnp.argsort(pick)
    sizes = jnp.cumsum(jax.nn.one_hot(pick, len(up)), 0)[-1].astype(jnp.int32)
    hidden = jnp.tanh(jax.lax.ragged_dot(x[order], up, sizes))
    return jnp.zeros_like(x).at[order].set(jax.lax.ragged_dot(hidden, down, sizes))


def test_sorted_rows_of_a_pipeline_are_refused_with_what_to_write():
    def of(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {"router": of(2, WIDTH, 2), "up": of(2, 2, WIDTH, 8), "down": of(2, 2, 8, WIDTH)}
    plain = make_step(functools.partial(routed, mixed=summed_up))
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=2)
    with pytest.raises(autopar.errors.MicrobatchError, match=r"each sample is by itself.*@autopar\.sharding_rule"):
        autopar.parallelize(plain, method=method).plan(params, {name: of(BATCH, 4, WIDTH) for name in ("x", "y")})
