"""Which values take memory while they wait, and how long what the others are made of does."""

import jax
import jax.numpy as jnp
import pytest

from autopar import Cluster
from autopar.intra_op.build_graph import build_graph
from autopar.intra_op.held import held_values
from autopar.intra_op.liveness import fullest_moments, measure_liveness
from autopar.intra_op.lower import lower
from autopar.intra_op.memory import broken_memory_rows
from autopar.ir.trace.trace import trace_step
from autopar.mesh import Sharding, logical_mesh
from autopar.tuning import TUNING

N = 64
SQUARE = N * N * 4


def normalized(x, w):
    """A product less its mean, read by two kernels with a product between them."""
    h = x @ w
    centred = h - jnp.mean(h, 1, keepdims=True)
    return (jnp.tanh(centred) @ w) * centred


def masked(x, w):
    mask = jnp.broadcast_to(x[0] > 0, (N, N))
    return jnp.where(mask, jnp.where(mask, x @ w, 1.0) @ w, 2.0)


def added(x, w):
    """Of four arrays, read twice: to make it again would bring all four through memory twice."""
    total = x @ w + x.T @ w + w @ w + w @ x
    return (jnp.tanh(total) @ w) * total


def added_once(x, w):
    """Of two arrays: to make it again moves as much as to read it, and nothing is written."""
    total = x @ w + w @ w
    return (jnp.tanh(total) @ w) * total


def normalized_twice(x, w):
    """Of two arrays and eight rows of numbers: how many they are does not matter to a kernel."""
    sums = [(h, *(jnp.sum(f(h), 0) for f in (jnp.abs, jnp.square, jnp.cos, jnp.sin))) for h in (x @ w, w @ x)]
    total = sum((h - a) * b + c * d for h, a, b, c, d in sums)
    return (jnp.tanh(total) @ w) * total


def sliced(x, w):
    rest = (x @ w)[:-1]
    return (jnp.exp(rest) @ w) * rest


def turned(x, w):
    """Written turned for the product that reads it so: the other reader finds it there."""
    positive = jnp.maximum(x @ w, 0.0)
    return (positive.T @ w) * positive


@pytest.mark.parametrize(
    "step, held",
    [
        (normalized, ["dot_general", "reduce_sum", "tanh", "dot_general", "mul"]),
        (masked, ["dot_general", "select_n", "dot_general", "select_n"]),
        (added, ["dot_general", "transpose", *["dot_general"] * 3, "add", "tanh", "dot_general", "mul"]),
        (added_once, ["dot_general", "dot_general", "tanh", "dot_general", "mul"]),
        (normalized_twice, [*["dot_general"] * 2, *["reduce_sum"] * 8, "tanh", "dot_general", "mul"]),
        (sliced, ["dot_general", "exp", "dot_general", "mul"]),
        (turned, ["dot_general", "max", "dot_general", "mul"]),
    ],
)
def test_what_is_held(step, held):
    program, graph = planned(step)
    found = [e.primitive.name for e in program.jaxpr.eqns if not held_values(graph).keys().isdisjoint(e.outvars)]
    assert found == held


def planned(step):
    program = trace_step(step, [jax.ShapeDtypeStruct((N, N), jnp.float32)] * 2)
    return program, build_graph(program.jaxpr, logical_mesh(Cluster(1, 1), (1,)), {})


def narrow_steps():
    def quotient_taken_wide(x, w):
        h = jnp.tanh(x @ w)
        return (jnp.abs(h) @ w) + h / w

    def sum_taken_wide(x, w):
        h = x @ w + w @ w + w.T @ x
        return (jnp.abs(h) @ w) + h / w

    def taken_as_it_is(x, w):
        h = jnp.tanh(x @ w)
        return (jnp.abs(h) @ w) + h * w

    def multiplied(x, w):
        h = jnp.tanh(x @ w)
        return (h @ w) + h / w

    return [(quotient_taken_wide, 2), (sum_taken_wide, 1), (taken_as_it_is, 1), (multiplied, 1)]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("step, width", narrow_steps())
