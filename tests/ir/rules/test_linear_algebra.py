"""Products and decompositions: golden lines, and each device's part against the whole, gradients included."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from autopar.ir.rules import rule_for
from tests.ir.rules.harness import FEW, MESH_SHAPES, check_equation, check_function, flat_eqns, gradient_of, only_eqn

FLAGS = jnp.ones((8, 8), bool)
GROUPS = jnp.array([3, 0, 1, 4])
DOTS = {"dot_general", "ragged_dot_general"}
OWN = DOTS | {"cholesky", "eigh", "fft", "householder_product", "lu", "qr", "svd", "triangular_solve"}
OWN |= {"tridiagonal_solve", "eig", "schur", "hessenberg", "tridiagonal", "lu_pivots_to_permutation"}


@pytest.mark.parametrize(
    "fun, args, rule",
    [
        (jnp.matmul, [(4, 8), (8, 16)], "ab,bc->ac {sum b}"),
        (jax.vmap(jnp.matmul), [(2, 4, 8), (2, 8, 16)], "abc,acd->abd {sum c}"),
        (jnp.matmul, [(4, 8), (8, 1)], "ab,b1->a1 {sum b}"),
        (jnp.matmul, [(4, 0), (0, 16)], "ab,bc->ac {sum b}"),
        (lambda x, y: lax.dot_general(x, y, (((), ()), ((), ()))), [(4,), (8,)], "a,b->ab"),
        (lambda x, y: lax.dot_general(x, y, (((0, 1), (1, 0)), ((), ()))), [(4, 8, 2), (8, 4)], "abc,ba->c {sum a b}"),
        (lambda x, y: lax.dot_general(x, y, (((0,), (1,)), ((1,), (0,)))), [(4, 2), (2, 4, 3)], "ab,bac->bc {sum a}"),
        (lambda x, y: lax.dot(x, y, preferred_element_type=bool), [FLAGS, FLAGS], "ab,bc->ac {max b}"),
        (lax.ragged_dot, [(8, 4), (4, 4, 6), GROUPS], "ab,g0bd,h0->ad {sum b g0, whole h0}"),
        (lax.ragged_dot, [(8, 4), (1, 4, 6), GROUPS[3:]], "ab,1bd,1->ad {sum b}"),
        (lax.linalg.lu, [(2, 4, 6)], "abc->ade,af,ag {whole b c d e f g}"),
        (lax.linalg.householder_product, [(2, 4, 3), (2, 3)], "abc,ad->aef {whole b c d e f}"),
        (lax.linalg.triangular_solve, [(2, 4, 4), (2, 8, 4)], "abc,adb->adb {whole b c}"),
        (jnp.fft.rfft, [(4, 8)], "ab->ac {whole b c}"),
    ],
)
def test_rule(fun, args, rule):
    assert str(rule_for(only_eqn(fun, *args))) == rule


def test_gradients_of_a_ragged_product():
    """By the weights it is a sum over tokens, by tokens one over groups."""

    def gradients(lhs, rhs):
        return jax.grad(lambda *operands: lax.ragged_dot(*operands, GROUPS).sum(), argnums=(0, 1))(lhs, rhs)

    rules = [str(rule_for(eqn)) for eqn in flat_eqns(gradients, (8, 4), (4, 4, 6)) if eqn.primitive.name in DOTS]
    assert rules == ["ab,ac,h0->g0bc {sum a, whole h0}", "ab,g0db,h0->ad {sum b g0, whole h0}"]


def test_flops():
    """2 m n k, times 4 for complex numbers; the group of a ragged product is not counted."""
    assert rule_for(only_eqn(jnp.matmul, (4, 8), (8, 16))).flops == 2 * 4 * 8 * 16
    assert rule_for(only_eqn(jnp.matmul, jnp.ones((4, 8), complex), jnp.ones((8, 1), complex))).flops == 8 * 4 * 8
    assert rule_for(only_eqn(lax.ragged_dot, (8, 4), (4, 4, 6), GROUPS)).flops == 2 * 8 * 4 * 6


@FEW
@given(st.data(), st.sampled_from(MESH_SHAPES), st.integers(0, 99))
def test_dot_general(data, mesh_shape, seed):
    """Any number of batch, contracted and free dims, in any order; dtypes and gradients."""
    sizes = st.sampled_from([1, 2, 3, 4, 8])
    batch, contracted, free_lhs, free_rhs = (data.draw(st.lists(sizes, max_size=most)) for most in (1, 2, 2, 1))
    dims = [("b", n, size) for n, size in enumerate(batch)] + [("k", n, size) for n, size in enumerate(contracted)]
    lhs = data.draw(st.permutations(dims + [("m", n, size) for n, size in enumerate(free_lhs)]))
    rhs = data.draw(st.permutations(dims + [("n", n, size) for n, size in enumerate(free_rhs)]))

    def places(kind, many):
        return [[operand.index(dim) for dim in dims if dim[0] == kind][:many] for operand in (lhs, rhs)]

    numbers = (places("k", 9), places("b", 9))
    dtype = data.draw(st.sampled_from([jnp.float32, jnp.int32, jnp.complex64]))
    rng = np.random.default_rng(seed)
    x, y = (jnp.asarray(rng.integers(-3, 3, [d[2] for d in operand]), dtype) for operand in (lhs, rhs))
    fun = lambda x, y: lax.dot_general(x, y, numbers)  # noqa: E731
    fun = fun if dtype == jnp.int32 else gradient_of(fun)
    assert check_function(fun, x, y, seed=seed, mesh_shape=mesh_shape, only=DOTS, limit=6)


@pytest.mark.parametrize(
    "mesh_shape, lengths",
    [((8,), [9, 9, 0, 1]), ((2, 4), [3, 0, 1, 4]), ((2, 2, 2), [0, 2, 0, 3])],
    ids=["too many", "all", "some"],
)
def test_ragged_dot(mesh_shape, lengths):
    """Rows and groups split, of rows that belong to no group too."""
    fun = gradient_of(lambda x, w: lax.ragged_dot(x, w, jnp.array(lengths)))
    assert check_function(fun, (8, 16), (4, 16, 8), only=DOTS, mesh_shape=mesh_shape, limit=16) > 12


def test_vmapped_ragged_dot():
    """Group sizes with a batch dim: the batch splits."""
    fun = jax.vmap(lax.ragged_dot)
    groups = jnp.stack([GROUPS, GROUPS[::-1]])
    (eqn,) = (eqn for eqn in flat_eqns(fun, (2, 8, 4), (2, 4, 4, 6), groups) if eqn.primitive.name in DOTS)
    assert str(rule_for(eqn)) == "abc,ag0ce,ag0->abe {sum c, whole b g0}"
    rng = np.random.default_rng(0)
    operands = [rng.normal(size=var.aval.shape).astype(np.float32) for var in eqn.invars[:2]]
    assert check_equation(eqn, mesh_shape=(2, 2, 2), operands=[*operands, groups]) > 5


DECOMPOSITIONS = {
    "cholesky": lax.linalg.cholesky,
    "eigh": jnp.linalg.eigh,
    "eig": jnp.linalg.eig,
    "lu": lax.linalg.lu,
    "qr": jnp.linalg.qr,
    "svd": jnp.linalg.svd,
    "schur": lax.linalg.schur,
    "hessenberg": lax.linalg.hessenberg,
    "tridiagonal": lax.linalg.tridiagonal,
    "solve": lambda a: jnp.linalg.solve(a, a[..., ::-1]),
    "inverse": jnp.linalg.inv,
}


@pytest.mark.parametrize("name", DECOMPOSITIONS)
def test_decompositions_split_their_batch(name):
    size = np.arange(4)
    matrices = jnp.asarray([np.diag(2.0 + size + k) + 0.1 for k in range(8)], jnp.float32)
    assert check_function(DECOMPOSITIONS[name], matrices, only=OWN, mesh_shape=(2, 4)) >= 4


@pytest.mark.parametrize("left_side", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
def test_triangular_solve(left_side, transpose_a):
    matrices = jnp.asarray(np.tril(np.ones((2, 4, 4))) + 3 * np.eye(4), jnp.float32)
    right = jnp.sin(jnp.arange(64.0)).reshape((2, 4, 8) if left_side else (2, 8, 4))
    fun = lambda a, b: lax.linalg.triangular_solve(  # noqa: E731
        a, b, left_side=left_side, lower=True, transpose_a=transpose_a
    )
    assert check_function(gradient_of(fun), matrices, right, only={"triangular_solve"}) > 8


def test_tridiagonal_solve():
    diagonals = [jnp.ones((2, 8)), 4 * jnp.ones((2, 8)), jnp.ones((2, 8))]
    assert check_function(lax.linalg.tridiagonal_solve, *diagonals, jnp.ones((2, 8, 4)), only=OWN) > 5


@pytest.mark.parametrize("fun", [jnp.fft.fft2, jnp.fft.rfft, jnp.fft.irfft, jnp.fft.ifft])
def test_fft(fun):
    signal = jnp.sin(jnp.arange(128.0)).reshape(8, 4, 4)
    signal = signal if fun is jnp.fft.rfft else signal.astype(jnp.complex64)
    assert check_function(gradient_of(fun), signal, only={"fft"}, mesh_shape=(2, 2, 2)) > 8
