"""JAX's attention kernels, in the variants that code uses: which dims their rules split."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.gpu import attention, paged_attention
from jax.experimental.pallas.ops.tpu import flash_attention
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention as paged_on_tpus
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention, ref_ragged_paged_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

from autopar import sharding_rule
from autopar.ir.rules import rule_for
from tests.ir.rules.harness import check_function, flat_eqns, gradient_of
from tests.ir.rules.test_pallas import BLOCKS


def test_attention_for_tpus_splits_by_batch_and_heads():
    """Its scratch is begun anew for each block of queries; the interpreter does not run it on several devices."""
    fun = gradient_of(functools.partial(flash_attention.flash_attention, causal=True))
    kernels = [eqn for eqn in flat_eqns(fun, *[(4, 2, 256, 128)] * 3) if eqn.primitive.name == "pallas_call"]
    assert len(kernels) == 3
    assert all([rule_for(eqn).sizes[f] for f in rule_for(eqn).splittable()] == [4, 2] for eqn in kernels)


@pytest.mark.parametrize("key_heads", [4, 2])
def test_splash_attention_splits_by_batch_and_heads_of_keys(key_heads):
    """What it keeps for the next step are results that nothing reads; each head begins them anew."""
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((256, 256))] * 4)
    kernel = splash_attention_kernel.make_splash_mha_single_device(mask, interpret=True)
    fun, keys = gradient_of(jax.vmap(kernel)), (8, key_heads, 256, 128)
    kernels = [eqn for eqn in flat_eqns(fun, (8, 4, 256, 128), keys, keys) if eqn.primitive.name == "pallas_call"]
    assert len(kernels) == 3
    assert all(sorted(rule_for(e).sizes[f] for f in rule_for(e).splittable()) == [key_heads, 8] for e in kernels)


def splash(mask, segments=False, **options):
    """Splash attention of 8 samples, 4 heads of queries, and its gradient."""
    kernel = splash_attention_kernel.make_splash_mha_single_device(
        splash_attention_mask.MultiHeadMask([mask] * 4), interpret=True, **options
    )
    ids = splash_attention_kernel.SegmentIds(*[jnp.zeros((8, 256), jnp.int32)] * 2) if segments else None
    return gradient_of(lambda q, k, v: jax.vmap(kernel)(q, k, v, ids))


WINDOW = splash_attention_mask.LocalMask((256, 256), (64, 0), 0)
CAUSAL = splash_attention_mask.CausalMask((256, 256))
HEADS = [(8, 4, 256, 128)] * 3
IDS = jnp.zeros((8, 256), jnp.int32)
SEGMENTS = flash_attention.SegmentIds(IDS, IDS)
PAGES = [(8, 4, 16), (2, 64, 16, 16), (2, 64, 16, 16)]
VARIANTS = {
    "splash, a window": (splash(WINDOW), HEADS, [[4, 8]] * 3),
    "splash, segments, capped logits": (splash(CAUSAL, segments=True, attn_logits_soft_cap=30.0), HEADS, [[4, 8]] * 3),
    "flash, segments": (
        gradient_of(lambda *qkv: flash_attention.flash_attention(*qkv, None, SEGMENTS, causal=True)),
        HEADS,
        [[4, 8]] * 3,
    ),
    "segments": (
        gradient_of(lambda *qkv: attention.mha(*qkv, IDS[:, :32], causal=True, block_sizes=BLOCKS, interpret=True)),
        [(8, 32, 2, 16)] * 3,
        [[2, 8], [2, 2, 8], [2, 8]],
    ),
    "decoding from pages, capped logits": (
        lambda *qkv: paged_attention.paged_attention(
            *qkv, jnp.zeros((8, 16), jnp.int32), IDS[:, 0], k_splits=4, attn_logits_soft_cap=30.0, interpret=True
        ),
        PAGES,
        [[2, 8]],
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_attention_split_by_batch_and_heads(name):
    fun, shapes, splits = VARIANTS[name]
    kernels = [eqn for eqn in flat_eqns(fun, *shapes) if eqn.primitive.name == "pallas_call"]
    assert [sorted(rule_for(eqn).sizes[f] for f in rule_for(eqn).splittable()) for eqn in kernels] == splits


LENGTHS, LISTED = jnp.full((8,), 64, jnp.int32), jnp.zeros((8, 16), jnp.int32)
BEGINS, COUNT = jnp.arange(9, dtype=jnp.int32), jnp.array([8], jnp.int32)
PAGED = {
    "whole samples": (lambda q, k, v: paged_on_tpus(q, k, v, LENGTHS, LISTED, pages_per_compute_block=4)),
    "block by block": (
        lambda q, k, v: paged_on_tpus(q, k, v, LENGTHS, LISTED, pages_per_compute_block=4, inline_seq_dim=False)
    ),
    "ragged": (
        lambda q, kv: ragged_paged_attention(
            q, kv, LENGTHS, LISTED, BEGINS, COUNT, num_kv_pages_per_block=4, num_queries_per_block=8
        )
    ),
}


@pytest.mark.parametrize("name", PAGED)
def test_keys_in_pages_on_tpus_stay_whole(name):
    """Each step copies the pages of the next one, which it tells by its place in the grid: said, with what to write."""
    shapes = [(64, 4, 128), (128, 16, 4, 128)] if name == "ragged" else [(8, 4, 128), *[(2, 64, 16, 128)] * 2]
    (kernel,) = (eqn for eqn in flat_eqns(PAGED[name], *shapes) if eqn.primitive.name == "pallas_call")
    with pytest.warns(
        UserWarning, match=r"whole .*its index .*to copy blocks by itself (?s:.*)@autopar\.sharding_rule"
    ):
        assert not rule_for(kernel).splittable()


def test_keys_in_pages_on_tpus_with_a_rule():
    """As the page on kernels has it: samples and heads of keys are split, and every device calls the kernel on its own."""
    text = "b (k g) d, k p s d, k p s d, b, b i -> b (k g) d {whole d}"
    attend = sharding_rule(text)(functools.partial(paged_on_tpus, pages_per_compute_block=4))
    (eqn,) = flat_eqns(lambda *qkv: attend(*qkv, LENGTHS, LISTED), (8, 4, 128), (2, 64, 16, 128), (2, 64, 16, 128))
    assert " ".join(rule_for(eqn).splittable()) == "b k"


def test_keys_in_pages_on_tpus_in_parts():
    """What that rule says of the kernel: on some samples, and some heads of keys, it makes these samples and heads."""
    rng = np.random.default_rng(0)
    query = rng.normal(size=(2, 4, 128)).astype(np.float32)
    keys, values = (rng.normal(size=(2, 8, 16, 128)).astype(np.float32) for _ in range(2))
    lengths, listed = np.array([20, 7], np.int32), rng.integers(0, 8, (2, 2)).astype(np.int32)
    attend = functools.partial(paged_on_tpus, pages_per_compute_block=2)
    with pltpu.force_tpu_interpret_mode():
        whole = attend(query, keys, values, lengths, listed)
        of_head = attend(query[:, 2:], keys[1:], values[1:], lengths, listed)
        of_sample = attend(query[1:], keys, values, lengths[1:], listed[1:])
    np.testing.assert_array_equal(whole[:, 2:], of_head)
    np.testing.assert_array_equal(whole[1:], of_sample)


def structs(*shapes):
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def ragged_with_pairs(attend, query, pages, *rest):
    """Keys and values of a head beside each other in a dim of their own, as the page on kernels has it."""
    return attend(query, pages.reshape(*pages.shape[:2], -1, pages.shape[-1]), *rest)


def test_ragged_keys_in_pages_on_tpus_with_a_rule():
    """Heads of keys are split, and a device's part makes a kernel of its own."""
    rule = sharding_rule("t (k g) d, p s k v d, b, b i, c, n -> t (k g) d {whole t d}")
    kernel = functools.partial(ragged_paged_attention, num_kv_pages_per_block=4, num_queries_per_block=8)
    attend = rule(functools.partial(ragged_with_pairs, kernel))
    rest = LENGTHS, LISTED, BEGINS, COUNT
    (eqn,) = flat_eqns(lambda *arrays: attend(*arrays, *rest), (64, 16, 128), (128, 16, 8, 2, 128))
    assert rule_for(eqn).splittable() == ("k",)
    part = jax.eval_shape(lambda *arrays: attend(*arrays, *rest), *structs((64, 4, 128), (128, 16, 2, 2, 128)))
    assert part.shape == (64, 4, 128)