def test_what_waits_in_float32(step, width, dtype):
    """What is worked out in float32 and read so: a product between its readers finds twice its bytes there."""
    program = trace_step(step, [jax.ShapeDtypeStruct((N, N), dtype)] * 2)
    graph = build_graph(program.jaxpr, logical_mesh(Cluster(1, 1), (1,)), {})
    body = lower(graph, [0] * len(graph.nodes))
    held, size = held_values(graph), N * N * jnp.dtype(dtype).itemsize
    as_typed = measure_liveness(body, graph.mesh, dict.fromkeys(held, 1)).peak_bytes
    expected = width if dtype == jnp.bfloat16 else 1
    assert sorted(held.values())[-1] == expected
    assert measure_liveness(body, graph.mesh, held).peak_bytes == as_typed + (expected - 1) * size


def test_what_the_backward_pass_reads_waits_in_16_bits():
    """A barrier keeps it so; without a backward pass it is there in float32."""

    def forward(x, w):
        h = jnp.tanh(x @ w)
        return (jnp.abs(h) @ w) + h / w

    def backward(x, w):
        return jax.value_and_grad(lambda x: jnp.sum(forward(x, w).astype(jnp.float32)))(x)

    for step, width in ((forward, 2), (backward, 1)):
        program = trace_step(step, [jax.ShapeDtypeStruct((N, N), jnp.bfloat16)] * 2)
        held = held_values(build_graph(program.jaxpr, logical_mesh(Cluster(1, 1), (1,)), {}))
        tanh = next(eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "tanh").outvars[0]
        assert held[tanh] == width


def test_what_a_value_is_made_of_waits_for_its_readers():
    """At the second product of `normalized` there are its operands and result, the first product, and the arguments."""
    program, graph = planned(normalized)
    body = lower(graph, [0] * len(graph.nodes))
    peak = measure_liveness(body, graph.mesh, held_values(graph)).peak_bytes
    assert peak == 5 * SQUARE + 4 * N


@pytest.mark.parametrize("lies, size", [("HWIO", 3), ("OHWI", 3), ("OIHW", 3), ("HWIO", 1), ("OIHW", 1)])
def test_a_kernel_that_is_read_turned_is_there_twice(lies, size):
    """From the first convolution on, to its last reader: kernels for GPUs read output channels, window, input channels."""
    sizes = {"H": size, "W": size, "I": 8, "O": 16}

    def step(x, w):
        numbers = ("NHWC", lies, "NHWC")
        y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)
        return y, jnp.tanh(w)

    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 8, 8, 8), [sizes[name] for name in lies])]
    program = trace_step(step, types)
    graph = build_graph(program.jaxpr, logical_mesh(Cluster(1, 1), (1,)), {})
    body = lower(graph, [0] * len(graph.nodes))
    found = measure_liveness(body, graph.mesh, held_values(graph))
    kernel, image = 4 * 8 * 16 * size**2, 4 * 4 * 8 * 8 * 8
    turned = 0 if lies == "OHWI" or (lies, size) == ("OIHW", 1) else kernel
    assert list(found.curve) == [image + kernel + turned + 2 * image, image + 2 * kernel + turned + 2 * image]


def scattered(x, at, y):
    return jnp.zeros((N, N)).at[at].add(x) + y


