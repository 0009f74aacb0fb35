"""Rows that are sorted in parts, by each microbatch and device by itself: experts without capacity; and what is no work on
single rows."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental.pallas.ops.tpu import megablox

from autopar._jax import eval_jaxpr
from autopar.errors import MicrobatchError
from autopar.ir.check import check_program
from autopar.ir.split.sorted_rows.sorted_parts import sort_in_parts
from tests.ir.split.cases import (
    LENGTH,
    Case,
    Tree,
    _normal,
    assert_same,
    full_batch,
    primitives_in,
    run_split,
    sgd,
    split_case,
    traced,
)

WIDTH, EXPERTS, LAYERS = 8, 3, 2


def expert_params() -> Tree:
    return {
        "router": _normal(0, LAYERS, WIDTH, EXPERTS),
        "up": 0.5 * _normal(1, LAYERS, EXPERTS, WIDTH, WIDTH),
        "down": 0.5 * _normal(2, LAYERS, EXPERTS, WIDTH, WIDTH),
    }


def sequences() -> Tree:
    return {"x": _normal(3, 8, LENGTH, WIDTH), "y": _normal(4, 8, LENGTH, WIDTH)}


def products(layer: Tree, rows: jax.Array, sizes: jax.Array) -> jax.Array:
    return lax.ragged_dot(jnp.tanh(lax.ragged_dot(rows, layer["up"], sizes)), layer["down"], sizes)


def written_back(layer: Tree, x: jax.Array) -> jax.Array:
    """One expert for each row; a result is written where its row was."""
    gates = jax.nn.softmax(x @ layer["router"])
    pick = gates.argmax(-1)
    order, sizes = jnp.argsort(pick), jnp.bincount(pick, length=EXPERTS)
    rows = products(layer, x[order], sizes.astype(jnp.int32))
    return jnp.zeros_like(x).at[order].set(rows) * gates.max(-1, keepdims=True)


def taken_back(layer: Tree, x: jax.Array) -> jax.Array:
    """Two experts for each row, as MaxText has it: rows come twice, and results are taken by the inverse order."""
    weights, picks = lax.top_k(jax.nn.softmax(x @ layer["router"]), 2)
    pick = picks.reshape(-1)
    order = jnp.argsort(pick)
    rows = products(layer, jnp.take(x, order // 2, axis=0), jnp.bincount(pick, length=EXPERTS))
    rows = jnp.take(rows, jnp.argsort(order), axis=0).reshape(-1, 2, WIDTH)
    return jnp.einsum("tkd,tk->td", rows, weights)


def added_up(layer: Tree, x: jax.Array) -> jax.Array:
    """The same, weighed in sorted order and added to where the rows were."""
    weights, picks = lax.top_k(jax.nn.softmax(x @ layer["router"]), 2)
    order = jnp.argsort(picks.reshape(-1))
    rows = products(layer, x[order // 2], jnp.bincount(picks.reshape(-1), length=EXPERTS))
    return jnp.zeros_like(x).at[order // 2].add(rows * weights.reshape(-1)[order][:, None])


def balanced(layer: Tree, x: jax.Array) -> jax.Array:
    """Groups are counted by one-hot rows, and how full they are is made of the same counts."""
    weights, picks = lax.top_k(jax.nn.softmax(x @ layer["router"]), 2)
    order = jnp.argsort(picks.reshape(-1))
    sizes = jax.nn.one_hot(picks, EXPERTS, dtype=jnp.int32).sum((0, 1))
    rows = products(layer, x[order // 2], sizes)
    full = (sizes / len(x) * jax.nn.softmax(x @ layer["router"]).mean(0)).sum()
    return jnp.zeros_like(x).at[order // 2].add(rows * weights.reshape(-1)[order][:, None]) + full


COUNTS = {
    "one_hot": lambda pick: jax.nn.one_hot(pick, EXPERTS, dtype=jnp.int32).sum(0),
    "equal": lambda pick: (pick[:, None] == jnp.arange(EXPERTS)).sum(0).astype(jnp.int32),
    "segments": lambda pick: jax.ops.segment_sum(jnp.ones_like(pick), pick, EXPERTS),
    "added": lambda pick: jnp.zeros(EXPERTS, jnp.int32).at[pick].add(1),
    "sorted": lambda pick: jnp.bincount(jnp.sort(pick), length=EXPERTS),
    "vmapped": lambda pick: jax.vmap(lambda k: (pick == k).sum())(jnp.arange(EXPERTS)),
    "stacked": lambda pick: jnp.stack([jnp.count_nonzero(pick == k) for k in range(EXPERTS)]),
    "ends": lambda pick: jnp.diff(jnp.searchsorted(jnp.sort(pick), jnp.arange(EXPERTS), side="right"), prepend=0),
    "edges": lambda pick: jnp.diff(jnp.searchsorted(pick[jnp.argsort(pick)], jnp.arange(EXPERTS + 1))),
}
"""Ways to count the rows of each expert, besides `bincount`."""


def counted_by(name: str):
    """Two experts for each row, whose rows are counted in one of these ways; the inverse order is written, not sorted."""

    def experts(layer: Tree, x: jax.Array) -> jax.Array:
        weights, picks = lax.top_k(jax.nn.softmax(x @ layer["router"]), 2)
        pick = picks.reshape(-1)
        order = jnp.argsort(pick)
        inverse = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype))
        rows = products(layer, jnp.repeat(x, 2, axis=0)[order], COUNTS[name](pick))
        return jnp.einsum("tkd,tk->td", rows[inverse].reshape(-1, 2, WIDTH), weights)

    return experts


@jax.custom_vjp
def in_order(x: jax.Array, order: jax.Array) -> jax.Array:
    """`x[order]`, whose gradient is taken by the inverse order."""
    return x[order]


in_order.defvjp(lambda x, order: (x[order], order), lambda order, grad: (grad[jnp.argsort(order)], None))


def ordered_gradients(layer: Tree, x: jax.Array) -> jax.Array:
    """As MaxText has it: gradients of sorted rows are sorted, too, so that the inverse order is inverted again."""
    weights, picks = lax.top_k(jax.nn.softmax(x @ layer["router"]), 2)
    order = jnp.argsort(picks.reshape(-1))
    rows = in_order(jnp.repeat(x, 2, axis=0), order)
    rows = products(layer, rows, jnp.bincount(picks.reshape(-1), length=EXPERTS))
    return jnp.einsum("tkd,tk->td", in_order(rows, jnp.argsort(order)).reshape(-1, 2, WIDTH), weights)


def numbers_in_order(layer: Tree, x: jax.Array) -> jax.Array:
    """The numbers of rows are put in order, and rows taken by them."""
    weights, picks = lax.top_k(jax.nn.softmax(x @ layer["router"]), 2)
    order = jnp.argsort(picks.reshape(-1))
    row = jnp.repeat(jnp.arange(len(x)), 2)[order]
    rows = products(layer, x[row], jnp.bincount(picks.reshape(-1), length=EXPERTS))
    return jnp.zeros_like(x).at[row].add(rows * weights.reshape(-1)[order][:, None])


def sorted_along(layer: Tree, x: jax.Array) -> jax.Array:
    """A sort carries the numbers of rows and their weights along; a pick of no expert stands behind all others."""
    weights, picks = lax.top_k(jax.nn.softmax(x @ layer["router"]), 2)
    picks = jnp.where(weights > 0.3, picks, EXPERTS).reshape(-1)
    row = jnp.repeat(jnp.arange(len(x)), 2)
    _, row, weight = lax.sort((picks, row, weights.reshape(-1)), num_keys=1)
    rows = products(layer, x[row], (picks[:, None] == jnp.arange(EXPERTS)).sum(0, dtype=jnp.int32))
    return jnp.zeros_like(x).at[row].add(rows * weight[:, None])


def by_kernels(layer: Tree, x: jax.Array) -> jax.Array:
    """JAX's kernels in the place of `ragged_dot`; a microbatch has fewer rows than fill their tiles."""

    def multiply(rows: jax.Array, weights: jax.Array) -> jax.Array:
        return megablox.gmm(rows, weights, sizes, jnp.float32, (len(x), WIDTH, WIDTH), interpret=True)

    pick = (x @ layer["router"]).argmax(-1)
    order, sizes = jnp.argsort(pick), jnp.bincount(pick, length=EXPERTS).astype(jnp.int32)
    return jnp.zeros_like(x).at[order].set(multiply(x[order], layer["up"]))


