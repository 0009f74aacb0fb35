"""A loop, and what runs again, waits for what nobody in it needs, if that frees what is large."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import autopar
from autopar._jax import all_equations, on_host
from autopar.intra_op.sharded import Region, local_bytes
from autopar.partition.ahead import Ahead
from autopar.partition.order import after
from autopar.partition.program import run_body
from autopar.tuning import TUNING

WIDTH, TOKENS, VOCABULARY = 16, 512, 8192


def train_step(params, tokens):
    def loss_of(params):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), params["embed"][tokens], params["layers"])
        return -jnp.mean(jax.nn.log_softmax(x @ params["head"])[..., 0])

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_of)(params))


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def planned(batch):
    params = {"embed": array(VOCABULARY, WIDTH), "layers": array(2, WIDTH, WIDTH), "head": array(WIDTH, VOCABULARY)}
    return body_of(train_step, params, jax.ShapeDtypeStruct((batch, TOKENS), jnp.int32))


def body_of(train_step, *arguments, zero=0):
    method = autopar.DataParallel(zero=zero)
    step = autopar.parallelize(train_step, cluster=autopar.Cluster.of("8 h100"), method=method, batch_argnums=(1,))
    (stage,) = step.plan(*arguments).attached.pipeline.stages
    return stage.tasks[0].body, stage.mesh


def emitted(body, mesh):
    types = [jax.ShapeDtypeStruct(s.local_shape(v.aval.shape, mesh), v.aval.dtype) for v, s in body.inputs]
    sizes = dict(mesh.axis_sizes)
    return jax.make_jaxpr(lambda *a: run_body(body, a, sizes), axis_env=list(sizes.items()))(*types).jaxpr


def needed_by(jaxpr, last):
    """The equations that lead to one of them."""
    needed, found = {a for a in last.invars if not hasattr(a, "val")}, []
    for eqn in reversed(jaxpr.eqns[: jaxpr.eqns.index(last)]):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(a for a in eqn.invars if not hasattr(a, "val"))
            found.append(eqn)
    return found


def loops_of(body):
    return [k for k, instruction in enumerate(body.instructions) if isinstance(instruction, Region)]


def is_of_head(atom):
    return sorted(atom.aval.shape) == [WIDTH, VOCABULARY]


def test_the_gradient_of_the_head_is_made_before_the_loop_of_the_backward_pass():
    body, mesh = planned(batch=8)
    forward, backward = loops_of(body)

    def num_bytes(copy):
        return local_bytes(*copy, mesh)

    ahead = Ahead(body, num_bytes)
    assert ahead.before_loop(forward) == []
    found = ahead.before_loop(backward)
    assert any(is_of_head(var) for (var, _), _ in found)
    assert all(freed >= TUNING.late_bytes for _, freed in found)
    # In what is emitted, the loop reads something that depends on it.
    jaxpr = emitted(body, mesh)
    *_, loop = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    products = [eqn for eqn in needed_by(jaxpr, loop) if eqn.primitive.name == "dot_general"]
    assert any(is_of_head(eqn.outvars[0]) for eqn in products)


def test_what_is_small_may_come_later():
    body, mesh = planned(batch=8)
    *_, backward = loops_of(body)
    assert Ahead(body, lambda copy: local_bytes(*copy, mesh) // 64).before_loop(backward) == []


def test_behind_a_loop_that_communicates_the_rows_for_the_next_one_are_written_first():
    layers, rows, width = 3, 4096, 1024

    def train_step(weights, x):
        def loss_of(weights):
            return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0] ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, weights, jax.grad(loss_of)(weights))

    body, mesh = body_of(train_step, array(layers, width, width), array(8 * rows, width), zero=3)
    forward, _ = loops_of(body)
    ahead = Ahead(body, lambda copy: local_bytes(*copy, mesh))
    (delay,) = ahead.final_carries()
    assert delay.position == forward + 1
    assert {var.aval.shape for var, _ in delay.awaited} == {(layers, 8 * rows, width)}
    assert not list(Ahead(body, lambda copy: 64).final_carries())
    # In what is emitted, the loss waits for the rows.
    jaxpr = emitted(body, mesh)
    loop, _ = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    carried, *stacks = loop.outvars
    (waiting,) = [eqn for eqn in jaxpr.eqns if carried in eqn.invars and eqn.primitive.name != "neg"]
    read = {atom for eqn in needed_by(jaxpr, waiting) for atom in eqn.invars if not hasattr(atom, "val")}
    assert read.issuperset(stacks)


def test_what_runs_again_waits_for_the_gradients_of_the_layer_behind_it():
    layers, rows, width = 3, 2048, 512

    def train_step(weights, x):
        def loss_of(weights):
            h = x
            for w in weights:
                h = jax.checkpoint(lambda h, w: jnp.tanh(h @ w + 1.0))(h, w)
            return jnp.mean(h * h)

        return jax.tree.map(lambda p, g: p - 0.1 * g, weights, jax.grad(loss_of)(weights))

    body, mesh = body_of(train_step, [array(width, width)] * layers, array(8 * rows, width))
    ahead = Ahead(body, lambda copy: local_bytes(*copy, mesh))
    assert len(starts := list(ahead.recomputed_at())) == layers, "barriers for weights alone wait for nothing"
    delays = list(ahead.recomputation())
    assert [delay.position for delay in delays[1 - layers :]] == starts[1:]
    for delay in delays[1 - layers :]:
        assert [var.aval.shape for var, _ in delay.copies] == [(8 * rows, width)]
        assert (width, width) in [var.aval.shape for var, _ in delay.awaited]
    # Small layers run again when they like.
    assert not list(Ahead(body, lambda copy: 64).recomputation())
    # In what is emitted, each second run leads back to the gradient of the weights behind it, which nothing else needs.
    jaxpr = emitted(body, mesh)
    of_weights = [e for e in jaxpr.eqns if e.primitive.name == "dot_general" and is_of_weights(e.outvars[0], width)]
    again = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "optimization_barrier" and len(eqn.invars) > 1]
    assert len(of_weights) == len(again) == layers
    for k, barrier in enumerate(again):
        assert sum(eqn in of_weights for eqn in needed_by(jaxpr, barrier)) == k


def test_what_makes_a_large_array_waits_for_the_gradients_of_weights():
    """Of two layers of attention: the scores' gradients of the first are not made beside what the second still reads."""
    heads, tokens, width = 2, 512, 64

    def train_step(layers, x):
        def attention(x, w):
            q, k, v = (jnp.stack([x @ w[n]] * heads, 1) for n in "qkv")
            return jnp.mean(jax.nn.softmax(q @ jnp.swapaxes(k, 2, 3)) @ v, 1)

        def loss_of(layers):
            return jnp.mean(
                functools.reduce(lambda x, w: x + jnp.tanh(attention(x, w) @ w["up"]) @ w["down"], layers, x)
            )

        return jax.tree.map(lambda p, g: p - 0.1 * g, layers, jax.grad(loss_of)(layers))

    shapes = {"q": (width, width), "k": (width, width), "v": (width, width), "up": (width, 4096), "down": (4096, width)}
    layers = [{name: array(*shape) for name, shape in shapes.items()}] * 2
    body, mesh = body_of(train_step, layers, array(64, tokens, width))
    delays = list(Ahead(body, lambda copy: local_bytes(*copy, mesh)).large_arrays())
    awaited = [sorted(var.aval.shape) for delay in delays for var, _ in delay.awaited]
    assert awaited.count([width, 4096]) >= 2
    for delay in delays:
        made, ((small, _),) = body.instructions[delay.position].eqn.outvars[0], delay.copies
        assert 8 * made.aval.size >= 64 * tokens * 4096 >= small.aval.size
    assert not list(Ahead(body, lambda copy: 64).large_arrays())


