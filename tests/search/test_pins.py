"""The user's pins where stages are planned: constraints on arguments, and `with_sharding_constraint` within a stage."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import ConstraintError, InfeasibleError
from autopar.search.request import Request
from autopar.search.stage_search import Stages, search_pipelines
from tests.sweep import QUICK, SLOW, _host, relative_error

WIDTH, ROWS, NUM_LAYERS = 16, 32, 4
AUTO = (jax.sharding.AxisType.Auto,) * 2


def make_step(spec=None, kind="scan"):
    def layer_fn(x, layer):
        y = jnp.tanh(x @ layer["kernel"] + layer["bias"])
        return x + (y if spec is None else jax.lax.with_sharding_constraint(y, spec)), None

    def loss_fn(params, batch):
        x = batch @ params["embed"]
        if kind == "scan":
            x, _ = jax.lax.scan(layer_fn, x, params["layers"])
        else:
            for kernel, bias in zip(params["layers"]["kernel"], params["layers"]["bias"], strict=True):
                x, _ = layer_fn(x, {"kernel": kernel, "bias": bias})
        return jnp.mean((x @ params["head"]) ** 2)

    def step(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def arguments():
    random = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(random.normal(size=shape).astype(np.float32) / 4)

    layers = {"kernel": draw(NUM_LAYERS, WIDTH, WIDTH), "bias": draw(NUM_LAYERS, WIDTH)}
    return {"embed": draw(WIDTH, WIDTH), "layers": layers, "head": draw(WIDTH, WIDTH)}, draw(ROWS, WIDTH)


def parallel(method, step=None, cluster=None):
    cluster = cluster or autopar.Cluster(1, 8, SLOW, QUICK)
    return autopar.parallelize(step or make_step(), cluster=cluster, method=method, batch_argnums=(1,))


def planned(method, step=None, cluster=None):
    return parallel(method, step, cluster).plan(*arguments())


def pipeline(**settings):
    return autopar.PipelineParallel(num_stages=2, **{"num_microbatches": 4, **settings})


def three_d(**settings):
    return autopar.ThreeD(data=2, tensor=2, pipeline=2, num_microbatches=4, **settings)


@pytest.mark.parametrize(
    "method, path, spec, want",
    [
        (pipeline, "params/embed", P("x"), "P('x', None)"),
        (pipeline, "params/head", P(None, "y"), "P(None, 'y')"),
        (pipeline, "params/layers/kernel", P(None, None, "x"), "P(None, None, 'x')"),
        (pipeline, "params/layers/kernel", P("x"), "P('x', None, None)"),
        (pipeline, "params/layers/*", P(), "P(None, None)"),
        (pipeline, "batch", P("x"), "P('x', None)"),
        (three_d, "params/layers/kernel", P(None, "tensor"), "P(None, 'tensor', None)"),
        (three_d, "params/head", [["tensor"]], "P('tensor', None)"),
    ],
)
def test_arguments_lie_as_pinned(method, path, spec, want):
    plan = planned(method(constraints={path: spec}))
    params, batch = plan.shardings[0]
    lying = {"batch": batch, "embed": params["embed"], "head": params["head"], **params["layers"]}
    names = ["kernel", "bias"] if path.endswith("*") else [path.rsplit("/", 1)[-1]]
    for name in names:
        assert str(lying[name]) == (want if name != "kernel" or path[-1] != "*" else "P(None, None, None)")


@pytest.mark.parametrize("method", [pipeline, three_d, autopar.Auto, autopar.ShardParallel])
@pytest.mark.parametrize(
    "constraints, text",
    [
        ({"params/heat": P()}, "there are params/head, .*params/embed"),
        ({"params/head": 3}, "is of type int, not PartitionSpec"),
    ],
)
def test_mistakes_are_told(method, constraints, text):
    with pytest.raises(ConstraintError, match=text):
        planned(method(constraints=constraints))


@pytest.mark.parametrize(
    "method, path, spec, text",
    [
        (pipeline, "params/layers/kernel", P("nope"), r"on params/layers/kernel\[0:2\].*has no axis 'nope'"),
        (three_d, "params/head", P("x"), "has no axis 'x'; its axes are 'data', 'tensor'"),
        (
            three_d,
            "params/head",
            P("data"),
            "constraint 'params/head' pins .*; the method keeps state whole over axis 'data'",
        ),
        (
            lambda **s: pipeline(num_microbatches=16, **s),
            "batch",
            P(("x", "y")),
            "on batch, 16 microbatches.*length 2, which 4 devices do not divide",
        ),
    ],
)
def test_what_cannot_be_kept_is_told(method, path, spec, text):
    with pytest.raises((ConstraintError, InfeasibleError), match=f"(?s){text}"):
        planned(method(constraints={path: spec}))


def test_equal_stages_pinned_otherwise():
    """What one of two equal stages was pinned to is not taken over by the other."""
    names = "abcd"

    def step(params, batch):
        def loss_fn(params):
            x = batch
            for name in names:
                x = jnp.tanh(x @ params[name])
            return jnp.mean(x**2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params = {name: jax.ShapeDtypeStruct((WIDTH, WIDTH), np.float32) for name in names}
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32)
    constraints = {"params/b": P("x"), "params/c": P(None, "x")}
    method = autopar.PipelineParallel(num_stages=4, num_microbatches=4, constraints=constraints)
    lying = parallel(method, step).plan(params, batch).shardings[0][0]
    assert (str(lying["b"]), str(lying["c"])) == ("P('x', None)", "P(None, 'x')")


def test_the_search_keeps_pins():
    cluster = autopar.Cluster(2, 4, SLOW, intra=QUICK, inter=autopar.Link(1e-5, 1e8))
    method = autopar.Auto(constraints={"params/layers/kernel": P(None, None, "x"), "params/head": P()})
    origin = planned(method, cluster=cluster).origin
    stages = Stages()
    search_pipelines(Request(origin.program, origin.roles, cluster, method), stages)
    found = stages.best
    assert found is not None, stages.tried
    lies = {}
    for stage in found.stages:
        for at, var in stage.program.arguments.items():
            k = found.cut.program.jaxpr.invars.index(var)
            lies[found.cut.program.in_paths[k]] = stage.sharded.input_sharding(at).dims
    kernels = [dims for path, dims in lies.items() if "kernel" in path]
    assert kernels and set(kernels) == {((), (), ("x",))}
    assert lies["params/head"] == ((), ())


def test_pinned_stacks_run():
    constraints = {"params/layers/kernel": P(None, "y"), "params/layers/bias": P("x"), "batch": P("x")}
    cluster = autopar.Cluster.local(jax.devices(), device=SLOW, intra=QUICK)
    params, batch = arguments()
    want = jax.jit(make_step())(params, batch)
    compiled = parallel(pipeline(constraints=constraints), cluster=cluster).compile(params, batch)
    got = compiled(params, batch)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_error(_host(a), np.asarray(b)) < 1e-5


def pinned_operations(plan):
    """How the results of the step's `with_sharding_constraint`s lie."""
    for stage in plan.origin.pipeline.stages:
        graph, choices = stage.sharded.graph, stage.sharded.choices
        for task in stage.tasks:
            for eqn in task.task.jaxpr.eqns:
                if eqn.primitive.name == "sharding_constraint":
                    node = graph.op_node[eqn]
                    yield graph.nodes[node].strategies[choices[node]].results[0].dims


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("spec, dims", [(P("x"), (("x",), ())), (P(None, "y"), ((), ("y",))), (P(), ((), ()))])
def test_constraints_in_a_stage_are_kept(spec, dims, num_microbatches):
    """Of a microbatch as of the whole batch; on a mesh that has the axes."""
    mesh = jax.sharding.AbstractMesh((2, 4), ("x", "y"), axis_types=AUTO)
    step = make_step(NamedSharding(mesh, spec), "unrolled")
    found = list(pinned_operations(planned(pipeline(num_microbatches=num_microbatches), step)))
    assert len(found) >= 2 * NUM_LAYERS, "forward and backward"
    assert set(found) == {dims}


def test_constraint_in_a_stage_that_no_mesh_can_keep():
    mesh = jax.sharding.AbstractMesh((2, 4), ("x", "model"), axis_types=AUTO)
    with pytest.raises(ConstraintError, match=r"(?s)with_sharding_constraint at .*has no axis 'model'"):
        planned(pipeline(), make_step(NamedSharding(mesh, P(None, "model")), "unrolled"))


@pytest.mark.parametrize("method", [autopar.Auto(), autopar.ShardParallel()], ids=str)
def test_the_mesh_of_constraints_is_planned(method):
    """If it is as large as the cluster and they name its axes; those of one device split nothing."""
    mesh = jax.sharding.AbstractMesh((4, 1, 2), ("data", "context", "model"), axis_types=(*AUTO, AUTO[0]))
    plan = planned(method, make_step(NamedSharding(mesh, P(("data", "context"), "model"))))
    assert (plan.mesh.shape, plan.mesh.axis_names) == ((4, 2), ("data", "model"))
    with pytest.raises(ConstraintError, match="(?s)has no axis .data..*leave the constraint out"):
        planned(method, make_step(NamedSharding(mesh, P("data"))), autopar.Cluster(1, 4, SLOW, QUICK))