def model(experts, params: Tree, x: jax.Array, scanned: bool = False) -> jax.Array:
    def layer(x, params):
        return x + experts(params, x.reshape(-1, WIDTH)).reshape(x.shape), None

    if scanned:
        return lax.scan(layer, x, params)[0]
    for k in range(LAYERS):
        x, _ = layer(x, jax.tree.map(lambda leaf, k=k: leaf[k], params))
    return x


def case_of(experts, scanned: bool = False) -> Case:
    def loss(params: Tree, batch: Tree) -> jax.Array:
        return jnp.mean((model(experts, params, batch["x"], scanned) - batch["y"]) ** 2)

    return Case(sgd(loss), expert_params, batch=sequences)


EVERY = [*itertools.product([written_back, taken_back, added_up, by_kernels], [False, True])]


@pytest.mark.parametrize(
    "experts, scanned",
    [
        *EVERY,
        *itertools.product([balanced, ordered_gradients, numbers_in_order, sorted_along], [False, True]),
        *[(counted_by(name), k % 2 == 1) for k, name in enumerate(COUNTS)],
        (counted_by("ends"), True),
        (counted_by("edges"), True),
    ],
)
def test_in_parts(experts, scanned):
    """The program in 4 parts computes the same, and nothing in it sorts or multiplies all rows at once."""
    case = case_of(experts, scanned)
    program, _ = traced(case)
    parts = sort_in_parts(program.jaxpr, 4)
    check_program(parts)
    kinds = primitives_in(parts.eqns)
    assert kinds["grouped_product"] and not kinds["ragged_dot_general"]
    operands = program.flatten_inputs(jax.tree.leaves((case.state(), case.batch())))
    run = jax.jit(lambda *args: eval_jaxpr(parts, (), *args))
    assert_same(program.unflatten_outputs(run(*operands)), full_batch(case))