def test_what_frees_nothing_yet_is_waited_for_later():
    """A sum of what a product reads afterwards: its turn comes with that product, at the next large array."""
    width, hidden = 1024, 4096

    def train_step(w, x):
        wide, other = x @ w["up"], jnp.sum(x @ w["other"], 0)
        bias = jnp.sum(wide, 0)
        first = jnp.max(x[:, :16] @ w["first"], 1)
        gradient = wide.T @ x
        return other, bias, first, gradient, jnp.max(x[:, :16] @ w["last"], 1)

    shapes = {"up": (width, hidden), "other": (width, 2 * hidden), "first": (16, hidden), "last": (16, hidden)}
    body, mesh = body_of(train_step, {name: array(*shape) for name, shape in shapes.items()}, array(8 * 4096, width))
    delays = Ahead(body, lambda copy: local_bytes(*copy, mesh)).large_arrays()
    first, last = ({var.aval.shape for var, _ in delay.awaited} for delay in delays)
    assert first == {(2 * hidden,)} and {(hidden,), (hidden, width)} < last


def test_a_gradient_that_is_made_wider_is_not_forgotten():
    rows, width, hidden = 4096, 1024, 4096

    def train_step(weights, x):
        wide = x @ weights["up"]
        gradient = (wide.T @ x).astype(jnp.float32)
        return gradient, jnp.tanh(x[:, :16] @ weights["other"]).sum(1)

    half = {"up": jax.ShapeDtypeStruct((width, hidden), jnp.bfloat16)}
    half["other"] = jax.ShapeDtypeStruct((16, hidden), jnp.bfloat16)
    body, mesh = body_of(train_step, half, jax.ShapeDtypeStruct((8 * rows, width), jnp.bfloat16))
    delays = Ahead(body, lambda copy: local_bytes(*copy, mesh)).large_arrays()
    assert [sorted(var.aval.shape) for delay in delays for var, _ in delay.awaited] == [[width, hidden]]


