"""Steps that train nothing: planned for the first answer or for the most calls, their cache where the decoder wants it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import AutoparError, ConstraintError
from autopar.streams.instructions import Free, Run, writes
from tests.sweep import QUICK, SLOW

LAYERS, HEADS, WIDTH, CONTEXT, TEXTS, VOCABULARY = 2, 4, 32, 16, 8, 64


def init():
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def dense(*shape):
        return jax.random.normal(next(keys), shape) * shape[-2] ** -0.5

    return {
        "embed": dense(VOCABULARY, WIDTH),
        "layers": {
            "qkv": dense(LAYERS, WIDTH, 3 * WIDTH),
            "proj": dense(LAYERS, WIDTH, WIDTH),
            "mlp": dense(LAYERS, WIDTH, WIDTH),
        },
    }


def forward(params, cache, tokens, start):
    visible = jnp.arange(CONTEXT) <= start + jnp.arange(tokens.shape[1])[:, None]

    def layer(x, inputs):
        weights, old = inputs
        q, k, v = (t.reshape(*t.shape[:2], HEADS, -1) for t in jnp.split(x @ weights["qkv"], 3, axis=-1))
        k = jax.lax.dynamic_update_slice_in_dim(old["k"], k, start, axis=1)
        v = jax.lax.dynamic_update_slice_in_dim(old["v"], v, start, axis=1)
        scores = jnp.where(visible, jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e9)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape) @ weights["proj"]
        return jnp.tanh(x @ weights["mlp"]), {"k": k, "v": v}

    x, cache = jax.lax.scan(layer, params["embed"][tokens], (params["layers"], cache))
    return (x[:, -1:] @ params["embed"].T).argmax(-1).astype(jnp.int32), cache


def empty():
    return dict.fromkeys("kv", jnp.zeros((LAYERS, TEXTS, CONTEXT, HEADS, WIDTH // HEADS)))


def prefill(params, tokens):
    return forward(params, empty(), tokens, 0)


def decode(params, cache, token, position):
    return forward(params, cache, token, position)


PROMPTS = np.random.default_rng(0).integers(0, VOCABULARY, (TEXTS, 6)).astype(np.int32)


def generate(prefill, decode, params):
    token, cache = prefill(params, PROMPTS)
    written = [np.asarray(token)]
    for position in range(6, 11):
        token, cache = decode(params, cache, token, np.int32(position))
        written.append(np.asarray(token))
    return np.concatenate(written, axis=1)


def parallel(method, devices=8):
    cluster = autopar.Cluster.local(jax.devices()[:devices], device=SLOW, intra=QUICK)
    return autopar.parallelize(decode, cluster=cluster, method=method, batch_argnums=(2,))


@pytest.mark.parametrize(
    "method",
    [
        autopar.Inference(),
        autopar.Inference(latency=False),
        autopar.Inference(constraints={"params/layers/qkv": jax.sharding.PartitionSpec(None, None, "x")}),
        autopar.PipelineParallel(num_stages=2, schedule="inference", num_microbatches=2),
    ],
    ids=["latency", "calls", "columns", "pipeline"],
)
def test_tokens_are_those_of_one_device(method):
    step = parallel(method)
    params = init()
    wanted = generate(jax.jit(prefill), jax.jit(decode), params)
    token, cache = jax.jit(prefill)(params, PROMPTS)
    first, _ = step(params, cache, token, np.int32(6))  # a decode step is planned; what fills its cache follows
    np.testing.assert_array_equal(first, wanted[:, 1:2])
    np.testing.assert_array_equal(generate(autopar.follow(prefill, step), step, params), wanted)


PIPELINE = autopar.PipelineParallel(num_stages=2, schedule="inference", num_microbatches=2)


def test_a_pipeline_takes_the_cache_over():
    """Of its part of it a stage has the old one, which no caller keeps, and the rows that microbatches write: no third."""
    params, (token, cache) = jax.eval_shape(init), jax.eval_shape(prefill, jax.eval_shape(init), PROMPTS)
    cache = {
        name: jax.ShapeDtypeStruct((LAYERS, TEXTS, 4096, *old.shape[3:]), old.dtype) for name, old in cache.items()
    }

    def step(params, cache, token, position):
        visible = jnp.arange(4096) <= position
        x = params["embed"][token][:, 0]

        def layer(x, inputs):
            weights, old = inputs
            q, k, v = (t.reshape(TEXTS, 1, HEADS, -1) for t in jnp.split(x @ weights["qkv"], 3, axis=-1))
            k = jax.lax.dynamic_update_slice_in_dim(old["k"], k, position, axis=1)
            v = jax.lax.dynamic_update_slice_in_dim(old["v"], v, position, axis=1)
            scores = jnp.where(visible, jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e9)
            x = x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape) @ weights["proj"]
            return x, {"k": k, "v": v}

        x, cache = jax.lax.scan(layer, x, (params["layers"], cache))
        return (x @ params["embed"].T).argmax(-1), cache

    cluster = autopar.Cluster.local(jax.devices()[:2], device=SLOW, intra=QUICK)
    parallel = autopar.parallelize(step, cluster=cluster, method=PIPELINE, batch_argnums=(2,))
    plan = parallel.plan(params, cache, token, jax.ShapeDtypeStruct((), jnp.int32))
    own = sum(old.size * old.dtype.itemsize for old in cache.values()) // 2
    streams = plan.attached.pipeline.streams
    at_once = {m: sum(streams.buffers[b].value.num_bytes for b in h) for m, h in most_held(streams).items()}
    assert all(held < 2.2 * own for held in at_once.values()), (at_once, own)


def most_held(streams):
    """For each mesh the buffers between two instructions that are the most bytes."""
    found = {}
    for mesh, stream in streams.instructions.items():
        held = {b for _, b in streams.arguments if streams.buffers[b].mesh == mesh}
        most = set(held)
        for instruction in stream:
            if isinstance(instruction, Run):
                held -= {instruction.inputs[k] for k in streams.overwritten[instruction.program]}
            held |= set(writes(instruction))
            most = max(most, set(held), key=lambda h: sum(streams.buffers[b].value.num_bytes for b in h))
            if isinstance(instruction, Free):
                held -= set(instruction.buffers)
        found[mesh] = most
    return found


def test_the_cache_is_born_where_the_decoder_wants_it():
    """Heads split, which a prefill by itself would not choose: its samples divide."""
    split = jax.sharding.PartitionSpec(None, None, None, "x")
    step = parallel(autopar.Inference(constraints={"cache/*": split}), devices=4)
    params, (token, cache) = init(), jax.eval_shape(prefill, jax.eval_shape(init), PROMPTS)
    compiled = step.compile(params, cache, token, np.int32(6))
    _, made = autopar.follow(prefill, step)(params, PROMPTS)
    wanted = compiled.in_shardings[0][1]["k"]
    assert made["k"].sharding.is_equivalent_to(wanted, 5) and wanted.spec[3] == "x"


def test_a_result_is_pinned_by_its_path():
    split = jax.sharding.PartitionSpec("x")
    pinned = autopar.parallelize(
        prefill,
        cluster=autopar.Cluster.of("4 h100"),
        method=autopar.Inference(constraints={"result/1/*": jax.sharding.PartitionSpec(None, None, None, "x")}),
    )
    assert "result/1/k" in str(pinned.plan(init(), PROMPTS))
    assert "[-, -, -, x, -]" in str(pinned.plan(init(), PROMPTS))
    wrong = autopar.parallelize(prefill, method=autopar.Inference(constraints={"result/9": split}))
    with pytest.raises(ConstraintError, match="names no result"):
        wrong.plan(init(), PROMPTS)


def wide(params, x):
    for weights in params:
        x = jnp.tanh(x @ weights)
    return x


def test_calls_per_second_and_the_first_answer_want_different_plans():
    """Slow links: split over all devices a call is answered soonest; in stages the next call begins while it drains."""
    cluster = autopar.Cluster(
        hosts=4,
        devices_per_host=1,
        device=SLOW,
        intra=QUICK,
        inter=autopar.Link(latency_seconds=1e-5, bytes_per_second=5e8),
    )
    params = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 8
    x = jax.ShapeDtypeStruct((1, 512), jnp.float32)

    def plan(latency):
        method = autopar.Inference(latency=latency)
        return autopar.parallelize(wide, cluster=cluster, method=method).plan(params, x)

    soonest, most = plan(True), plan(False)
    assert len(soonest.stages) == 1 and len(most.stages) == 4 and most.schedule == "inference"
    assert soonest.cost.step_seconds < most.cost.step_seconds
    assert most.interval_seconds < soonest.interval_seconds == soonest.cost.step_seconds
    assert "one every" in str(most)


def test_weights_of_eight_bits():
    def quantised(params, x):
        weights = params["bits"].astype(jnp.float32) * params["scale"]
        return jnp.tanh(x @ weights)

    params = {"bits": np.arange(-32, 32, dtype=np.int8).reshape(8, 8), "scale": np.full(8, 0.1, np.float32)}
    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    cluster = autopar.Cluster.local(jax.devices()[:4], device=SLOW, intra=QUICK)
    step = autopar.parallelize(quantised, cluster=cluster, method="inference", batch_argnums=(1,))
    np.testing.assert_allclose(step(params, x), jax.jit(quantised)(params, x), rtol=1e-5)


def test_latency_is_yes_or_no():
    with pytest.raises(AutoparError, match="`latency` is yes or no"):
        autopar.Inference(latency="low")


def test_parameters_of_a_checkpoint_go_where_inference_wants_them(tmp_path):
    params = init()
    autopar.checkpoint.save(tmp_path, {"params": params, "optimizer": (params, params)}).wait()
    step = parallel(autopar.Inference())
    token, cache = jax.eval_shape(prefill, params, PROMPTS)
    compiled = step.compile(params, cache, token, np.int32(6))
    types = jax.eval_shape(init)
    placed = autopar.checkpoint.restore(tmp_path, {"params": types}, compiled=compiled, partial=True)["params"]
    for leaf, sharding in zip(jax.tree.leaves(placed), jax.tree.leaves(compiled.in_shardings[0][0]), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    (first,) = autopar.checkpoint.restore(tmp_path, {"optimizer": (types,)}, partial=True)["optimizer"]
    jax.tree.map(np.testing.assert_array_equal, first, params)


@pytest.mark.filterwarnings("error:.*far from even")
@pytest.mark.parametrize("closed_over", [False, True])
def test_layers_of_a_step_without_state_are_cut_between_stages(closed_over):
    weights = jax.random.normal(jax.random.key(0), (4, WIDTH, WIDTH)) / 6
    x = jax.random.normal(jax.random.key(1), (TEXTS, WIDTH))

    def score(weights, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w),) * 2, x, weights)

    cluster = autopar.Cluster.local(jax.devices()[:2], device=SLOW, intra=QUICK)
    fn, arguments = (lambda x: score(weights, x), (x,)) if closed_over else (score, (weights, x))
    step = autopar.parallelize(fn, cluster=cluster, method=PIPELINE, batch_argnums=len(arguments) - 1)
    for got, wanted in zip(step(*arguments), jax.jit(score)(weights, x), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
    assert ("weights[2:4]" in str(step.plan(*arguments))) != closed_over
