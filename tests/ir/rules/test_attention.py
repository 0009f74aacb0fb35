"""cuDNN's attention: its rule, held against the same function in plain JAX where there is no cuDNN."""

from __future__ import annotations

import functools
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.interpreters import mlir

import autopar
from autopar._jax import find_primitives, with_cudnn_of
from autopar.ir.rules import rule_for
from tests.ir.rules.harness import check_equation, check_equations, flat_eqns, gradient_of

NAMES = ("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper")


def in_plain_jax(q, k, v, bias, q_lengths, kv_lengths, *others, scale, mask_type, **_):
    """What the forward kernel computes: the result, and the logarithms of the softmax's denominators."""
    q_offsets, kv_offsets, k_pages, v_pages = others
    if k_pages.size:
        k, v = (x[pages[:, 0, :, 0]].reshape(len(q), -1, *x.shape[2:]) for x, pages in ((k, k_pages), (v, v_pages)))
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(each.astype(jnp.float32), groups, axis=2) for each in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q.astype(jnp.float32), k) * scale
    scores = scores + bias.astype(jnp.float32) if bias.size else scores
    seen = jnp.ones(scores.shape, bool)
    t, s = jnp.arange(scores.shape[2])[:, None], jnp.arange(scores.shape[3])
    if "CAUSAL" in mask_type.name:
        seen &= s <= t
    if q_offsets.size:
        begins = ((q_offsets, t[:, 0]), (kv_offsets, s))
        q_of, kv_of = ((each[:, None, 1:] <= at[:, None]).sum(-1) for each, at in begins)
        seen &= (q_of[:, :, None] == kv_of[:, None, :])[:, None]
    elif kv_lengths.size:
        seen &= s < kv_lengths[:, None, None, None]
    scores = jnp.where(seen, scores, -1e9)
    out = jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores), v)
    kept = jax.nn.logsumexp(scores, axis=-1)
    return out.astype(q.dtype), jnp.repeat(kept, q_offsets.shape[1] - 1, axis=0) if q_offsets.size else kept


def forward(*operands, is_training, **params):
    return in_plain_jax(*operands, **params)[: 2 if is_training else 1]


def backward(q, k, v, bias, *others, **params):
    *lengths, _, _, gradient = others
    fun = lambda *arrays: in_plain_jax(*arrays, *lengths, **params)[0]  # noqa: E731
    return jax.vjp(fun, q, k, v, bias)[1](gradient)[: 4 if bias.size else 3]


@pytest.fixture(scope="module", autouse=True)
def on_cpu():
    """The primitives have no other meaning on a CPU."""
    for name, function in zip(NAMES, (forward, backward), strict=True):
        (primitive,) = find_primitives(name)
        mlir.register_lowering(primitive, mlir.lower_fun(functools.partial(function)), platform="cpu")


def attend(query, key, value, bias=None, lengths=None, is_causal=True, **options):
    options = {"is_causal": is_causal, "key_value_seq_lengths": lengths, "implementation": "cudnn", **options}
    return jax.nn.dot_product_attention(query, key, value, bias, **options)


def kernels(heads, key_heads, *others, **options):
    shapes = (8, 16, heads, 8), (8, 16, key_heads, 8), (8, 16, key_heads, 8)
    arrays = [jnp.ones(shape, jnp.float16) for shape in shapes]
    return flat_kernels(gradient_of(functools.partial(attend, **options)), *arrays, *others)


def flat_kernels(fun, *arrays):
    with with_cudnn_of((9, 10)):
        return [eqn for eqn in flat_eqns(fun, *arrays) if eqn.primitive.name in NAMES]


def bias_of(*shape):
    return jnp.ones((*shape, 16, 16), jnp.float16)


@pytest.mark.parametrize(
    "heads, key_heads, others, splits",
    [
        (4, 4, (), ["b n", "b n"]),
        (8, 4, (), ["b n", "b n"]),
        (4, 1, (), ["b g", "b g"]),
        (4, 4, (bias_of(8, 4),), ["b n", "b n"]),
        (4, 4, (bias_of(1, 4),), ["b n", "b n"]),
        (4, 4, (bias_of(8, 1),), ["b n", "b n"]),
    ],
)
def test_splits_by_batch_and_heads(heads, key_heads, others, splits):
    both = kernels(heads, key_heads, *others)
    assert [" ".join(rule_for(eqn).splittable()) for eqn in both] == splits
    assert check_equations(both, limit=5) >= 4


SEVEN = jnp.full((8,), 7, jnp.int32)


@pytest.mark.parametrize(
    "options",
    [
        {"lengths": SEVEN, "is_causal": False},
        {"lengths": SEVEN, "query_seq_lengths": SEVEN},
        {"local_window_size": (4, 0)},
        {"mask": jnp.ones((8, 1, 16, 16), bool)},
    ],
)
def test_variants_split_by_batch_and_heads_too(options):
    """Lengths are of each sample, and so may masks be."""
    both = kernels(8, 4, **options)
    assert [" ".join(rule_for(eqn).splittable()) for eqn in both] == ["b n", "b n"]


