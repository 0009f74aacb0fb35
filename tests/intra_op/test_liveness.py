"""Bytes alive at each instruction of small programs, counted by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from autopar import Cluster, LogicalMesh
from autopar.cost.steps import AllGather
from autopar.intra_op.build_graph import build_graph
from autopar.intra_op.held import held_values
from autopar.intra_op.liveness import Waiting, fullest_moments, measure_liveness
from autopar.intra_op.lower import lower
from autopar.intra_op.sharded import Move
from autopar.ir.trace.trace import trace_step
from autopar.mesh import Sharding, logical_mesh

N = 16
SQUARE = N * N * 4


def lowered(step, *shapes):
    """A step on one device, and what of it takes memory."""
    program = trace_step(step, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])
    graph = build_graph(program.jaxpr, logical_mesh(Cluster(1, 1), (1,)), {})
    return lower(graph, [0] * len(graph.nodes)), graph.mesh, held_values(graph)


def products(x, w):
    return ((x @ w) @ w) @ w


def test_a_value_lives_from_its_maker_to_its_last_reader():
    (peak,) = fullest_moments(*lowered(products, (N, N), (N, N)))
    assert list(peak.curve) == [3 * SQUARE, 4 * SQUARE, 4 * SQUARE]
    assert (peak.peak_bytes, peak.argument_bytes, peak.moment) == (4 * SQUARE, 2 * SQUARE, 1)
    assert sorted(alive.num_bytes for alive in peak.alive) == [SQUARE] * 4


def test_a_donated_argument_lives_to_its_last_reader():
    body, mesh, stored = lowered(lambda x, w: products(x, w).sum(0), (N, N), (N, N))
    row = N * 4
    found = list(measure_liveness(body, mesh, stored, [True, False]).curve)
    assert found == [3 * SQUARE, 3 * SQUARE, 3 * SQUARE, 2 * SQUARE + row]


def test_nothing_else_is_where_a_result_overwrites_an_argument_later():
    body, mesh, stored = lowered(products, (N, N), (N, N))
    assert list(measure_liveness(body, mesh, stored, [True, False]).curve) == [3 * SQUARE, 4 * SQUARE, 3 * SQUARE]


@pytest.mark.parametrize("dim, more", [(0, 0), (1, SQUARE)])
def test_results_that_are_gathered_along_an_inner_dim_are_transposed(dim, more):
    body, _, stored = lowered(lambda x, w: x @ w, (N, N), (N, N))
    mesh, whole = LogicalMesh((2,)), body.outputs[0][1]
    (product,) = body.instructions
    split = Sharding((*[()] * dim, ("x",), *[()] * (1 - dim)))
    made = body.outputs[0][0]
    strategy = dataclasses.replace(product.strategy, results=(split,))
    moved = dataclasses.replace(
        body,
        instructions=(
            dataclasses.replace(product, strategy=strategy),
            Move(made, split, whole, AllGather(("x",), dim)),
        ),
    )
    assert measure_liveness(moved, mesh, stored).peak_bytes == 2 * SQUARE + SQUARE // 2 + SQUARE + more


def test_what_is_made_again_takes_no_memory_but_what_it_is_made_of_does():
    def step(x, w):
        h = x @ w
        return jnp.maximum(h, 0.0) @ w + jnp.minimum(h, 0.0)

    body, mesh, stored = lowered(step, (N, N), (N, N))
    assert measure_liveness(body, mesh, stored).peak_bytes == 5 * SQUARE  # arguments, `h`, a product, the sum


def test_moments_behind_the_first_are_those_of_other_parts():
    def there_and_back(x, w):
        return jax.lax.dot_general(x @ w, w, (((1,), (1,)), ((), ())))

    def step(x, w, v):
        return there_and_back(there_and_back(x, w) @ x, v)

    body, mesh, stored = lowered(step, (N, N), (N, 3 * N), (N, 2 * N))
    most, other = fullest_moments(body, mesh, stored, count=2)
    assert (most.peak_bytes, other.peak_bytes) == (6 * SQUARE + 4 * SQUARE, 6 * SQUARE + 3 * SQUARE)
    assert most.moment < other.moment


def test_a_loop_adds_what_its_body_needs_and_its_stacks_are_there_from_the_beginning():
    def step(x, w):
        def trip(x, _):
            x = (x @ w) @ w
            return x, x

        return jax.lax.scan(trip, x, None, length=3)

    body, mesh, stored = lowered(step, (N, N), (N, N))
    peak = measure_liveness(body, mesh, stored)
    given, results, inside = 2 * SQUARE, 4 * SQUARE, 2 * SQUARE
    assert peak.peak_bytes == given + results + inside
    assert len({alive.body for alive in peak.alive}) == 2


@pytest.mark.parametrize(
    "read, num_squares",
    [
        (lambda x, row: (x + row) @ x, 2),  # the sum and its product: the sum reads the row in the stack
        (lambda x, row: x @ row, 2),  # the row and the product
        (lambda x, row: (x @ x) @ row + jnp.tanh(row), 3),  # two products, and the row from the second on
        (lambda x, row: ((x @ x) @ x) @ (row + row), 3),  # two products, and the sum that the last one reads
    ],
)
def test_a_row_of_a_stack_takes_memory_only_for_what_reads_it_as_an_array(read, num_squares):
    def step(x, rows):
        return jax.lax.scan(lambda x, row: (read(x, row), None), x, rows)[0]

    peak = measure_liveness(*lowered(step, (N, N), (3, N, N)))
    given, result = 4 * SQUARE, SQUARE
    assert peak.peak_bytes == given + result + num_squares * SQUARE


@pytest.mark.parametrize("dim, more", [(0, 0), (1, SQUARE)])
def test_a_stack_that_is_gathered_along_an_inner_dim_is_transposed_before_a_loop(dim, more):
    """Three squares twice; the loop's body, which begins when that is done, has a row and a product."""

    def step(x, rows):
        return jax.lax.scan(lambda x, row: (x @ row, None), x, rows)[0]

    body, _, stored = lowered(step, (N, N), (3, N, N))
    mesh, (rows, whole) = LogicalMesh((3 if dim == 0 else 2,)), body.inputs[1]
    split = Sharding(tuple(("x",) if d == dim else () for d in range(3)))
    gather = Move(rows, split, whole, AllGather(("x",), dim))
    body = dataclasses.replace(body, inputs=(body.inputs[0], (rows, split)), instructions=(gather, *body.instructions))
    given = SQUARE + 3 * SQUARE // mesh.num_devices
    assert measure_liveness(body, mesh, stored).peak_bytes == given + 3 * SQUARE + SQUARE + 2 * SQUARE + more


