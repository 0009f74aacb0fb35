"""`autopar.sharding_rule`: one operation of the program, its rule, its parts, and its errors by message."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import RuleError
from autopar.ir.rules import rule_for
from autopar.ir.rules.opaque import sharding_rule
from autopar.ir.trace.trace import trace_step
from tests.ir.rules.harness import check_equation, check_equations, check_function, flat_eqns, gradient_of, only_eqn
from tests.ir.traced import split_microbatches


@sharding_rule("batch seq d, d f -> batch seq f {sum d}", linear=[(0,), (1,)])
def project(x, w):
    """Sizes come from the arguments."""
    assert x.shape[-1] == w.shape[0]
    return jnp.einsum("bsd,df->bsf", x, w)


def test_it_is_one_equation_with_the_rule_of_its_text():
    eqn = only_eqn(project, (4, 6, 8), (8, 16))
    rule = rule_for(eqn)
    assert rule.summed == ("d",) and rule.linear == ((0,), (1,)) and rule.whole == ()
    assert rule.splittable() == ("batch", "seq", "d", "f")
    assert rule.flops == 2 * 4 * 6 * 8 * 16
    assert str(eqn.params["call"]).endswith("project: batch seq d, d f -> batch seq f {sum d}")


@pytest.mark.parametrize("mesh_shape", [(8,), (2, 4), (2, 2, 2)])
def test_each_device_calls_the_function_on_its_part(mesh_shape):
    assert check_function(project, (4, 2, 8), (8, 16), mesh_shape=mesh_shape) >= 4


def test_a_dim_of_two_unknown_factors():
    """Lengths of `h` and `d` cannot both be told from `(h d)`, so one must stand elsewhere."""
    with pytest.raises(RuleError, match="cannot factor a dim of length 8"):
        sharding_rule("b (h d) -> b (h d)")(jnp.sin)(jnp.ones((4, 8)))


@sharding_rule("b (h d), h -> b (h d)")
def scale_heads(x, scale):
    return (x.reshape(x.shape[0], scale.shape[0], -1) * scale[:, None]).reshape(x.shape)


def test_a_dim_of_two_factors():
    rule = rule_for(only_eqn(scale_heads, (4, 8), (4,)))
    assert rule.sizes == {"b": 4, "h": 4, "d": 2} and rule.splittable() == ("b", "h")
    assert check_function(scale_heads, (4, 8), (4,), limit=20) > 5


@sharding_rule("n m, m -> n, m")
def scale(x, w):
    return (x * w).sum(1), w * 2


def test_what_is_not_noted_is_not_split():
    """`m` misses in one result and `n` in the other: neither may be split without a note."""
    rule = rule_for(only_eqn(lambda x, w: scale(x, w), (8, 4), (4,)))
    assert set(rule.whole) == {"n", "m"} and rule.splittable() == ()


@sharding_rule("n m -> n {max m}")
def highest(x):
    return x.max(1)


def test_maximum():
    assert check_function(highest, (8, 8), mesh_shape=(2, 2, 2), limit=30) > 8


def test_trees_keywords_and_eager_calls():
    """Leaves of a dict count in the order of their keys."""

    @sharding_rule("d, b d, -> b d, b d")
    def fun(tree, shift, *, negate):
        y = tree["x"] * tree["scale"] + shift
        return {"y": -y if negate else y, "z": y}

    tree = {"x": jnp.ones((8, 4)), "scale": jnp.arange(4.0)}
    result = jax.jit(lambda tree: fun(tree, 2.0, negate=True))(tree)
    np.testing.assert_allclose(result["y"], -(tree["x"] * tree["scale"] + 2))
    np.testing.assert_allclose(fun(tree, 2.0, negate=False)["z"], tree["x"] * tree["scale"] + 2)
    eqns = flat_eqns(lambda tree: fun(tree, 2.0, negate=True), tree)
    assert check_equations([eqn for eqn in eqns if eqn.primitive.name == "sharding_rule"]) > 4


def test_vmap_adds_a_factor():
    fun = jax.vmap(jax.vmap(project, (0, None)), (1, None), 1)
    (eqn,) = [e for e in flat_eqns(fun, (2, 8, 4, 2, 8), (8, 4)) if e.primitive.name == "sharding_rule"]
    assert rule_for(eqn).sizes["vmap0"] == 2 and rule_for(eqn).sizes["vmap1"] == 8
    assert check_equation(eqn, mesh_shape=(2, 4), limit=6) == 6
    x, w = jnp.ones((2, 8, 4, 2, 8)), jnp.ones((8, 4))
    np.testing.assert_allclose(fun(x, w), jnp.einsum("xybsd,df->xybsf", x, w), rtol=1e-6)


def test_differentiated_it_is_inlined():
    names = {eqn.primitive.name for eqn in flat_eqns(gradient_of(project), (4, 6, 8), (8, 16))}
    assert "dot_general" in names and "sharding_rule" not in names
    x, w = jnp.ones((2, 3, 4)), jnp.arange(8.0).reshape(4, 2)
    np.testing.assert_allclose(jax.grad(lambda x: project(x, w).sum())(x), jnp.broadcast_to(w.sum(1), x.shape))


def test_a_gradient_of_its_own_keeps_both_rules():
    @jax.custom_vjp
    def multiply(x, w):
        return forward(x, w)

    forward = sharding_rule("b d, d f -> b f {sum d}")(lambda x, w: x @ w)
    backward = sharding_rule("b f, b d, d f -> b d, d f")(lambda g, x, w: (g @ w.T, x.T @ g))
    multiply.defvjp(lambda x, w: (forward(x, w), (x, w)), lambda saved, g: backward(g, *saved))
    eqns = flat_eqns(gradient_of(multiply), (8, 4), (4, 2))
    assert [e.primitive.name for e in eqns].count("sharding_rule") == 2


@pytest.mark.parametrize(
    "text, wrong",
    [
        ("b d", "one `->`"),
        ("b d -> b -> d", "one `->`"),
        ("b ... -> b", "a dim is a name"),
        ("b d -> b {mean d}", "none of `sum`, `max`, `min`, `whole`"),
        ("b d -> b {sum e}", "`e` is noted in braces"),
        ("b b -> b", "stands twice"),
    ],
)
def test_text_that_cannot_be_read(text, wrong):
    with pytest.raises(RuleError, match="cannot be read") as caught:
        sharding_rule(text)
    assert wrong in str(caught.value) and caught.value.rule == text


@pytest.mark.parametrize(
    "text, shapes, wrong",
    [
        ("b d -> b d", [(4, 8), (8, 16)], "the rule has 1 operands, the function 2"),
        ("b d, d f -> b f, b", [(4, 8), (8, 16)], "the rule has 2 results, the function 1"),
        ("b d, d -> b f", [(4, 8), (8, 16)], "operand 1 has 2 dims, and 1 in the rule"),
        ("b d, b f -> d f", [(4, 8), (8, 16)], "factor `b` is 4 in one place and 8 in another"),
        ("ab, bc -> ac", [(4, 8), (8, 16)], "operand 0 has 2 dims, and 1 in the rule"),
        ("1 d, d f -> 1 f", [(4, 8), (8, 16)], "a dim written 1 has length 4"),
    ],
)
def test_rule_that_does_not_fit(text, shapes, wrong):
    fun = sharding_rule(text)(lambda x, w: x @ w)
    with pytest.raises(RuleError, match="does not fit") as caught:
        fun(*map(jnp.ones, shapes))
    assert wrong in str(caught.value) and caught.value.shapes == (*shapes, (4, 16))


def test_function_that_does_not_follow_its_rule():
    """It returns a constant shape: on a part of the batch, too much."""
    fun = sharding_rule("b d -> b d")(lambda x: jnp.zeros((8, 4)) + x.sum())
    with pytest.raises(RuleError, match="does not follow") as caught:
        check_function(fun, (8, 4), mesh_shape=(8,))
    assert "take all sizes from the shapes" in str(caught.value)


def test_flops_can_be_given():
    fun = sharding_rule("b d -> b d", flops=lambda x: 7.0 * x.size)(lambda x: x * 2)
    assert rule_for(only_eqn(fun, (8, 4))).flops == 7 * 32


def test_pallas_kernel():
    """An interpreted kernel: one block per device."""
    pallas = pytest.importorskip("jax.experimental.pallas")

    def kernel(x, y, out):
        out[...] = x[...] * 2 + y[...]

    @sharding_rule("n m, n m -> n m")
    def fun(x, y):
        return pallas.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x, y)

    assert check_function(fun, (8, 4), (8, 4), limit=5) == 5


def test_a_microbatch_of_it_is_one_operation_too():
    """Which a mesh can then split by the same rule."""

    def step(w, x):
        return w - 0.1 * kernel_gradient(x, w), kernel(x, w).mean(0)

    kernel = sharding_rule("b d, d f -> b f {sum d}")(jnp.matmul)
    kernel_gradient = sharding_rule("b d, d f -> d f {sum b}")(lambda x, w: x.T @ jnp.tanh(x @ w))
    w, x = np.eye(8, dtype=np.float32), np.arange(64, dtype=np.float32).reshape(8, 8) / 64
    loop = split_microbatches(trace_step(step, (w, x)).jaxpr, 4, (1,)).loop
    calls = [eqn for eqn in loop.eqns if eqn.primitive.name == "sharding_rule"]
    assert [rule_for(eqn).sizes["b"] for eqn in calls] == [2, 2]
    cluster, method = autopar.Cluster.local(jax.devices()[:2]), autopar.DataParallel(num_microbatches=4)
    results = autopar.parallelize(step, cluster=cluster, method=method, batch_argnums=(1,))(w, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), results, jax.jit(step)(w, x))


@sharding_rule("b n m -> b n m, b {whole n m}")
def factored(a):
    """LAPACK's Cholesky factor, a foreign function; it has columns where we have rows."""
    results = jax.ShapeDtypeStruct(a.shape, a.dtype), jax.ShapeDtypeStruct(a.shape[:1], jnp.int32)
    call = jax.ffi.ffi_call("lapack_spotrf_ffi", results, input_output_aliases={0: 0})
    factor, problems = call(a, uplo=np.uint8(ord("U")))
    return jnp.tril(factor), problems


@pytest.mark.parametrize(
    "method",
    [
        autopar.DataParallel(num_microbatches=2),
        autopar.PipelineParallel(num_stages=2, num_microbatches=2),
    ],
)
def test_foreign_function(method):
    """On each device and for each microbatch the call is one on fewer matrices."""

    def train_step(params, batch):
        def loss_fn(params):
            rows = jnp.tanh(batch["x"] @ params["in"])
            factor, _ = factored(jax.lax.stop_gradient(rows @ rows.mT) + jnp.eye(3))
            return jnp.mean((factor @ rows @ params["out"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    jnp.linalg.cholesky(jnp.eye(2))  # JAX finds LAPACK when it is first asked for
    rng = np.random.default_rng(0)
    params = {"in": np.float32(rng.normal(size=(4, 4))), "out": np.float32(rng.normal(size=(4, 2)))}
    args = params, {"x": np.float32(rng.normal(size=(8, 3, 4)))}
    cluster = autopar.Cluster.local(jax.devices()[:2])
    results = autopar.parallelize(train_step, cluster=cluster, method=method, batch_argnums=(1,))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), results, jax.jit(train_step)(*args))
