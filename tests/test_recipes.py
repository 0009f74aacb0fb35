"""The recipes of CONTRIBUTING.md: one of each, added from outside of the package in seventy lines, and used."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import frameworks
from autopar._jax import Var, eval_jaxpr, make_jaxpr
from autopar.frameworks import Apart, register
from autopar.intra_op.problem import Problem
from autopar.intra_op.searches import SEARCHES
from autopar.intra_op.solve import solve
from autopar.ir.check import check_program
from autopar.ir.rewrite.dead_code import remove_dead_code
from autopar.ir.trace.returned import Objects, Returned
from autopar.ir.trace.trace import trace_step
from autopar.streams.schedules import Step

# A device, and a cluster of them.
SLOW = autopar.Device("slow", peak_flops=1e10, memory_bytes=1e6, memory_bytes_per_second=1e9)
CLUSTER = autopar.Cluster(1, 4, SLOW, intra=autopar.Link(1e-6, 1e8))


# A rule: of a kernel of one's own.
@autopar.sharding_rule("b d, d f -> b f {sum d}", linear=[(0,), (1,)])
def multiply(x, w):
    SHAPES.append(x.shape)
    return x @ w


SHAPES: list[tuple[int, ...]] = []


class LastFirst:
    """A schedule: GPipe whose backward pass begins with the last microbatch."""

    name = "last-first"

    def order(self, num_stages, num_microbatches):
        forward = [Step("F", k) for k in range(num_microbatches)]
        return [[*forward, *(Step("B", step.microbatch) for step in reversed(forward))] for _ in range(num_stages)]


@dataclass(frozen=True)
class Columns(autopar.ShardParallel):
    """A method: every weight of two dims is split by columns, over all devices; what else there is to decide is found."""

    def options(self):
        return replace(super().options(), constraints={"params/*": P(None, "x")})


def restarts(of, steps, random):
    """A solver: each node its best choice, again and again, from choices drawn at random; the best of some."""
    found = [[int(random.integers(len(cost))) for cost in of.costs] for _ in range(max(1, steps // len(of.costs)))]
    for choices in found:
        of.descend(choices, range(len(choices)))
    return min(map(tuple, found), key=of.problem.cost)


def without_double_negation(jaxpr):
    """A pass: who reads -(-x) reads x."""
    negated = {eqn.outvars[0]: eqn.invars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "neg"}
    same = {var: negated[of] for var, of in negated.items() if isinstance(of, Var) and of in negated}
    read = [[same.get(atom, atom) if isinstance(atom, Var) else atom for atom in eqn.invars] for eqn in jaxpr.eqns]
    eqns = [eqn.replace(invars=invars) for eqn, invars in zip(jaxpr.eqns, read, strict=True)]
    return remove_dead_code(make_jaxpr(jaxpr.invars, jaxpr.outvars, eqns))


class Box:
    """What a framework hands to a step: arrays in an object that is no pytree."""

    def __init__(self, arrays):
        self.arrays = arrays


class BoxAdapter:
    """An adapter: the arrays of boxes, and boxes around them again."""

    updates_in_place = False

    def claims(self, args, kwargs):
        return any(isinstance(leaf, Box) for leaf in jax.tree.leaves((args, kwargs)))

    def take_apart(self, args, kwargs):
        static, (args, kwargs) = opened(*jax.tree.flatten((args, kwargs)))
        return Apart(self, args, kwargs, static)

    def rebuild(self, static, args, kwargs):
        return closed(static, (args, kwargs))

    def run(self, fn, static, args, kwargs):
        args, kwargs = self.rebuild(static, args, kwargs)
        after, result = opened(*jax.tree.flatten(fn(*args, **kwargs)))
        return Returned((), result, Objects(static=after))

    def put_together(self, apart, returned):
        return closed(returned.objects.static, returned.result)


def opened(leaves, tree):
    are_boxes = tuple(isinstance(leaf, Box) for leaf in leaves)
    return (tree, are_boxes), tree.unflatten([leaf.arrays if isinstance(leaf, Box) else leaf for leaf in leaves])


def closed(static, arrays):
    tree, are_boxes = static
    given = tree.flatten_up_to(arrays)
    return tree.unflatten([Box(x) if is_box else x for x, is_box in zip(given, are_boxes, strict=True)])


def train_step(params, batch):
    def loss_fn(params):
        return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss


def arguments():
    draw = np.random.default_rng(0).standard_normal
    params = {"up": draw((8, 16)).astype(np.float32), "down": draw((16, 8)).astype(np.float32)}
    return params, {"x": draw((32, 8)).astype(np.float32)}


def test_rule():
    step = autopar.parallelize(lambda w, x: multiply(x, w), method=autopar.ShardParallel(mesh_shape=(8,)))
    x, w = np.ones((64, 8), np.float32), np.ones((8, 8), np.float32)
    np.testing.assert_allclose(step(w, x), x @ w)
    assert (8, 8) in SHAPES  # each of the eight devices multiplies eight of the 64 rows


def test_schedule_and_device():
    method = autopar.PipelineParallel(num_stages=2, schedule=LastFirst(), num_microbatches=4)
    plan = autopar.parallelize(train_step, cluster=CLUSTER, method=method).plan(*arguments())
    events = [event for event in plan.timeline().events if (event.kind, event.stage) == ("B", 1)]
    assert [event.microbatch for event in events] == [3, 2, 1, 0]
    assert max(plan.cost.peak_bytes) < SLOW.memory_bytes and "1 host with 4 slow" in str(plan)


def test_method():
    step = autopar.parallelize(train_step, method=Columns(mesh_shape=(8,)))
    params, batch = arguments()
    wanted, _ = jax.jit(train_step)(params, batch)
    plan = step.plan(params, batch)
    assert "Columns(mesh_shape=(8,))" in str(plan) and plan.shardings[0][0]["up"] == P(None, "x")
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), step(params, batch)[0], wanted)


def test_solver(monkeypatch):
    monkeypatch.setitem(SEARCHES, "restarts", restarts)
    draw = np.random.default_rng(0).random
    edges = {(u, v): draw((3, 3)) for u in range(6) for v in range(u + 1, 6)}  # too dense to be folded away
    problem = Problem([draw(3) for _ in range(6)], edges)
    found = solve(problem, "restarts")
    assert "restarts" in found.solver
    assert found.objective == pytest.approx(solve(problem, "highs").objective)


def test_pass():
    program = trace_step(lambda x: jnp.sin(jnp.negative(jnp.negative(x))) + 1, (np.ones(3, np.float32),))
    rewritten = without_double_negation(program.jaxpr)
    check_program(rewritten)
    assert [eqn.primitive.name for eqn in rewritten.eqns] == ["sin", "add"]
    x = np.linspace(0, 1, 3, dtype=np.float32)
    np.testing.assert_array_equal(eval_jaxpr(rewritten, (), x)[0], eval_jaxpr(program.jaxpr, (), x)[0])


def test_adapter(monkeypatch):
    monkeypatch.setattr(frameworks, "_ADAPTERS", dict(frameworks._ADAPTERS))
    register(__name__, BoxAdapter)

    @autopar.parallelize(method=autopar.ShardParallel(mesh_shape=(8,)))
    def step(model, batch):
        params, loss = train_step(model.arrays, batch)
        return Box(params), loss

    params, batch = arguments()
    wanted, wanted_loss = jax.jit(train_step)(params, batch)
    model, loss = step(Box(params), batch)
    assert isinstance(model, Box)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), model.arrays, wanted)