TWO = jnp.tile(jnp.array([[7, 9]], jnp.int32), (8, 1))
BEGINS = jnp.tile(jnp.array([[0, 7, 16]], jnp.int32), (8, 1))


def test_packed_sequences_are_split_by_heads():
    """What the forward kernel keeps is of all sequences in a row, whichever sample they are in: samples stay together."""
    packed = {"q_seqlen": TWO, "kv_seqlen": TWO, "q_offsets": BEGINS, "kv_offsets": BEGINS}
    fun = gradient_of(lambda *qkv: cudnn.dot_product_attention(*qkv, mask_type=cudnn.MaskType.PADDING, **packed))
    shapes = (8, 16, 8, 8), (8, 16, 4, 8), (8, 16, 4, 8)
    both = flat_kernels(fun, *(jnp.ones(shape, jnp.float16) for shape in shapes))
    assert [" ".join(rule_for(eqn).splittable()) for eqn in both] == ["n", "n"]
    for eqn in both:
        assert check_equation(eqn, limit=5) > 1


def test_keys_in_pages_are_split_by_samples_and_heads():
    """Of 24 pages with 4 positions each sample reads 3, wherever they lie."""
    pages = jnp.asarray(np.random.default_rng(0).permutation(24).reshape(8, 1, 3, 1), jnp.int32)
    lengths = jnp.full((8,), 12, jnp.int32)
    fun = lambda q, k, v: cudnn.paged_attention(q, k, v, lengths, lengths, pages, pages)  # noqa: E731
    shapes = (8, 12, 4, 8), (24, 4, 4, 8), (24, 4, 4, 8)
    (eqn,) = flat_kernels(fun, *(jnp.ones(shape, jnp.float16) for shape in shapes))
    assert " ".join(rule_for(eqn).splittable()) == "b n"
    assert rule_for(eqn).flops == 2 * 2 * 8 * 4 * 12 * 12 * 8
    assert check_equation(eqn, limit=5) > 1


def test_dropout_stays_whole():
    """Which scores it drops follows from their place in the whole array: said, with the reason."""
    shapes = [(8, 16, 4, 8)] * 3
    dropping = functools.partial(cudnn.dot_product_attention, dropout_rate=0.1, seed=42)
    both = flat_kernels(gradient_of(dropping), *(jnp.ones(shape, jnp.float16) for shape in shapes))
    for eqn in both:
        with pytest.warns(
            UserWarning,
            match="computed whole .*dropout counts heads from the first of the whole batch.*`jax.random` behind it",
        ):
            assert not rule_for(eqn).splittable()
    assert len(both) == 2


def test_gradients_are_sums_over_what_they_lack():
    assert rule_for(kernels(4, 1)[1]).summed == ("g",)
    assert rule_for(kernels(4, 4, bias_of(1, 4))[1]).summed == ("b",)


def test_flops():
    """Two products, half of them masked; five in the backward pass."""
    first, second = (rule_for(eqn).flops for eqn in kernels(4, 4))
    assert first == 2 * 2 * 8 * 4 * 16 * 16 * 8 / 2 and second == 2.5 * first


def step(w, x):
    def loss(w):
        q, k, v = jnp.einsum("btd,kdnh->kbtnh", x, w).astype(jnp.bfloat16)
        return jnp.mean(attend(q, k, v).astype(jnp.float32) ** 2)

    value, gradient = jax.value_and_grad(loss)(w)
    return w - gradient, value


def test_planned_for_a_machine_that_has_cudnn():
    """This one has not. Trained in data parallel with microbatches, and split by batch and heads."""
    types = jax.ShapeDtypeStruct((3, 64, 8, 64), np.float32), jax.ShapeDtypeStruct((16, 128, 64), np.float32)
    cluster = autopar.Cluster.of("1x8 h100")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is computed whole
        autopar.parallelize(step, cluster=cluster, method=autopar.DataParallel(num_microbatches=2)).plan(*types)
        pinned = {"w": jax.sharding.PartitionSpec(None, None, "y")}
        method = autopar.ShardParallel(mesh_shape=(2, 4), constraints=pinned)
        plan = autopar.parallelize(step, cluster=cluster, method=method).plan(*types)
    assert {each.kind for each in plan.cost.collectives} == {"all-reduce"}


def test_traced_where_the_plugin_is_but_not_cudnn(monkeypatch):
    """As with `pip install 'autopar[verify]'`: JAX's plugin looks for NVIDIA's library, and does not find it."""

    def not_found():
        raise RuntimeError("cuDNN not found.")

    versions = SimpleNamespace(cudnn_get_version=not_found)
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.cuda_versions", versions)
    with with_cudnn_of((9, 0)):
        query = jnp.ones((1, 128, 1, 64), jnp.bfloat16)
        assert jax.make_jaxpr(attend)(query, query, query).eqns


def test_without_cudnn_and_without_such_a_machine():
    """JAX says so itself."""
    w, x = np.ones((3, 8, 2, 8), np.float32), np.ones((4, 16, 8), np.float32)
    with pytest.raises(RuntimeError, match="cuDNN is not detected"):
        autopar.parallelize(step, cluster=autopar.Cluster.local(jax.devices()[:2])).plan(w, x)
