"""What operations bring through memory: elementwise work between products is one pass, indexing touches what it picks."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from autopar import Achieved, Device
from autopar.cost.kernels import MemoryPass, Product, kernel_seconds
from autopar.intra_op.build_graph import build_graph
from autopar.intra_op.kernels import kernel_of
from autopar.intra_op.traffic import find_traffic
from autopar.ir.trace.trace import trace_step
from autopar.mesh import LogicalMesh

MESH = LogicalMesh((1,))
ROWS, WIDTH = 64, 32
X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
W = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
SIZE = ROWS * WIDTH * 4


def passes(fun, *args, batch=()):
    """Bytes that all but products move, in arrays of X's size, and the kernels launched for them."""
    graph = build_graph(trace_step(fun, args).jaxpr, MESH, {}, batch)
    traffic = find_traffic(graph)
    moved = launches = 0.0
    for node in graph.nodes:
        if node.kind == "op" and node.name != "dot_general":
            kernel = kernel_of(node, node.strategies[0], traffic[node.index], MESH)
            moved, launches = moved + kernel.num_bytes, launches + traffic[node.index].launches
    return moved / SIZE, launches


@pytest.mark.parametrize(
    "terms, is_pass",
    [("bij,bjk->bik", False), ("bi,bi->b", True), ("bij,bj->bi", True), ("bi,bj->bij", True), ("bij,bkj->bik", False)],
)
def test_products_with_vectors_are_passes(terms, is_pass):
    shapes = [jax.ShapeDtypeStruct((8,) * len(term), jnp.float32) for term in terms.split("->")[0].split(",")]
    graph = build_graph(trace_step(lambda a, b: jnp.einsum(terms, a, b), shapes).jaxpr, MESH, {})
    (node,) = (node for node in graph.nodes if node.name == "dot_general")
    kernel = kernel_of(node, node.strategies[0], find_traffic(graph)[node.index], MESH)
    assert isinstance(kernel, MemoryPass if is_pass else Product)
    assert 0 < kernel.num_bytes <= 4 * sum(8 ** len(term) for term in terms.replace("->", ",").split(","))


@pytest.mark.parametrize(
    "device", [Device("one rate", 1e12), Device("by dtype", {"bfloat16": 1e12, "float32": 1e11})], ids=str
)
def test_a_product_of_masks_takes_time(device):
    masks = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bool_), jax.ShapeDtypeStruct((WIDTH, ROWS), jnp.bool_)
    graph = build_graph(trace_step(lambda a, b: a @ b, masks).jaxpr, MESH, {})
    (node,) = (node for node in graph.nodes if node.name == "dot_general")
    kernel = kernel_of(node, node.strategies[0], find_traffic(graph)[node.index], MESH)
    assert isinstance(kernel, Product)
    assert 0 < kernel_seconds(kernel, device) < 1


@pytest.mark.parametrize(
    "fun, args, arrays, kernels",
    [
        # In and out, whatever is in between and however often it is read.
        (lambda x: jnp.tanh(x * x + x) * x, (X,), 2, 1),
        (lambda x, w: jax.nn.gelu(x @ w) @ w, (X, W), 2, 1),
        # A residual is read where it is added.
        (lambda x, w: x + jnp.tanh(x @ w), (X, W), 3, 1),
        # What is made of one array is made again later rather than stored wide.
        (lambda x, w: (jnp.sin(x) @ w) * jnp.sin(x), (X, W), 5, 2),
        # A normalization and a softmax are one kernel each.
        (lambda x, w: ((x - x.mean(-1, keepdims=True)) * 2) @ w, (X, W), 2, 1),
        (lambda x, w: jax.nn.softmax(x @ w) @ w, (X, W), 2, 1),
        # What is made of one array and a few numbers is, too.
        (
            lambda x, w, row: (jnp.sin(x - row) @ w) * (x - row),
            (X, W, jax.ShapeDtypeStruct((WIDTH,), jnp.float32)),
            5,
            2,
        ),
        # Views are nothing.
        (lambda x, w: (x.reshape(8, 8, WIDTH).reshape(ROWS, WIDTH)) @ w, (X, W), 0, 0),
    ],
)
def test_passes(fun, args, arrays, kernels):
    moved, launches = passes(fun, *args)
    assert moved == pytest.approx(arrays, rel=0.1)
    assert launches == kernels


@pytest.mark.parametrize(
    "fun, args, arrays",
    [
        # What the program is given, or a kernel of its own makes, is read as it lies: one element of each line.
        (lambda x: jnp.sin(x.T), (X,), 1),
        (lambda x: jnp.sin(jnp.sort(x).T), (X,), 1),
        (lambda x: jnp.sin(x.reshape(8, 8, WIDTH).transpose(0, 2, 1).reshape(8, -1)), (X,), 1),
        # Elementwise work writes as its reader wants it, and products make what is read.
        (lambda x, w: jnp.sin((x @ w).T), (X, W), 0),
        (lambda x: jnp.sin(x).T * 2, (X,), 0),
        # So it is if lines stay together: loops compute the place of each element.
        (lambda x: jnp.sin(x.reshape(8, 8, WIDTH).swapaxes(0, 1)), (X,), 1),
        # Nothing moves; products read either way.
        (lambda x: jnp.sin(x.reshape(ROWS, 1, WIDTH).transpose(0, 2, 1)), (X,), 0),
        (lambda x: jnp.sin(x.reshape(WIDTH, ROWS)), (X,), 0),
        (lambda x, w: x.T @ (x @ w), (X, W), 0),
    ],
)
def test_arrays_that_lie_turned(fun, args, arrays):
    graph = build_graph(trace_step(fun, args).jaxpr, MESH, {})
    traffic = find_traffic(graph)
    ops = [node for node in graph.nodes if node.kind == "op"]
    kernels = [kernel_of(node, node.strategies[0], traffic[node.index], MESH) for node in ops]
    assert sum(kernel.turned_bytes for kernel in kernels if isinstance(kernel, MemoryPass)) == arrays * SIZE