def test_what_several_arrays_are_freed_by_is_waited_for():
    """Each of two factors of a gradient is less than twice the gradient, both are more."""
    rows, width, hidden = 6144, 64, 4096

    def train_step(weights, x):
        gradient = (x @ weights["up"]).T @ (x @ weights["gate"])
        return gradient, jnp.tanh(x[:, :16] @ weights["other"]).sum(1)

    weights = {"up": array(width, hidden), "gate": array(width, hidden), "other": array(16, hidden)}
    body, mesh = body_of(train_step, weights, array(8 * rows, width))
    delays = Ahead(body, lambda copy: local_bytes(*copy, mesh)).large_arrays()
    assert [var.aval.shape for delay in delays for var, _ in delay.awaited] == [(hidden, hidden)]


@pytest.mark.parametrize("to_host", [False, True])
def test_elementwise_work_waits_while_it_reads(to_host):
    """What it makes is large, what it reads as well: others read the same without a wait. Copies to the hosts have an order."""
    rows, width, hidden = 4096, 64, 4096

    def train_step(up, x, wide):
        gradient = (x @ up).T @ x
        return gradient, jnp.sin(wide), jax.device_put(x + 1, jax.memory.Space.Host) if to_host else x

    body, mesh = body_of(train_step, array(width, hidden), array(8 * rows, width), array(8 * rows, hidden))
    delays = Ahead(body, lambda copy: local_bytes(*copy, mesh)).large_arrays()
    found = [
        (body.instructions[d.position].eqn.primitive.name, d.lasts, [v.aval.shape for v, _ in d.awaited])
        for d in delays
    ]
    assert found == ([] if to_host else [("sin", False, [(hidden, width)])])


def reads_what_the_gradient_is_made_of(x, wide):
    wave = jnp.sin(wide)
    return (2 * wave + 1).T @ x, wide * wave


def reads_beside_a_sum_of_an_input(x, wide):
    return jnp.abs(wide).max(), jnp.sin(wide)


@pytest.mark.parametrize("train_step", [reads_what_the_gradient_is_made_of, reads_beside_a_sum_of_an_input])
def test_elementwise_work_does_not_wait_in_vain(train_step):
    """One kernel makes both, or nothing is freed."""
    rows, width, hidden = 4096, 64, 4096
    body, mesh = body_of(train_step, array(8 * rows, width), array(8 * rows, hidden))
    assert not list(Ahead(body, lambda copy: local_bytes(*copy, mesh)).large_arrays())


@pytest.mark.parametrize("is_kept", [True, False])
def test_the_backward_pass_reads_16_bits_of_what_is_slow_through_a_barrier(is_kept):
    """If the forward pass goes on to a product; what is only made for the backward pass is part of its readers' kernel."""
    rows, width = 4096, 1024

    def train_step(w, x):
        loss, gradient = jax.value_and_grad(lambda w: jnp.sum((jnp.tanh(x @ w) @ w).astype(jnp.float32)))(w)
        return w - gradient, loss if is_kept else 0

    half = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((width, width), (8 * rows, width))]
    jaxpr = emitted(*body_of(train_step, *half))
    (tanh,) = (eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "tanh")
    barriers = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "optimization_barrier" and tanh in eqn.invars]
    assert len(barriers) == is_kept
    if is_kept:
        direct = [eqn.primitive.name for eqn in jaxpr.eqns if tanh in eqn.invars and eqn not in barriers]
        through = [eqn.primitive.name for eqn in jaxpr.eqns if barriers[0].outvars[0] in eqn.invars]
        # The derivative is (1 + tanh) (1 - tanh) in JAX 0.10, one operation in 0.11.
        assert sorted(direct) in (["dot_general", "sub"], ["dot_general", "one_minus_square"])
        assert sorted(through) == ["dot_general", "mul"][: 2 if "sub" in direct else 1]