@pytest.mark.parametrize(
    "experts, scanned", [(written_back, True), (taken_back, False), (added_up, True), (by_kernels, False)]
)
def test_each_microbatch_sorts_its_own_rows(experts, scanned):
    case = case_of(experts, scanned)
    program, split = split_case(case, 2)
    outside = primitives_in([*split.before, *split.after])
    assert primitives_in(split.loop.eqns)["grouped_product"] and not outside["grouped_product"]
    assert_same(run_split(case, program, split), full_batch(case))


def sorted_by(x: jax.Array, layer: Tree):
    pick = (x @ layer["router"]).argmax(-1)
    return jnp.argsort(pick), pick


def numbered(layer, x):
    order, _ = sorted_by(x, layer)
    return jnp.zeros_like(x).at[order].add(x[order] * order[:, None])


def summed_up(layer, x):
    order, _ = sorted_by(x, layer)
    return jnp.cumsum(x[order], 0)[jnp.argsort(order)]


def neighbours(layer, x):
    order, _ = sorted_by(x, layer)
    rows = x[order].reshape(-1, 2, WIDTH).sum(1, keepdims=True)
    return jnp.repeat(rows, 2, 1).reshape(x.shape)[jnp.argsort(order)]


def other_sizes(layer, x):
    """Groups are as long as another choice has rows."""
    order, pick = sorted_by(x, layer)
    sizes = jnp.bincount((pick + 1) % EXPERTS, length=EXPERTS)
    return lax.ragged_dot(x[order], layer["up"], sizes)[jnp.argsort(order)]


def counted_twice(layer, x):
    """The rows of each expert and of the one before."""
    order, pick = sorted_by(x, layer)
    rows = jnp.sort(pick)
    ends = jnp.searchsorted(rows, jnp.arange(EXPERTS), side="right")
    sizes = ends - jnp.searchsorted(rows, jnp.arange(EXPERTS) - 1)
    return lax.ragged_dot(x[order], layer["up"], sizes)[jnp.argsort(order)]


def without_the_first(layer, x):
    order, pick = sorted_by(x, layer)
    sizes = jnp.diff(jnp.searchsorted(jnp.sort(pick), jnp.arange(1, EXPERTS + 2)))
    return lax.ragged_dot(x[order], layer["up"], sizes)[jnp.argsort(order)]


def not_in_order(layer, x):
    """Whether keys stand at the places of others: rows and sorted rows of a key do not belong together."""
    order, pick = sorted_by(x, layer)
    moved = jnp.where(jnp.sort(pick) > 0, pick, 0)
    return lax.ragged_dot(x[order], layer["up"], jnp.bincount(moved, length=EXPERTS))[jnp.argsort(order)]


def folded_far_away(layer, x):
    """Groups that go up with the key, but for some that no pick is."""
    order, pick = sorted_by(x, layer)
    sizes = jnp.bincount(jnp.where((pick > 5000) & (pick < 6000), 0, pick), length=EXPERTS)
    return lax.ragged_dot(x[order], layer["up"], sizes)[jnp.argsort(order)]


def two_orders(layer, x):
    order, pick = sorted_by(x, layer)
    other = jnp.argsort(-pick)
    return (x[order] + x[other])[jnp.argsort(order)]