def test_ragged_keys_in_pages_in_parts():
    """What that rule says, of JAX's reference for the kernel, which nothing can interpret."""
    rng = np.random.default_rng(0)
    query, pages = rng.normal(size=(9, 4, 128)), rng.normal(size=(8, 16, 2, 2, 128))
    lengths, listed = np.array([20, 7], np.int32), rng.integers(0, 8, (2, 2)).astype(np.int32)
    rest = lengths, listed, np.array([0, 5, 9], np.int32), np.array([2], np.int32)
    attend = functools.partial(ragged_with_pairs, ref_ragged_paged_attention)
    whole = attend(jnp.float32(query), jnp.float32(pages), *rest)
    for head in (0, 1):
        own = slice(2 * head, 2 * head + 2)
        part = attend(jnp.float32(query[:, own]), jnp.float32(pages[:, :, head : head + 1]), *rest)
        np.testing.assert_allclose(whole[:, own], part, rtol=1e-6)


def test_parts_of_splash_attention():
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((128, 128))] * 4)
    kernel = splash_attention_kernel.make_splash_mha_single_device(mask, interpret=True)
    fun, keys = gradient_of(jax.vmap(kernel)), (2, 2, 128, 128)
    assert check_function(fun, (2, 4, 128, 128), keys, keys, only=["pallas_call"], limit=1) == 3