@pytest.mark.parametrize(
    "trip, num_squares",
    [
        (lambda total, row: (total + row @ row, None), 2),  # a row and its product, which is added in place
        (lambda total, row: (total + row @ total, None), 3),  # a product reads it, too: the sum is an array of its own
        (lambda total, row: (total + row @ row, total), 6),  # so do those who read the stack of totals, three squares
    ],
)
def test_what_a_loop_adds_up_is_there_once(trip, num_squares):
    def step(x, rows):
        return jax.lax.scan(trip, x @ x, rows)

    peak = measure_liveness(*lowered(step, (N, N), (3, N, N)))
    given, begun = 4 * SQUARE, SQUARE
    assert peak.peak_bytes == given + begun + num_squares * SQUARE


def test_what_loops_gather_of_rows_is_there_for_two_trips():
    def step(x, rows):
        return jax.lax.scan(lambda x, row: (x @ row, None), x, rows)[0]

    body, _, stored = lowered(step, (N, N), (3, N, N))
    (loop,), (inner,) = body.instructions, body.instructions[0].bodies
    mesh, (row, whole) = LogicalMesh((2,)), inner.inputs[1]
    split, stack = (Sharding((*[()] * dims, ("x",), ())) for dims in (0, 1))
    gather = Move(row, split, whole, AllGather(("x",), 0))

    def peak_bytes(*begins):
        moved = dataclasses.replace(
            inner, inputs=(inner.inputs[0], (row, split)), instructions=(*begins, *inner.instructions)
        )
        around = dataclasses.replace(loop, operands=(loop.operands[0], stack), bodies=(moved,))
        given = (body.inputs[0], (body.inputs[1][0], stack))
        return measure_liveness(
            dataclasses.replace(body, inputs=given, instructions=(around,)), mesh, stored
        ).peak_bytes

    given, result, product = SQUARE + 3 * SQUARE // 2, SQUARE, SQUARE
    assert peak_bytes(gather) == given + result + product + 2 * SQUARE
    earlier = dataclasses.replace(gather, earlier=inner.inputs[0])  # waits for what the trip before has left
    assert peak_bytes(earlier) == given + result + product + SQUARE


def test_what_waits_is_there_for_each_microbatch_in_flight():
    def step(x, w):
        h = x @ w
        kept = h @ w
        return ((kept @ w) @ w) @ kept

    body, mesh, stored = lowered(step, (N, N), (N, N))
    kept = body.instructions[1].makes[0][0]
    (one,) = fullest_moments(body, mesh, stored)
    (three,) = fullest_moments(body, mesh, stored, waiting=Waiting(in_flight=3, kept=frozenset([kept])))
    assert three.peak_bytes == one.peak_bytes + 2 * SQUARE
    (less,) = fullest_moments(body, mesh, stored, waiting=Waiting(elsewhere=frozenset([kept])))
    assert less.peak_bytes == one.peak_bytes - SQUARE