@pytest.mark.parametrize(
    "terms, copied",
    [
        # Heads lie between tokens: each is gathered before it is multiplied.
        ("bqhd,bkhd->bhqk", 2),
        ("bhqk,bkhd->bqhd", 1),
        ("bkq,bkd->bqd", 0),
        ("btx,bty->xy", 0),
        ("xbk,bky->bxy", 1),
    ],
)
def test_operands_that_products_copy_first(terms, copied):
    """Libraries read rows and depth in either order, with the batch before them."""
    shapes = [jax.ShapeDtypeStruct((8,) * len(term), jnp.float32) for term in terms.split("->")[0].split(",")]
    graph = build_graph(trace_step(lambda a, b: jnp.einsum(terms, a, b), shapes).jaxpr, MESH, {})
    (node,) = [node for node in graph.nodes if node.name == "dot_general"]
    kernel = kernel_of(node, node.strategies[0], find_traffic(graph)[node.index], MESH)
    assert isinstance(kernel, Product) and kernel.turned_bytes == copied * 4 * 8 ** len(terms.split(",")[0])
    slow = Device("d", 1e12, memory_bytes_per_second=1e9, achieved=Achieved(turning=5.0))
    seconds = kernel_seconds(kernel, slow) - kernel_seconds(kernel, Device("d", 1e12, memory_bytes_per_second=1e9))
    assert seconds == pytest.approx(4 * kernel.turned_bytes / 1e9)


def test_indexing_touches_what_it_picks():
    table = jax.ShapeDtypeStruct((4096, WIDTH), jnp.float32)
    rows = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    moved, _ = passes(lambda table, rows: table.at[rows].get(mode="promise_in_bounds"), table, rows)
    assert moved == pytest.approx(2, rel=0.1), "not the table's 64 times as many"
    start = jax.ShapeDtypeStruct((), jnp.int32)
    moved, _ = passes(lambda table, x, k: jax.lax.dynamic_update_slice(table, x, (k, 0)), table, X, start)
    assert moved < 4


def test_a_sum_of_what_is_made_again_is_read():
    """Of one that two pads make a single number adds up, as gradients are for their norm, and that is not split."""

    def step(x, y):
        both = jnp.pad(x, ((0, 0), (0, WIDTH))) + jnp.pad(y, ((0, 0), (WIDTH, 0)))
        return jnp.sum(both.sum(0) ** 2) + jnp.sum(x @ x.T)

    graph = build_graph(trace_step(step, (X, X)).jaxpr, LogicalMesh((4,)), {})
    last = [node for node in graph.nodes if node.kind == "op"][-1]
    assert last.name == "add" and find_traffic(graph)[last.index].counts == (1, 0, 1)


def test_an_operation_without_results():
    """A callback that is only called."""

    def step(x):
        jax.debug.callback(lambda total: None, x.sum())
        return jnp.tanh(x)

    assert passes(step, X)[0] >= 2


def test_a_kernel_is_not_fused_with_its_neighbours():
    """Even one that works on single elements, of which no dim is whole: in and out each, three times."""

    def double(x):
        block = pl.BlockSpec((None, None), lambda i, j: (i, j))
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        call = pl.pallas_call(_double, grid=x.shape, in_specs=[block], out_specs=block, out_shape=out, interpret=True)
        return call(x)

    moved, launches = passes(lambda x: jnp.tanh(double(jnp.sin(x))), X)
    assert (moved, launches) == (pytest.approx(6, rel=0.1), 3)


def _double(x, out):
    out[...] = x[...] * 2


def test_updates_work_on_parameters():
    """What compilers make of an optimizer's work is other than what they make of a layer's, and is priced by itself."""

    def step(w, x):
        gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - 0.1 * gradient / (1e-8 + jnp.sqrt(gradient**2))

    graph = build_graph(trace_step(step, (W, X)).jaxpr, MESH, {}, (1,))
    kernels = {
        node.name: kernel_of(node, node.strategies[0], traffic, MESH)
        for node, traffic in ((graph.nodes[at], traffic) for at, traffic in find_traffic(graph).items())
        if any(traffic.counts)
    }
    assert (kernels["tanh"].on, kernels["sub"].on) == ("samples", "parameters")


def test_an_update_goes_on_with_the_moments_that_it_stores():
    """Array, moments and gradient are read, array and moments written, by one kernel, as XLA for GPUs does it."""

    def adam(w, m, v, x):
        gradient = x.T @ x
        m, v = 0.9 * m + 0.1 * gradient, 0.99 * v + 0.01 * gradient**2
        return w - 0.1 * m / (jnp.sqrt(v) + 1e-8), m, v

    arrays, kernels = passes(adam, W, W, W, X, batch=(3,))
    assert (arrays * SIZE, kernels) == (7 * 4 * WIDTH**2, 1)


@pytest.mark.parametrize("samples", [1, 4])
def test_work_on_samples_is_told_from_work_on_parameters_also_where_there_is_one_sample(samples):
    x = jax.ShapeDtypeStruct((samples, ROWS, WIDTH), jnp.float32)
    graph = build_graph(trace_step(lambda x, w: jnp.tanh(x @ w) * 2, [x, W]).jaxpr, MESH, {}, batch={0: frozenset({0})})
    traffic = find_traffic(graph)
    assert {traffic[node.index].on_samples for node in graph.nodes if node.kind == "op"} == {True}