def half_of_them(layer, x):
    order, _ = sorted_by(x, layer)
    return jnp.zeros_like(x).at[order[: len(order) // 2]].add(x[order[: len(order) // 2]])


def left_in_order(layer, x):
    order, _ = sorted_by(x, layer)
    return x[order] * jnp.tanh(x)


def shifted(layer, x):
    order, _ = sorted_by(x, layer)
    return x[jnp.minimum(order + 1, len(x) - 1)][jnp.argsort(order)]


def repeated_behind(layer, x):
    """`order % rows`: the second copies of all rows stand behind all first ones."""
    pick = jnp.tile((x @ layer["router"]).argmax(-1), 2)
    order = jnp.argsort(pick)
    return x[order % len(x)][jnp.argsort(order)].reshape(2, -1, WIDTH).sum(0)


def negative_picks(layer, x):
    """Rows of no expert stand before those of the first one, and one-hot rows do not count them."""
    order, pick = sorted_by(x, layer)
    sizes = jax.nn.one_hot(pick - 1, EXPERTS, dtype=jnp.int32).sum(0)
    return lax.ragged_dot(x[order], layer["up"], sizes)[jnp.argsort(order)]


def carried(layer, x):
    """Rows in the order of one trip, at the places of the next."""

    def trip(rows, shift):
        order = jnp.argsort((x @ layer["router"] + shift).argmax(-1))
        return x[order], rows + x[order]

    return lax.scan(trip, jnp.zeros_like(x), layer["router"][:2])[1].sum(0)


NO_ROWS = [
    numbered,
    summed_up,
    neighbours,
    other_sizes,
    counted_twice,
    without_the_first,
    not_in_order,
    folded_far_away,
    two_orders,
    half_of_them,
    left_in_order,
    shifted,
    negative_picks,
    carried,
]


@pytest.mark.parametrize("experts", NO_ROWS)
def test_what_is_not_by_rows_stays_as_it_is(experts):
    program, _ = traced(case_of(experts))
    assert sort_in_parts(program.jaxpr, 4, 2) is program.jaxpr


@pytest.mark.parametrize("experts", [*NO_ROWS, repeated_behind])
def test_what_is_not_by_rows(experts):
    """Refused, with what to write; the last one is by rows, but its parts do not lie as a microbatch has them."""
    with pytest.raises(MicrobatchError, match="samples of the whole batch"):
        split_case(case_of(experts), 2)


def test_layers_that_mix_their_orders():
    """What one layer sorted, at the places of another's."""

    def loss(params: Tree, batch: Tree) -> jax.Array:
        def layer(x, params):
            order, _ = sorted_by(x, params)
            return jnp.tanh(x), x[order]

        x, stacked = lax.scan(layer, batch["x"].reshape(-1, WIDTH), params)
        order, _ = sorted_by(x, jax.tree.map(lambda leaf: leaf[0], params))
        return jnp.mean((x[order] + jnp.tanh(stacked).sum(0)) ** 2)

    with pytest.raises(MicrobatchError, match="samples of the whole batch"):
        split_case(Case(sgd(loss), expert_params, batch=sequences), 2)


def test_sorted_rows_of_all_layers_in_half_precision():
    """Each layer's rows, in its own order, are kept for a second loop; they are cast between the loops."""

    def loss(params: Tree, batch: Tree) -> jax.Array:
        def layer(x, layer):
            order, pick = sorted_by(x, layer)
            rows = products(layer, x[order], jnp.bincount(pick, length=EXPERTS).astype(jnp.int32))
            return x + rows[jnp.argsort(order)], (rows, order)

        def put_back(total, made):
            rows, order = made
            return total + rows[jnp.argsort(order)].astype(jnp.float32), None

        x, (rows, orders) = lax.scan(layer, batch["x"].reshape(-1, WIDTH), params)
        return jnp.mean(lax.scan(put_back, x, (rows.astype(jnp.bfloat16), orders))[0] ** 2)

    case = Case(sgd(loss), expert_params, batch=sequences)
    program, split = split_case(case, 2)
    assert_same(run_split(case, program, split), full_batch(case))


def test_the_mean_of_sorted_samples():
    """Samples in the order of their lengths, as for packing: each microbatch has its own order, and the same mean."""

    def loss(params: Tree, batch: Tree) -> jax.Array:
        order = jnp.argsort(jnp.tanh(batch["x"] @ params["w1"])[:, 0])
        rows = jnp.tanh(batch["x"] @ params["w1"])[order] @ params["w2"]
        return jnp.mean((rows - batch["y"][order]) ** 2)

    case = Case(sgd(loss))
    program, split = split_case(case, 4)
    assert_same(run_split(case, program, split), full_batch(case))