@pytest.mark.parametrize("whole", [False, True])
def test_what_is_scattered_takes_memory_unless_it_is_added_as_it_was_made(whole):
    """Into zeros, to be added to `y` by each device's half of the columns: where these are scattered, too, it is part of the
    sum; where all of them are, there is a whole array of its own. The rows of memory say the same."""
    given = [((N, N), "float32"), ((N,), "int32"), ((N, N), "float32")]
    program = trace_step(scattered, [jax.ShapeDtypeStruct(*each) for each in given])
    graph = build_graph(program.jaxpr, logical_mesh(Cluster(1, 2), (2,)), {})
    columns, everything = Sharding(((), ("x",))), Sharding(((), ()))
    choices = [_choice(node, everything if whole and node.name == "scatter-add" else columns) for node in graph.nodes]
    body = lower(graph, choices)
    moments = fullest_moments(body, graph.mesh, held_values(graph), [False] * 3, TUNING.memory_rows)
    arguments, half = SQUARE + 2 * N, SQUARE // 2
    if whole:  # the half of it that is added, then the sum
        assert list(moments[0].curve[-2:]) == [arguments + SQUARE + half, arguments + 2 * half]
    else:
        assert moments[0].curve[-1] == arguments + 4 * N + half  # the sum, and where to scatter
    rows = broken_memory_rows(graph, range(len(graph.nodes)), choices, body, [False] * 3, 0.0)
    assert [row.used(choices) for row in rows] == [moment.peak_bytes for moment in moments]


def _choice(node, sharding):
    """The choice by which a node's value, or its result, is split so; the first, where there is none."""
    given = [strategy.results[0] for strategy in node.strategies] or list(node.shardings)
    return given.index(sharding) if sharding in given else 0


def test_what_pooling_and_its_gradient_read_is_worked_out_in_their_kernels():
    """What is cut off at zero, and the gradient of what is pooled; room is for what windows select, and where it is."""

    def loss(x, w):
        pooled = jax.lax.reduce_window(jnp.maximum(x @ w, 0.0), -jnp.inf, jax.lax.max, (2, 2), (2, 2), "VALID")
        return jnp.sum(jnp.tanh(pooled) ** 2)

    program, graph = planned(jax.grad(loss))
    body = lower(graph, [0] * len(graph.nodes))
    found = measure_liveness(body, graph.mesh, held_values(graph))
    names = [i.eqn.primitive.name for i in body.instructions]
    scattered = names.index("select_and_scatter_add")
    arguments, product, quarter = 2 * SQUARE, SQUARE, SQUARE // 4
    assert found.curve[names.index("max")] == arguments + product
    room = 3 * quarter  # the largest elements, and where they are along two dims
    assert found.curve[scattered] == arguments + product + quarter + SQUARE + room


def test_what_leaves_in_16_bits_is_there_in_32_until_its_last_reader_here():
    """A tangent that the forward pass of a stage leaves for the backward one, and takes itself as it was worked out."""

    def forward(x, w):
        kept = jnp.tanh(x @ w)
        return kept, jnp.sum(kept.astype(jnp.float32) ** 2), (x @ w).T @ x

    given = [jax.ShapeDtypeStruct((N, N), jnp.bfloat16)] * 2
    program = trace_step(forward, given)
    graph = build_graph(program.jaxpr, logical_mesh(Cluster(1, 1), (1,)), {})
    body = lower(graph, [0] * len(graph.nodes))
    names = [i.eqn.primitive.name for i in body.instructions]
    curve = list(measure_liveness(body, graph.mesh, held_values(graph)).curve)
    made, read = names.index("tanh"), names.index("reduce_sum")
    half = N * N * 2
    assert curve[made] - curve[made - 1] == 3 * half and curve[read + 1] < curve[made]


@pytest.mark.parametrize("again, times", [("ab,cb->ac", 1), ("ab,bc->ac", 2)])
def test_8_bit_floats_that_are_summed_along_two_dims_are_there_twice(again, times):
    """`lhs` is summed over its last dim; and over the same, or the other one, in a second product."""

    def products(x, w):
        small = (2 * x).astype(jnp.float8_e4m3fn)
        first = jnp.einsum("ab,bc->ac", small, w, preferred_element_type=jnp.float32)
        return first, jnp.einsum(again, w, small, preferred_element_type=jnp.float32)

    given = [jax.ShapeDtypeStruct((N, N), dtype) for dtype in (jnp.float32, jnp.float8_e4m3fn)]
    program = trace_step(products, given)
    graph = build_graph(program.jaxpr, logical_mesh(Cluster(1, 1), (1,)), {})
    (made,) = (node.eqn.outvars[0] for node in graph.nodes if node.name == "convert_element_type")
    assert held_values(graph)[made] == times
