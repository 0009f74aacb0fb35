"""Forms that XLA's CPU backend computes faster: the same numbers, and the form that was wanted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar._jax import bind_eqn
from autopar.ir.rules.on_platforms import as_on_gpus, bind_on_cpu, convolved_on_cpu
from tests.ir.rules.harness import only_eqn


def across(a, b, depth):
    dims = tuple(range(depth))
    return lax.dot_general(a, b, ((dims, dims), ((), ())))


def bound(fun, arrays, reader=None):
    eqn = only_eqn(fun, *(a.shape for a in arrays))
    return lambda *operands: bind_on_cpu(eqn, operands, reader)[0]


def text(fun, arrays):
    return str(jax.make_jaxpr(fun)(*arrays))


def numbers(*shapes):
    random = np.random.default_rng(0)
    return [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize("shapes, depth", [([(16, 8), (16, 12)], 1), ([(2, 8, 4), (2, 8, 3, 5)], 2)])
@pytest.mark.parametrize("is_swapped", [False, True])
def test_rows_come_first_in_products_over_leading_dims(shapes, depth, is_swapped):
    arrays = numbers(*shapes)
    of_first, of_second = (len(shape) - depth for shape in shapes)
    swap = (*range(of_first, of_first + of_second), *range(of_first))
    reader = only_eqn(lambda x: lax.transpose(x, swap), shapes[0][depth:] + shapes[1][depth:]) if is_swapped else None
    made = bound(lambda a, b: across(a, b, depth), arrays, reader)
    np.testing.assert_allclose(made(*arrays), across(*arrays, depth), rtol=1e-5, atol=1e-5)
    assert "optimization_barrier" in text(made, arrays) and "dimension_numbers=(([1], [0])" in text(made, arrays)
    # XLA computes the transposed result from the copy, and transposes nothing but that.
    compiled = jax.jit(lambda *a: made(*a).transpose(swap) if is_swapped else made(*a)).lower(*arrays).compile()
    products = [line for line in compiled.as_text().splitlines() if " dot(" in line]
    assert products and all("lhs_contracting_dims={1}, rhs_contracting_dims={0}" in line for line in products)


@pytest.mark.parametrize(
    "fun, shapes",
    [
        (lambda a, b: a @ b, [(8, 16), (16, 12)]),
        (lambda a, b: lax.dot_general(a, b, (((1,), (1,)), ((0,), (0,)))), [(2, 8, 4), (2, 8, 5)]),
        (lambda a, b: across(a, b, 1), [(16, 8), (16,)]),
        (lambda a, b: lax.dot_general(a, b, (((0, 1), (1, 0)), ((), ()))), [(2, 8, 4), (8, 2, 5)]),
    ],
    ids=["rows are first", "batch", "vector", "dims in other orders"],
)
def test_other_products_stay(fun, shapes):
    arrays = numbers(*shapes)
    assert text(bound(fun, arrays), arrays) == text(fun, arrays)


def test_only_float32_products_are_turned():
    arrays = [a.astype(jnp.bfloat16) for a in numbers((16, 8), (16, 12))]
    eqn = jax.make_jaxpr(lambda a, b: across(a, b, 1))(*arrays).eqns[-1]
    assert "barrier" not in text(lambda *a: bind_on_cpu(eqn, a)[0], arrays)


@pytest.mark.parametrize("name", ["sum", "max", "prod"])
@pytest.mark.parametrize("shape, axes", [((1, 8, 6), (2,)), ((4, 1, 6), (0, 1)), ((1, 4, 1, 6), (0, 3))])
def test_reductions_lose_dims_of_length_one(name, shape, axes):
    (x,), fun = numbers(shape), lambda x: getattr(lax, f"reduce_{name}")(x, axes)
    made = bound(fun, [x])
    np.testing.assert_allclose(made(x), fun(x), rtol=1e-6)
    reduced = next(e for e in jax.make_jaxpr(made)(x).eqns if e.primitive.name == f"reduce_{name}")
    assert 1 not in reduced.invars[0].aval.shape


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: lax.reduce_sum(x, (0,)),
        lambda x: lax.argmax(x, 2, jnp.int32),
        lambda x: lax.reduce_precision(x, 5, 10),
    ],
    ids=["of one element", "number", "no dims"],
)
def test_other_reductions_stay(fun):
    (x,) = numbers((1, 8, 6))
    assert text(bound(fun, [x]), [x]) == text(fun, [x])


def weights_step(params, batch):
    def loss(params):
        normed = batch["x"] * lax.rsqrt((batch["x"] ** 2).mean(-1, keepdims=True))
        return jnp.mean((jnp.tanh(normed @ params["w"]) @ params["v"]) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def test_programs_on_cpus_have_these_forms():
    """A sample per device: no reduction of a dim of length one, and no product contracts its rows' dims last."""
    params = {"w": jnp.ones((16, 32)), "v": jnp.ones((32, 8))}
    batch = {"x": numbers((8, 4, 16))[0]}
    step = autopar.parallelize(weights_step, method=autopar.DataParallel(), batch_argnums=(1,), donate_argnums=())
    compiled = step.compile(params, batch)
    np.testing.assert_allclose(
        compiled(params, batch)["w"], jax.jit(weights_step)(params, batch)["w"], rtol=1e-5, atol=1e-6
    )
    (program,) = compiled.programs.values()
    lines = program.as_text().splitlines()
    assert [line for line in lines if " dot(" in line]
    assert not [line for line in lines if " dot(" in line and "lhs_contracting_dims={0}" in line]
    assert not [line for line in lines if " reduce(" in line and "f32[1,4,16]" in line]


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