def test_a_mask_is_not_kept_between_two_loops():
    """XLA would make what is equal once, and hold it from the first loop to the second."""
    tokens = 2048

    def masked(weights, x):
        for _ in range(2):
            mask = jnp.broadcast_to(jnp.tril(jnp.ones((tokens, tokens), bool)), (16, tokens, tokens))
            layer = lambda x, w, mask=mask: (jnp.where(mask, (x @ w) @ jnp.swapaxes(x, 1, 2), 0.0) @ x, None)  # noqa: E731
            x = jax.lax.scan(layer, x, weights)[0]
        return x

    body, mesh = body_of(masked, array(2, 8, 8), array(16, tokens, 8))
    jaxpr = emitted(body, mesh)
    first, last = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    (mask,) = (a for a in last.invars if a.aval.dtype == bool and a.aval.size >= tokens**2)
    assert first in needed_by(jaxpr, next(eqn for eqn in jaxpr.eqns if mask in eqn.outvars))


@pytest.mark.parametrize("count", [1, 2])
def test_what_waits_reads_one_number(count):
    x = jnp.ones(4)
    eqns = jax.make_jaxpr(after)(x, *[x] * count).jaxpr.eqns
    (number,) = [
        e.outvars[0] for e in eqns if e.primitive.name == "optimization_barrier" and not e.outvars[0].aval.shape
    ]
    assert eqns[-1].invars[0] is number


def is_of_weights(atom, width):
    return atom.aval.shape == (width, width)


def test_the_loss_is_there_before_the_backward_pass():
    """The gradient of the logits waits for it: else they would be kept for the loss alone."""

    def with_loss(w, x):
        def loss_of(w):
            return -jnp.mean(jax.nn.log_softmax(x @ w)[..., 0])

        loss, grad = jax.value_and_grad(loss_of)(w)
        return w - 0.1 * grad, loss

    jaxpr = emitted(*body_of(with_loss, array(WIDTH, VOCABULARY), array(TOKENS, WIDTH)))
    product = next(eqn for eqn in reversed(jaxpr.eqns) if eqn.primitive.name == "dot_general")
    (total,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "reduce_sum" and not eqn.outvars[0].aval.shape]
    assert total in needed_by(jaxpr, product)


def test_what_lies_on_the_host_does_not_wait():
    """Nothing is computed there: what runs again reads it as it is, beside what waits."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["entering"],
        names_which_can_be_offloaded=["mid"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def block(x, w):
        mid = checkpoint_name(x + jnp.tanh(checkpoint_name(jnp.sin(x), "entering") @ w), "mid")
        return mid + jnp.cos(mid) @ w

    def train_step(layers, x):
        def loss_of(layers):
            kept = jax.checkpoint(block, policy=policy)
            return jnp.mean(jax.lax.scan(lambda x, w: (kept(x, w), None), x, layers)[0] ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, layers, jax.grad(loss_of)(layers))

    body, mesh = body_of(train_step, array(4, 512, 512), array(64, 1024, 512))
    program = emitted(body, mesh)
    there = [eqn for eqn in all_equations(program) for var in eqn.outvars if on_host(var.aval)]
    assert any(eqn.primitive.name == "device_put" for eqn in there)
    assert not any(eqn.primitive.name == "select_n" for eqn in there)


def test_numbers_that_are_repeated_wait_for_nothing():
    """XLA scales a product to 8 bits within it, and finds its largest number there: the scale must not wait for that."""
    width, rows = 1024, 65536
    linen = pytest.importorskip("flax.linen")

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            for _ in range(3):
                how = {"dot_general_cls": linen.Fp8DirectDotGeneralOp, "use_bias": False, "dtype": jnp.bfloat16}
                x = x + jnp.tanh(linen.Dense(width, **how)(x))
            return x

    def train_step(state, x):
        return jax.grad(lambda state: jnp.mean(Model().apply(state, x).astype(jnp.float32) ** 2), allow_int=True)(state)

    x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    body, mesh = body_of(train_step, jax.eval_shape(Model().init, jax.random.key(0), x), x)
    delays = Ahead(body, lambda copy: local_bytes(*copy, mesh)).large_arrays()
    made = [body.instructions[delay.position].eqn.primitive.name for delay in delays]
    assert made and "broadcast_in_dim" not in made
