"""A loop waits for what nobody in it needs, if that frees what is large."""

import jax
import jax.numpy as jnp

import autopar
from autopar.intra_op.sharded import Region, local_bytes
from autopar.partition.ahead import done_before
from autopar.partition.program import run_body
from autopar.tuning import TUNING

WIDTH, TOKENS, VOCABULARY = 16, 512, 8192


def train_step(params, tokens):
    def loss_of(params):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), params["embed"][tokens], params["layers"])
        return -jnp.mean(jax.nn.log_softmax(x @ params["head"])[..., 0])

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_of)(params))


def planned(batch):
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {"embed": array(VOCABULARY, WIDTH), "layers": array(2, WIDTH, WIDTH), "head": array(WIDTH, VOCABULARY)}
    method = autopar.DataParallel(zero=0)
    step = autopar.parallelize(train_step, cluster=autopar.Cluster.of("8 h100"), method=method, batch_argnums=(1,))
    (stage,) = step.plan(params, jax.ShapeDtypeStruct((batch, TOKENS), jnp.int32)).attached.pipeline.stages
    return stage.tasks[0].body, stage.mesh


def loops_of(body):
    return [k for k, instruction in enumerate(body.instructions) if isinstance(instruction, Region)]


def is_of_head(atom):
    return sorted(atom.aval.shape) == [WIDTH, VOCABULARY]


def test_the_gradient_of_the_head_is_made_before_the_loop_of_the_backward_pass():
    body, mesh = planned(batch=8)
    forward, backward = loops_of(body)

    def num_bytes(copy):
        return local_bytes(*copy, mesh)

    assert done_before(body, forward, num_bytes) == []
    found = done_before(body, backward, num_bytes)
    assert any(is_of_head(var) for (var, _), _ in found)
    assert all(freed >= TUNING.late_bytes for _, freed in found)
    # In what is emitted, the loop reads something that depends on it.
    types = [jax.ShapeDtypeStruct(s.local_shape(v.aval.shape, mesh), v.aval.dtype) for v, s in body.inputs]
    sizes = dict(mesh.axis_sizes)
    jaxpr = jax.make_jaxpr(lambda *a: run_body(body, a, sizes), axis_env=list(sizes.items()))(*types).jaxpr
    *_, loop = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    needed, products = {a for a in loop.invars if not hasattr(a, "val")}, []
    for eqn in reversed(jaxpr.eqns[: jaxpr.eqns.index(loop)]):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(a for a in eqn.invars if not hasattr(a, "val"))
            products += [v for v in eqn.outvars if eqn.primitive.name == "dot_general" and is_of_head(v)]
    assert products


def test_what_is_small_may_come_later():
    body, mesh = planned(batch=8)
    *_, backward = loops_of(body)
    assert done_before(body, backward, lambda copy: local_bytes(*copy, mesh) // 64) == []