def convolution(dims, shapes, **params):
    """A convolution with strides of two and its two gradients, each as (its equation, its operands)."""
    arrays, ndim = numbers(*shapes), len(shapes[0])
    forward = lambda x, w: lax.conv_general_dilated(x, w, (2,) * (ndim - 2), "SAME", dimension_numbers=dims, **params)  # noqa: E731
    made = jnp.sin(forward(*arrays))
    x, w = arrays
    for fun, given in (
        (forward, (x, w)),
        (lambda w, y: jax.linear_transpose(lambda x: forward(x, w), x)(y)[0], (w, made)),
        (lambda x, y: jax.linear_transpose(lambda w: forward(x, w), w)(y)[0], (x, made)),
    ):
        jaxpr = jax.make_jaxpr(fun)(*given)
        eqn = next(e for e in jaxpr.eqns if e.primitive.name == "conv_general_dilated")
        yield eqn, numbers(*(var.aval.shape for var in eqn.invars))


@pytest.mark.parametrize(
    "dims, shapes, params",
    [
        (("NHWC", "HWIO", "NHWC"), [(4, 8, 6, 3), (3, 3, 3, 5)], {}),
        (("NCHW", "OIHW", "NCHW"), [(4, 3, 8, 6), (5, 3, 3, 3)], {}),
        (("NHWC", "HWIO", "NHWC"), [(4, 8, 6, 4), (3, 3, 2, 6)], {"feature_group_count": 2}),
        (("NCW", "WIO", "NWC"), [(4, 3, 9), (3, 3, 5)], {}),
        (("NDHWC", "OIDHW", "NCDHW"), [(2, 4, 4, 4, 3), (5, 3, 2, 2, 2)], {}),
    ],
    ids=["channels last", "channels first", "groups", "one dim", "three dims"],
)
def test_convolutions_have_eigens_order_of_dims_in_loops_too(dims, shapes, params):
    for eqn, arrays in convolution(dims, shapes, **params):
        (made,), (expected,) = convolved_on_cpu(eqn, eqn.params, arrays), bind_eqn(eqn, *arrays)
        np.testing.assert_allclose(made, expected, rtol=1e-4, atol=1e-4)

        def loop(x, w, eqn=eqn):
            made = lambda near: convolved_on_cpu(eqn, eqn.params, (x + near, w))[0]  # noqa: E731
            return lax.fori_loop(0, 3, lambda _, near: made(near).sum(), 0.0)

        hlo = jax.jit(loop).lower(*arrays).compile().as_text()
        labels = {line.split("dim_labels=")[1].split(",")[0] for line in hlo.splitlines() if " convolution(" in line}
        spatial = "012"[: len(shapes[0]) - 2]
        assert labels == {f"b{spatial}f_{spatial}io->b{spatial}f"} or params  # XLA splits groups itself
