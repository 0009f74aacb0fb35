"""What XLA for GPUs recognizes: the same numbers, in other words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar._jax import bind_eqn
from autopar.ir.rules.on_gpus import as_on_gpus

X, KERNEL = jnp.ones((2, 8, 8, 3)), jnp.arange(3 * 3 * 3 * 4, dtype=jnp.float32).reshape(3, 3, 3, 4)


def convolve(x, kernel, strides=(2, 2)):
    return jax.lax.conv_general_dilated(x, kernel, strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def of_input(strides):
    def gradient(cotangent, kernel):
        (made,) = jax.linear_transpose(lambda x: convolve(x, kernel, strides), X)(cotangent)
        return made

    return gradient, jax.random.normal(jax.random.key(0), convolve(X, KERNEL, strides).shape)


@pytest.mark.parametrize("strides, reversals", [((2, 2), 2), ((2, 1), 2), ((1, 1), 0)])
def test_the_kernel_of_a_strided_gradient_is_reversed_last(strides, reversals):
    """Whatever is done to it before; and the numbers stay."""
    gradient, cotangent = of_input(strides)
    program = jax.make_jaxpr(gradient)(cotangent, KERNEL)
    (eqn,) = (eqn for eqn in program.eqns if eqn.primitive.name == "conv_general_dilated")

    def run(cotangent, kernel):
        return bind_eqn(eqn, *as_on_gpus(eqn, [cotangent, jnp.where(kernel > 0, kernel, -kernel)]))[0]

    kernel = jnp.flip(KERNEL, (0, 1))
    np.testing.assert_array_equal(run(cotangent, kernel), gradient(cotangent, KERNEL))
    steps = [e.primitive.name for e in jax.make_jaxpr(run)(cotangent, kernel).eqns]
    assert steps.count("rev") == reversals
    assert steps[-1] == "conv_general_dilated" and (steps[-2] == "rev") == bool(reversals)
