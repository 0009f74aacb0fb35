"""Single layers of a stack: which part holds them, and what each part has of their gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.ir.build import flat_function
from autopar.ir.split.layers.rows import part_of_padded, slice_of_part, touched_part
from autopar.ir.split.placement import units_of_shard

LENGTH, WIDTH = 7, 2
STACK = np.arange(LENGTH * WIDTH, dtype=np.float32).reshape(LENGTH, WIDTH)


def parts_of(stack, count):
    shares = [units_of_shard(k, count, LENGTH) for k in range(count)]
    return [stack[s.first : s.first + s.size] for s in shares]


def only(function, shape, name):
    jaxpr = flat_function(function, jax.ShapeDtypeStruct(shape, jnp.float32))
    (eqn,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == name)
    return eqn


@pytest.mark.parametrize("first, last, part", [(0, 3, 0), (3, 5, 1), (4, 5, 1), (5, 7, 2), (2, 4, None), (0, 7, None)])
def test_slices(first, last, part):
    """Of 7 layers in 3 parts: 3, 2 and 2."""
    eqn = only(lambda w: jax.lax.slice_in_dim(w, first, last), STACK.shape, "slice")
    assert touched_part(eqn, LENGTH, 3) == part
    if part is not None:
        of_part = slice_of_part(eqn, part, 3)
        np.testing.assert_array_equal(of_part(parts_of(STACK, 3)[part]), STACK[first:last])


def test_slices_of_other_dims():
    eqn = only(lambda w: jax.lax.slice_in_dim(w, 0, 1, axis=1), (5, LENGTH), "slice")
    assert touched_part(eqn, LENGTH, 3) is None


@pytest.mark.parametrize("first, last, part", [(0, 1, 0), (3, 5, 1), (2, 4, None)])
def test_pads(first, last, part):
    pads = [(first, LENGTH - last, 0), (0, 0, 0)]
    eqn = only(lambda rows: jax.lax.pad(rows, 0.0, pads), (last - first, WIDTH), "pad")
    assert touched_part(eqn, LENGTH, 3) == part
    if part is not None:
        rows, zero = STACK[first:last], np.float32(0)
        made = [part_of_padded(eqn, part, k, 3)(rows, zero) for k in range(3)]
        np.testing.assert_array_equal(np.concatenate(made), np.pad(rows, [(first, LENGTH - last), (0, 0)]))
