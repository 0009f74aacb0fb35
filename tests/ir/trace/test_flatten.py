"""Flattening: what is opened, what stays, and that the values are the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import sparse
from jax.extend.core import Primitive
from jax.interpreters import mlir

from autopar._jax import Var, eval_jaxpr, open_jaxpr, scan_counts
from autopar.ir.gradient import is_recomputed
from autopar.ir.trace.trace import trace_step
from tests.ir.traced import traced

W = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
X = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)


def names(jaxpr):
    return [eqn.primitive.name for eqn in jaxpr.eqns]


def only(jaxpr, name):
    (eqn,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == name]
    return eqn


@jax.custom_vjp
def clipped(x):
    return jnp.sin(x)


clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (jnp.clip(g * jnp.cos(x), -0.5, 0.5),))


@jax.custom_jvp
def softened(x):
    return jnp.log1p(jnp.exp(x))


softened.defjvp(lambda primals, tangents: (softened(*primals), tangents[0] * jax.nn.sigmoid(primals[0])))


def test_calls_are_opened():
    def step(w, x):
        @jax.jit
        def layer(x):
            return jax.nn.relu(clipped(x @ w))

        def loss(w):
            return softened(layer(x) + jax.nn.silu(x @ w)).sum() + lax.composite(lambda x: x * 2, "my.twice")(x).sum()

        return jax.value_and_grad(loss)(w)

    assert not {"jit", "pjit", "custom_jvp_call", "custom_vjp_call", "composite"} & set(names(traced(step, W, X)))


def test_linear_solve_is_opened():
    jaxpr = traced(lambda w, x: jax.grad(lambda w: jnp.linalg.solve(w + 5 * jnp.eye(4), x.T).sum())(w), W, X)
    assert "custom_linear_solve" not in names(jaxpr) and "triangular_solve" in names(jaxpr)


def test_collectives_of_a_mapped_axis_are_reductions():
    """Batch norm in Equinox, and under `vmap` in Flax and Haiku: means over `axis_name`."""

    def one(w, x):
        x = x @ w
        mean = lax.pmean(x, "batch")
        return (
            (x - mean)
            * lax.rsqrt(lax.pmean(lax.square(x - mean), "batch") + 1e-3)
            / lax.pmax(lax.stop_gradient(abs(x)), "batch")
        )

    def step(w, x):
        return jax.grad(lambda w: jax.vmap(one, (None, 0), axis_name="batch")(w, x)[0].sum())(w)

    found = names(traced(step, W, X))
    assert not {"psum", "pmax", "pmin"} & set(found) and {"reduce_sum", "reduce_max"} <= set(found)


def test_root_finding():
    def step(a):
        def solve(f, x):
            return lax.fori_loop(0, 20, lambda i, x: x - f(x) / (2 * x), x)

        return lax.custom_root(lambda x: x**2 - a, 1.0, solve, lambda g, y: y / g(1.0))

    assert not [name for name in names(traced(jax.grad(step), 4.0)) if name.startswith("c")]


def test_name_stacks_are_joined():
    def step(w, x):
        def loss(w):
            with jax.named_scope("mlp"):
                return jax.jit(lambda w: jnp.tanh(x @ w))(w).sum()

        return jax.grad(loss)(w)

    stacks = [str(eqn.source_info.name_stack) for eqn in traced(step, W, X).eqns]
    assert stacks[0].startswith("jvp(mlp)") and stacks[-1].startswith("transpose(jvp(mlp))")


def test_remat_stays_behind_a_barrier():
    @jax.checkpoint
    def layer(w, x):
        return jnp.tanh(jnp.tanh(x @ w) @ w)

    jaxpr = traced(jax.value_and_grad(lambda w, x: layer(w, x).sum()), W, X)
    barrier = only(jaxpr, "optimization_barrier")
    again = [eqn for eqn in jaxpr.eqns if is_recomputed(eqn)]
    assert [eqn.primitive.name for eqn in again if eqn.primitive.name != "mul"].count("tanh") == 2
    behind = set(barrier.outvars)
    for eqn in again:
        assert all(var in behind for var in eqn.invars if isinstance(var, Var)), eqn
        behind.update(eqn.outvars)
    text = jax.jit(lambda *args: eval_jaxpr(jaxpr, (), *args)).lower(W, X).compile().as_text()
    plain = jax.jit(jax.value_and_grad(lambda w, x: layer.__wrapped__(w, x).sum())).lower(W, X).compile().as_text()
    assert text.count(" tanh(") > plain.count(" tanh(")


def test_remat_without_gradient_and_without_cse_guard():
    def step(w, x):
        layer = jax.checkpoint(lambda w, x: jnp.tanh(x @ w), prevent_cse=False)
        return layer(w, x), jax.grad(lambda w: layer(w, x).sum())(w)

    assert "optimization_barrier" not in names(traced(step, W, X))
    forward = traced(jax.checkpoint(lambda w, x: jnp.tanh(x @ w)), W, X)
    assert names(forward) == ["dot_general", "tanh"]


def test_remat_policy_and_scan():
    policy = jax.checkpoint_policies.dots_saveable

    def step(w, x):
        @lambda f: jax.checkpoint(f, policy=policy)
        def body(x, w):
            return jnp.tanh(x @ w), None

        return jax.grad(lambda w: lax.scan(body, x, w)[0].sum())(w)

    jaxpr = traced(step, np.stack([W, W / 2, W * 2]), X)
    backward = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"][-1]
    assert "optimization_barrier" in names(open_jaxpr(backward.params["jaxpr"])[0])


def test_constants_of_loops_become_operands():
    table, other = np.arange(4, dtype=np.float32), np.arange(4, 8, dtype=np.float32)

    def step(x, n):
        def body(c, row):
            inner = lax.fori_loop(0, n, lambda i, c: c + table, c)
            return lax.cond(row.sum() > 1, lambda: inner + other, lambda: inner - table), row * other

        return lax.scan(body, jnp.zeros(4), x)

    jaxpr = traced(step, X, 3)
    assert len(jaxpr.invars) == 4  # x, n, and two arrays, though one is used in three places
    eqn = only(jaxpr, "scan")
    assert scan_counts(eqn.params)[1] == 1 and not open_jaxpr(eqn.params["jaxpr"])[1]


def halvings(x):
    """How often x is to be halved until it is below 1."""
    return lax.while_loop(lambda c: c[1] >= W[0, 0] + 2, lambda c: (c[0] + 1, c[1] * jnp.abs(W[3, 3]) / 2), (0, x))


def test_loops_of_each_sample_have_one_test():
    """`vmap` of a while: JAX traces a test with a dim, and lowers it to a loop while any goes on."""
    x = np.array([[0.5, 9.0], [3.0, 100.0], [1.0, 2.0]], np.float32)
    for fn in (jax.vmap(jax.vmap(halvings)), jax.vmap(lambda row: jax.vmap(halvings)(row))):
        loop = only(traced(fn, x), "while")
        test, body = (open_jaxpr(loop.params[name])[0] for name in ("cond_jaxpr", "body_jaxpr"))
        assert names(test) == ["reduce_or"] and test.outvars[0].aval.shape == ()
        assert names(body).count("select_n") == 2


def test_loops_of_each_sample_in_loops():
    def rows(x):
        return lax.map(lambda row: jax.vmap(halvings)(row)[1], x)

    traced(jax.vmap(rows), np.linspace(0, 40, 24, dtype=np.float32).reshape(2, 3, 4))


def test_placing_on_no_device_is_dropped():
    assert names(traced(lambda x: jax.device_put([x + 1, 2.0]), X)) == ["add"]


def test_no_operations_are_dropped():
    def step(x):
        y = lax.reshape(lax.transpose(lax.convert_element_type(x, x.dtype), (0, 1)), x.shape)
        return lax.stop_gradient(lax.broadcast_in_dim(y, x.shape, (0, 1)))

    jaxpr = traced(step, X)
    assert not jaxpr.eqns and jaxpr.outvars == jaxpr.invars


def test_known_scalars_are_folded():
    jaxpr = traced(lambda x: jnp.var(x, axis=1), X)
    assert not {"select_n", "gt", "convert_element_type"} & set(names(jaxpr))


def test_known_branches_are_opened():
    def step(x):
        return lax.switch(1, [lambda x: x, lambda x: x + 1], x), jnp.diag(x[:, :3])

    assert "cond" not in names(traced(step, X))


def test_effects_stay():
    def step(x):
        jax.debug.callback(lambda x: None, x.sum())
        return x * 2

    assert "debug_callback" in names(traced(step, X))


def test_variables_are_not_shared():
    """One cached jit used three times, twice inside of a loop: `check_program` asserts fresh variables."""
    layer = jax.jit(lambda w, x: jnp.tanh(x @ w))

    def step(w, x):
        x = layer(w, layer(w, x))
        return lax.scan(lambda c, _: (layer(w, layer(w, c)), c), x, None, length=2)

    assert names(traced(step, W, X)).count("tanh") == 2


@pytest.mark.parametrize("seed", range(3))
def test_optimizer_step(seed):
    optax = pytest.importorskip("optax")
    tx = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)), every_k_schedule=2)
    params = {"w": W, "b": np.full(4, 0.1 * seed, np.float32)}

    def step(params, opt, x):
        grads = jax.grad(lambda p: jnp.mean((jnp.tanh(x @ p["w"] + p["b"]) - x) ** 2))(params)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt

    traced(step, params, tx.init(params), X)


@pytest.mark.parametrize("name", ["product_of_a_library", "linear_solve"])
def test_a_primitive_that_is_lowered_as_a_program_is_that_program(name):
    """Of a library: one that is a function with derivatives of its own, as solvers of differential equations have."""

    def product(w, x, *, times):
        return [x @ w * times, jnp.tanh(x)]

    product_p = Primitive(name)
    product_p.multiple_results = True
    product_p.def_impl(product)
    product_p.def_abstract_eval(lambda w, x, *, times: [x, x])
    mlir.register_lowering(product_p, mlir.lower_fun(product))

    flat = traced(lambda w, x: product_p.bind(w, x, times=2.0)[0], W, X)
    assert names(flat) == ["dot_general", "mul"]


@pytest.mark.parametrize("kind", [sparse.BCOO, sparse.BCSR])
@pytest.mark.parametrize("fun", [lambda a, x: a @ x, lambda a, x: jax.grad(lambda x: jnp.sin(a @ x).sum())(x)])
def test_products_of_sparse_arrays_are_programs(kind, fun):
    """Their kernels for GPUs are off unless they are asked for."""
    matrix = kind.fromdense(jnp.eye(W.shape[0]))
    assert not [name for name in names(trace_step(fun, (matrix, W)).jaxpr) if name.startswith(("bcoo", "bcsr"))]


def test_a_primitive_with_a_lowering_of_its_own_is_kept():
    kernel_p = Primitive("kernel_of_a_library")
    kernel_p.def_abstract_eval(lambda x: x)
    mlir.register_lowering(kernel_p, mlir.lower_fun(jnp.tanh, multiple_results=False))
    mlir.register_lowering(kernel_p, lambda ctx, x: [x], platform="cuda")

    flat = trace_step(kernel_p.bind, (X,)).jaxpr
    assert names(flat) == ["kernel_of_a_library"]
