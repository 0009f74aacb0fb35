"""The sharded program has the conversions that were chosen, where they are first needed, and no others."""

import jax
import jax.numpy as jnp
import pytest

from autopar import Cluster
from autopar.intra_op.build_graph import build_graph
from autopar.intra_op.costs import build_problem
from autopar.intra_op.exposure import show
from autopar.intra_op.lower import lower
from autopar.intra_op.sharded import Body, Compute, Move, Region, collectives_of
from autopar.ir.trace.trace import trace_step
from autopar.mesh import Sharding, logical_mesh

N = 8
ROWS, COLUMNS, WHOLE = Sharding((("x",), ())), Sharding(((), ("x",))), Sharding(((), ()))


def lowered(step, given, result, **wanted) -> Body:
    """A step on one array over two devices: arguments and results lie so, and each operation's result as is `wanted`."""
    program = trace_step(step, [jax.ShapeDtypeStruct((N, N), jnp.float32)])
    graph = build_graph(program.jaxpr, logical_mesh(Cluster(1, 2), (2,)), {})
    at_ends = dict.fromkeys(graph.inputs, given) | dict.fromkeys(graph.outputs, result)

    def choice(node) -> int:
        sharding = at_ends.get(node.index, wanted.get(node.name, wanted.get("others", result)))
        offered = [strategy.results[0] for strategy in node.strategies] or list(node.shardings)
        return offered.index(sharding)

    return lower(graph, [choice(node) for node in graph.nodes])


def words(body: Body) -> list[str]:
    """What is computed, and from which sharding to which is converted, in order."""
    found = []
    for instruction in body.instructions:
        match instruction:
            case Compute(eqn):
                found.append(eqn.primitive.name)
            case Move(_, source, target):
                found.append(f"{source} => {target}")
            case Region(eqn, bodies=bodies):
                found += [eqn.primitive.name, *(word for each in bodies for word in words(each))]
    return found


def test_where_all_agree_nothing_is_converted():
    assert words(lowered(lambda x: jnp.cos(jnp.sin(x)), ROWS, ROWS)) == ["sin", "cos"]


def test_a_value_is_converted_once_where_it_is_first_needed():
    def step(x):
        first = jnp.sin(x)
        return jnp.exp(jnp.tanh(first)), jnp.cos(first)

    body = lowered(step, ROWS, COLUMNS, sin=ROWS)
    assert words(body) == ["sin", f"{ROWS} => {COLUMNS}", "tanh", "exp", "cos"]


def test_no_conversion_that_nothing_reads():
    """Where a value's hub lies no reader wants it, nor is it nearer from there."""

    def step(x):
        first = jnp.sin(x)
        return jnp.tanh(first), jnp.cos(first)

    body = lowered(step, ROWS, WHOLE, sin=ROWS, **{"hub f": COLUMNS})
    assert words(body) == ["sin", f"{ROWS} => {WHOLE}", "tanh", "cos"]


def test_what_leaves_in_another_sharding_is_converted_last():
    assert words(lowered(jnp.sin, ROWS, WHOLE, sin=ROWS)) == ["sin", f"{ROWS} => {WHOLE}"]


@pytest.mark.parametrize("result, steps", [(COLUMNS, 1), (WHOLE, 1)])
def test_a_partial_sum_becomes_what_is_asked_for(result, steps):
    partial = Sharding(((), ()), ("x",))
    made = words(lowered(lambda x: x @ jnp.ones((N, N)), COLUMNS, result, dot_general=partial, broadcast_in_dim=ROWS))
    assert made[-1] == f"{partial} => {result}" and len(made) == 2 + steps


def test_a_loop_converts_inside_what_it_carries_in_another_sharding():
    def step(x):
        return jax.lax.fori_loop(0, 3, lambda _, carry: jnp.tanh(jnp.sin(carry)), x)

    made = words(lowered(step, ROWS, ROWS, sin=ROWS, tanh=COLUMNS, others=ROWS))
    at = made.index("scan") if "scan" in made else made.index("while")
    inside = [word for word in made[at + 1 :] if word not in ("add", "lt")]
    assert inside == ["sin", f"{ROWS} => {COLUMNS}", "tanh", f"{COLUMNS} => {ROWS}"] and not made[:at]


@pytest.mark.parametrize("batch, steps", [(1, 1), (0, 3)], ids=["parameter", "samples"])
def test_a_conversion_takes_the_route_that_was_priced(batch, steps):
    """A gather over two axes of slow links: alone it is faster in three steps, but a small parameter's is sent with others."""
    cluster = Cluster.of("16x8 a100")
    array = jax.ShapeDtypeStruct((1024, 3072), jnp.bfloat16)
    program = trace_step(lambda one, _: jnp.sin(one), [array, array])
    graph = build_graph(program.jaxpr, logical_mesh(cluster, (2, 8, 8)), {}, [batch])
    given, whole = Sharding(((), ("y", "z"))), Sharding(((), ()))
    choices = [
        [s.results[0] for s in node.strategies].index(whole)
        if node.strategies
        else node.shardings.index(given if node.index in graph.inputs else whole)
        for node in graph.nodes
    ]
    body, problem = lower(graph, choices), build_problem(graph, cluster.device, range(len(graph.nodes)))
    sent = list(collectives_of(body, graph.mesh))
    priced = sum(float(matrix[choices[u], choices[v]]) for (u, v), matrix in problem.edges.items())
    assert sum(one.priced_seconds for one in show(graph, body, [0.0] * len(sent))) == pytest.approx(priced)
    assert len(sent) == steps
