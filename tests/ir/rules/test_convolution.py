"""Convolutions: golden lines of every kind, and each device's part against the whole, gradients included."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from autopar.ir.rules import rule_for
from tests.ir.rules.harness import FEW, MESH_SHAPES, check_function, flat_eqns, gradient_of

CONV = "conv_general_dilated"


def conv(strides=(1, 1), padding="SAME", **params):
    """A convolution of NHWC images by an HWIO kernel."""
    numbers = ("NHWC", "HWIO", "NHWC")
    return lambda x, w: lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=numbers, **params)


def rules_of(fun, *args):
    return [str(rule_for(eqn)) for eqn in flat_eqns(fun, *args) if eqn.primitive.name == CONV]


@pytest.mark.parametrize(
    "fun, image, kernel, rule",
    [
        (conv(), (8, 6, 6, 4), (3, 3, 4, 16), "adgb,ehbc->afic {sum b, whole d e f g h i}"),
        (conv(), (8, 6, 6, 4), (1, 1, 4, 16), "adeb,11bc->adec {sum b}"),
        (conv((2, 2), "VALID"), (8, 6, 6, 3), (2, 2, 3, 16), "a(de)(fg)b,egbc->adfc {sum b, whole e g}"),
        (conv(padding="VALID"), (8, 6, 6, 3), (6, 6, 3, 16), "adeb,debc->a11c {sum b d e}"),
        (conv(feature_group_count=2), (8, 1, 1, 8), (1, 1, 4, 8), "a11(g0b),11b(g0c)->a11(g0c) {sum b}"),
        (conv(feature_group_count=8), (8, 1, 1, 8), (1, 1, 1, 8), "a11g0,111g0->a11g0"),
        (conv(feature_group_count=8), (8, 1, 1, 8), (1, 1, 1, 16), "a11g0,111(g0b)->a11(g0b)"),
        (conv(batch_group_count=4), (8, 1, 1, 3), (1, 1, 3, 4), "(g0a)11b,11bg0->a11g0 {sum b}"),
    ],
)
def test_rule(fun, image, kernel, rule):
    assert rules_of(fun, image, kernel) == [rule]


def test_gradients_of_a_grouped_convolution():
    """By the kernel: summed over the batch, groups along the batch of the transposed convolution; by the image."""
    fun = conv(feature_group_count=2)
    gradients = jax.grad(lambda x, w: fun(x, w).sum(), argnums=(0, 1))
    by_kernel, by_image = rules_of(gradients, (4, 5, 5, 4), (3, 3, 2, 6))
    assert by_kernel == "bdg(g0a),beh(g0c)->fia(g0c) {sum b, whole d e f g h i}"
    assert by_image == "adg(g0b),eh(g0c)b->afi(g0c) {sum b, whole d e f g h i}"


def test_gradients_of_patches_split_as_the_patches_do():
    gradients = jax.grad(lambda x, w: conv((2, 2), "VALID")(x, w).sum(), argnums=(0, 1))
    by_kernel, by_image = rules_of(gradients, (4, 8, 8, 3), (2, 2, 3, 8))
    assert by_kernel == "b(de)(fg)a,bdfc->egac {sum b d f, whole e g}"
    assert by_image == "adfb,egcb->a(de)(fg)c {sum b, whole e g}"


def test_flops():
    """2 per multiplication and addition: output elements times kernel positions times input channels of one group."""
    (eqn,) = (eqn for eqn in flat_eqns(conv(feature_group_count=2), (8, 6, 6, 4), (3, 3, 2, 10)))
    assert rule_for(eqn).flops == 2 * (8 * 6 * 6 * 10) * (3 * 3 * 2)


KINDS = {
    "plain": (conv(), (8, 4, 4, 4), (3, 3, 4, 8)),
    "1 x 1": (conv(), (4, 8, 2, 4), (1, 1, 4, 8)),
    "strided": (conv((2, 2)), (8, 5, 5, 2), (3, 3, 2, 8)),
    "patches": (conv((2, 2), "VALID"), (2, 16, 8, 2), (2, 2, 2, 4)),
    "everything": (conv(padding="VALID"), (2, 8, 8, 2), (8, 8, 2, 4)),
    "grouped": (conv(feature_group_count=4), (4, 4, 4, 8), (3, 3, 2, 8)),
    "depthwise": (conv(feature_group_count=8), (2, 4, 4, 8), (3, 3, 1, 8)),
    "depthwise, 2 each": (conv(feature_group_count=8), (2, 4, 4, 8), (3, 3, 1, 16)),
    "batch groups": (conv(batch_group_count=4), (16, 4, 4, 2), (3, 3, 2, 8)),
    "dilated kernel": (conv(rhs_dilation=(2, 2)), (8, 6, 6, 2), (3, 3, 2, 4)),
    "odd sizes": (conv((2, 1), ((1, 0), (2, 1))), (5, 7, 3, 3), (2, 3, 3, 5)),
    "transposed": (lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"), (4, 4, 4, 4), (3, 3, 4, 8)),
    "transposed, patches": (lambda x, w: lax.conv_transpose(x, w, (2, 2), "VALID"), (4, 8, 4, 4), (2, 2, 4, 8)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_device_computes_its_part(kind):
    fun, image, kernel = KINDS[kind]
    mesh_shape = MESH_SHAPES[len(kind) % 3]
    assert check_function(gradient_of(fun), image, kernel, only={CONV}, mesh_shape=mesh_shape, limit=8) >= 3


@FEW
@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from(["SAME", "VALID", ((1, 2), (0, 1))]),
    st.sampled_from(MESH_SHAPES),
    st.integers(0, 99),
)
def test_drawn_convolutions(groups, inputs, outputs, window, strides, padding, mesh_shape, seed):
    fun = conv(strides, padding, feature_group_count=groups)
    image, kernel = (8, 6, 4, groups * inputs), (*window, inputs, groups * outputs)
    check_function(gradient_of(fun), image, kernel, only={CONV}, mesh_shape=mesh_shape, seed=seed, limit=5)


def test_vmapped_over_kernels():
    """An ensemble: JAX folds the batch of kernels into groups."""
    fun = jax.vmap(conv(padding="VALID"))
    assert check_function(gradient_of(fun), (4, 2, 3, 3, 2), (4, 2, 2, 2, 4), only={CONV}) > 8


def test_low_precision_with_wide_accumulation():
    fun = conv(preferred_element_type=jnp.float32)
    image, kernel = jnp.ones((8, 4, 4, 4), jnp.bfloat16), jnp.ones((3, 3, 4, 8), jnp.bfloat16)
    assert check_function(fun, image, kernel, only={CONV}) > 5
