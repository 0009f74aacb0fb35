"""Products of two types of numbers, as JAX lowers them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar._jax import all_equations, eval_jaxpr
from autopar.ir.rewrite.one_dtype import products_of_one_dtype
from autopar.ir.trace.trace import trace_step

WIDE, NARROW, SMALL, OTHER = (jnp.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2))
BOTH = lax.DotAlgorithmPreset.BF16_BF16_F32


def multiply(x, w, result=WIDE, precision=None):
    return lax.dot_general(x, w, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=result)


def in_a_loop(x, w):
    return lax.scan(lambda carry, row: (carry + multiply(x, row), None), jnp.zeros((8, 8)), jnp.stack([w, w]))[0]


@pytest.mark.parametrize(
    "step, types, operands, conversions",
    [
        (multiply, (NARROW, WIDE), (WIDE, WIDE), 1),
        (lambda x, w: multiply(x, w, NARROW), (NARROW, WIDE), (NARROW, NARROW), 1),
        (lambda x, w: multiply(x, w, WIDE), (NARROW, jnp.float16), (WIDE, WIDE), 2),
        (in_a_loop, (NARROW, WIDE), (WIDE, WIDE), 1),
        (multiply, (NARROW, NARROW), (NARROW, NARROW), 0),
        (multiply, (SMALL, OTHER), (SMALL, OTHER), 0),
        (lambda x, w: multiply(x, w, WIDE, BOTH), (NARROW, WIDE), (NARROW, WIDE), 0),
    ],
)
def test_operands(step, types, operands, conversions):
    """As many conversions as the lowering makes, and the same numbers."""
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(8, 8)), dtype) for dtype in types]
    program = trace_step(step, arrays).jaxpr
    (product,) = (eqn for eqn in all_equations(program) if eqn.primitive.name == "dot_general")
    assert tuple(atom.aval.dtype for atom in product.invars) == operands
    assert sum(eqn.primitive.name == "convert_element_type" for eqn in all_equations(program)) == conversions
    np.testing.assert_array_equal(*(jax.jit(f)(*arrays) for f in (step, lambda *a: eval_jaxpr(program, (), *a)[0])))
    assert products_of_one_dtype(program) is program


def test_a_value_is_converted_once():
    """For the forward pass and for the gradient of the weights."""
    types = jax.ShapeDtypeStruct((8, 8), NARROW), jax.ShapeDtypeStruct((8, 8), WIDE)
    program = trace_step(jax.grad(lambda x, w: jnp.tanh(multiply(x, w)).sum(), 1), types).jaxpr
    assert [eqn.primitive.name for eqn in all_equations(program)].count("convert_element_type") == 1


def test_a_mixed_product_is_counted_as_it_runs():
    """As if its operand had been converted by hand."""

    def peak(by_hand):
        def step(w, batch):
            x = batch["x"].astype(WIDE) if by_hand else batch["x"]
            return w, jnp.tanh(multiply(x, w)).sum()

        types = jax.ShapeDtypeStruct((64, 64), WIDE), {"x": jax.ShapeDtypeStruct((4096, 64), NARROW)}
        return autopar.parallelize(step, cluster=autopar.Cluster.of("1 h100")).plan(*types).cost.peak_bytes

    assert peak(by_hand=False) == peak(by_hand=True)
