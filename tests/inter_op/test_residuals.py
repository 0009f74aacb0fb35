"""What is kept between forward and backward: against brute force, and against JAX's own policy on a transformer layer."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.ad_checkpoint import saved_residuals

import autopar
from autopar._jax import Literal, make_jaxpr, open_jaxpr
from autopar.inter_op.residuals import ALL, CHEAP, can_run_again, choose_residuals, is_repeatable
from autopar.ir.check import check_program
from autopar.ir.trace.flatten import flatten
from autopar.ir.work import Work, num_bytes
from tests.ir.traced import evaluate

ELEMENTWISE = {
    "add": (2, lax.add),
    "mul": (2, lax.mul),
    "max": (2, lax.max),
    "tanh": (1, lax.tanh),
    "exp": (1, lax.exp),
    "neg": (1, lax.neg),
}
SIZES = (4, 8, 12)
"""Of dims: values take a multiple of 16 bytes, the unit in which the flow is counted."""


def draw(seed):
    """A random program of up to ten values and what of it is wanted, free and received."""
    random = np.random.default_rng(seed)
    count = int(random.integers(3, 11))
    num_inputs = int(random.integers(1, 4))
    plan = [("input", (int(random.choice(SIZES)), int(random.choice(SIZES)))) for _ in range(num_inputs)]
    shapes = [shape for _, shape in plan]
    while len(shapes) < num_inputs + count:
        a = int(random.integers(len(shapes)))
        kind = str(random.choice(["dot", "sum", "spread", *ELEMENTWISE]))
        if kind == "dot":
            others = [k for k, shape in enumerate(shapes) if len(shape) == 2 and shape[0] == shapes[a][-1]]
            if len(shapes[a]) != 2 or not others:
                continue
            b = int(random.choice(others))
            plan.append((kind, a, b))
            shapes.append((shapes[a][0], shapes[b][1]))
        elif kind == "sum":
            if len(shapes[a]) == 2:
                plan.append((kind, a))
                shapes.append(shapes[a][:1])
        elif kind == "spread":
            if len(shapes[a]) == 1:
                shape = (*shapes[a], int(random.choice(SIZES)))
                plan.append((kind, a, shape))
                shapes.append(shape)
        else:
            fitting = [k for k, shape in enumerate(shapes) if shape == shapes[a]]
            operands = [a, int(random.choice(fitting))][: ELEMENTWISE[kind][0]]
            plan.append((kind, *operands))
            shapes.append(shapes[a])

    def program(*inputs):
        values = list(inputs)
        for kind, *operands in plan[num_inputs:]:
            match kind:
                case "dot":
                    values.append(values[operands[0]] @ values[operands[1]])
                case "sum":
                    values.append(lax.reduce_sum(values[operands[0]], (1,)))
                case "spread":
                    values.append(lax.broadcast_in_dim(values[operands[0]], operands[1], (0,)))
                case _:
                    values.append(ELEMENTWISE[kind][1](*(values[k] for k in operands)))
        return values[num_inputs:]

    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for _, shape in plan[:num_inputs]]
    jaxpr = open_jaxpr(jax.make_jaxpr(program)(*avals))[0]
    assert [eqn.primitive.name for eqn in jaxpr.eqns].count("dot_general") == [p[0] for p in plan].count("dot")
    made = [var for eqn in jaxpr.eqns for var in eqn.outvars]
    free = [var for var in jaxpr.invars if random.random() < 0.5]
    received = [var for var in jaxpr.invars if var not in free]
    free += [var for var in made if random.random() < 0.1]
    wanted = [var for var in (*received, *made) if random.random() < 0.4] or made[-1:]
    return jaxpr, wanted, free, received


def operands_of(eqn):
    return [a for a in eqn.invars if not isinstance(a, Literal)]


def makes(kept, eqns, wanted, free, level):
    """The equations to run again if `kept` is kept; None: something wanted cannot be made."""
    made_by = {var: eqn for eqn in eqns for var in eqn.outvars}
    again, waiting = {}, list(wanted)
    while waiting:
        var = waiting.pop()
        if var in kept or var in free:
            continue
        eqn = made_by.get(var)
        if eqn is None or (eqn.primitive.name == "dot_general" and level == CHEAP):
            return None
        again[eqn] = eqn
        waiting += operands_of(eqn)
    return list(again.values())


def cost_of(kept, again, level):
    """Bytes kept, and the bytes that the products run again are worth."""
    products = [eqn for eqn in again if eqn.primitive.name == "dot_general"]
    return sum(map(num_bytes, kept)) + (sum(Work().of_equations(products)) / level if products else 0)


def brute_force(eqns, wanted, free, received, level):
    """(bytes and what products cost, equations to run again), the least of all sets of values that can be kept."""
    values = [var for var in (*received, *(v for eqn in eqns for v in eqn.outvars)) if var not in free]
    best = None
    for size in range(len(values) + 1):
        for kept in itertools.combinations(values, size):
            again = makes(set(kept), eqns, wanted, free, level)
            if again is not None:
                found = cost_of(kept, again, level), len(again)
                best = found if best is None else min(best, found)
    return best


@pytest.mark.parametrize("level", [4.0, 8.0, ALL])
def test_products_again_against_brute_force(level):
    """Levels at which the products' operations are whole units of bytes."""
    ran_again = 0
    for seed in range(60):
        jaxpr, wanted, free, received = draw(seed)
        kept = choose_residuals(jaxpr.eqns, wanted, free, level)
        found = cost_of(kept.values, kept.again, level), len(kept.again)
        assert found == brute_force(jaxpr.eqns, wanted, set(free), received, level), seed
        assert [eqn.primitive.name for eqn in kept.heavy] == ["dot_general"] * len(kept.heavy)
        ran_again += bool(kept.heavy)
        check_values(jaxpr, wanted, free, kept)
    assert ran_again > 3, "the draw is not trivial"


@pytest.mark.parametrize("block", range(4))
def test_against_brute_force(block):
    ran_again = kept_less = 0
    for seed in range(20 * block, 20 * block + 20):
        jaxpr, wanted, free, received = draw(seed)
        kept = choose_residuals(jaxpr.eqns, wanted, free)
        assert (kept.num_bytes, len(kept.again)) == brute_force(jaxpr.eqns, wanted, set(free), received, CHEAP), seed
        assert not any(eqn.primitive.name == "dot_general" for eqn in kept.again)
        assert not set(kept.values) & set(free) and len(set(kept.values)) == len(kept.values)
        order = [next(k for k, eqn in enumerate(jaxpr.eqns) if eqn is again) for again in kept.again]
        assert order == sorted(order)
        ran_again += bool(kept.again)
        kept_less += kept.num_bytes < sum(num_bytes(v) for v in set(wanted) - set(free))
        check_values(jaxpr, wanted, free, kept)
    assert ran_again > 3 and kept_less > 1, "the draw is not trivial"


def check_values(jaxpr, wanted, free, kept):
    """What is wanted comes of what is kept, with the same numbers."""
    random = np.random.default_rng(0)
    inputs = [random.normal(size=v.aval.shape).astype(np.float32) / 4 for v in jaxpr.invars]
    everything = [*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    values = dict(zip(everything, evaluate(make_jaxpr(jaxpr.invars, everything, jaxpr.eqns), *inputs), strict=True))
    at_hand = list(dict.fromkeys([*kept.values, *free]))
    backward = make_jaxpr(at_hand, wanted, kept.again)
    check_program(backward)
    made = evaluate(backward, *(values[v] for v in at_hand))
    for var, value in zip(wanted, made, strict=True):
        np.testing.assert_allclose(value, values[var], rtol=1e-6)


def chain(*functions, shape=(8, 8)):
    def program(x):
        values = [x]
        for function in functions:
            values.append(function(values[-1]))
        return values[1:]

    return open_jaxpr(jax.make_jaxpr(program)(jax.ShapeDtypeStruct(shape, jnp.float32)))[0]


def test_small_programs_by_hand():
    def dot(x):
        return x @ x

    def narrow(x):
        return x.astype(jnp.bfloat16)

    jaxpr = chain(dot, jnp.tanh, narrow, jnp.exp)
    a, b, c, d = jaxpr.outvars
    cases = [
        ([a, b], [a], 1, "what the product made is enough for both"),
        ([d], [d], 0, "of equal bytes the last: nothing is run again"),
        ([c, d], [c], 1, "half as many bytes"),
        ([b, c, d], [b], 2, ""),
        ([], [], 0, "nothing is wanted"),
    ]
    for wanted, values, again, why in cases:
        kept = choose_residuals(jaxpr.eqns, wanted, [])
        assert (list(kept.values), len(kept.again)) == (values, again), why
    kept = choose_residuals(jaxpr.eqns, [b], [a])
    assert kept.values == () and [eqn.primitive.name for eqn in kept.again] == ["tanh"] and kept.num_bytes == 0
    kept = choose_residuals(jaxpr.eqns, [jaxpr.invars[0]], [])
    assert kept.values == (jaxpr.invars[0],), "what was received can only be kept"


@pytest.mark.parametrize("reader, kept", [(jnp.tanh, 0), (lambda x: x @ x, 1)], ids=["elementwise", "product"])
def test_elementwise_work_needs_no_order_of_dims(reader, kept):
    """What a product made and a transpose turned is kept as it was made, unless another product wants it turned."""
    jaxpr = chain(lambda x: x @ x, jnp.transpose, reader)
    assert choose_residuals(jaxpr.eqns, [jaxpr.outvars[1]], []).values == (jaxpr.outvars[kept],)


@pytest.mark.parametrize(
    "function, again",
    [
        (jnp.tanh, True),
        (lambda x: x.sum(-1), True),
        (lambda x: x.T, True),
        (lambda x: x @ x, False),
        (lambda x: jnp.cumsum(x), False),
        (lambda x: lax.sort(x), False),
        (lambda x: x[jnp.array([2, 1])], False),
        (lambda x: lax.conv_general_dilated(x[None, None], x[None, None], (1, 1), "SAME"), False),
        (lambda x: lax.scan(lambda c, y: (c + y, c), x[0], x)[1], False),
        (lambda x: jnp.concatenate([x, x[:4]]), True),
        (lambda x: lax.reduce_window(x, 0.0, lax.max, (2, 2), (2, 2), "VALID"), True),
        (lambda x: jnp.argmax(x, 1), True),
        (lambda x: jax.nn.softmax(x), True),
        (lambda x: lax.dynamic_slice(x, (1, 0), (2, 8)), True),
        (lambda x: x.at[jnp.array([2, 1])].set(0.0), False),
        (lambda x: x.at[jnp.array([2, 1])].add(1.0), False),
        (lambda x: lax.erf_inv(x), False),
        (lambda x: lax.top_k(x, 2), False),
        (lambda x: jnp.fft.fft(x), False),
        (lambda x: jax.random.bits(jax.random.wrap_key_data(x[0, :4].astype(jnp.uint32), impl="rbg"), (8,)), False),
        (lambda x: jax.pure_callback(lambda y: y, x, x), False),
    ],
    ids=(
        "tanh sum transpose dot cumsum sort gather convolution scan concatenate pool argmax softmax dynamic_slice scatter "
        "scatter_add erf_inv top_k fft rng_bit_generator pure_callback"
    ).split(),
)
def test_what_is_run_again(function, again):
    assert all(map(can_run_again, eqns_of(function))) is again


def eqns_of(function):
    """Of the flat program, on an array of 8 x 8."""
    return flatten(*open_jaxpr(jax.make_jaxpr(function)(jnp.ones((8, 8)))))[0].eqns


def test_random_bits_are_heavy():
    eqns = eqns_of(lambda x: jax.random.uniform(jax.random.wrap_key_data(x[0, :2].astype(jnp.uint32)), (8, 8)))
    heavy = [eqn.primitive.name for eqn in eqns if not can_run_again(eqn)]
    assert "threefry2x32" in heavy and set(heavy) <= {"threefry2x32"}


@pytest.mark.parametrize(
    "function, repeatable",
    [
        (lambda x: x @ x, True),
        (lambda x: lax.scan(lambda c, y: (c + y, c), x[0], x)[1], True),
        (lambda x: lax.while_loop(lambda c: c.sum() < 99, lambda c: c + 1, x), True),
        (lambda x: jax.pure_callback(lambda y: y, x, x), False),
        (lambda x: lax.scan(lambda c, y: (jax.pure_callback(lambda y: y, y, y), c), x[0], x)[1], False),
        (lambda x: lax.rng_uniform(0.0, 1.0, (8, 8)) * x, False),
        (lambda x: (jax.debug.print("{}", x), x)[1], False),
    ],
    ids=["dot", "scan", "while", "callback", "callback in a scan", "hidden state", "print"],
)
def test_what_may_never_run_twice(function, repeatable):
    assert all(map(is_repeatable, eqns_of(function))) is repeatable


def test_effects_are_kept_whatever_the_level():
    jaxpr = chain(jnp.tanh, lambda x: jax.pure_callback(lambda y: y, x, x), lambda x: x @ x)
    _, called, product = jaxpr.outvars
    kept = choose_residuals(jaxpr.eqns, [called, product], [], ALL)
    assert kept.values == (called,) and [eqn.primitive.name for eqn in kept.again] == ["dot_general"]


# A transformer layer.

BATCH, LENGTH, WIDTH, HEADS = 2, 16, 64, 4


def norm(scale, x):
    x = x - x.mean(-1, keepdims=True)
    return scale * x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def layer(params, x):
    """Pre-norm attention and MLP."""
    q, k, v = jnp.split(norm(params["norm1"], x) @ params["qkv"], 3, -1)
    q, k, v = (a.reshape(*x.shape[:2], HEADS, WIDTH // HEADS) for a in (q, k, v))
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape) @ params["out"]
    return x + jax.nn.gelu(norm(params["norm2"], x) @ params["up"]) @ params["down"]


def layer_types():
    shapes = {
        "norm1": (WIDTH,),
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "norm2": (WIDTH,),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def mean_square(x, y):
    return jnp.mean((x - y) ** 2)


def kept_of_two_stages():
    """What a pipeline of two layers keeps, the loss beside the second."""

    def step(params, batch):
        def loss_fn(params):
            x = autopar.mark_stage(layer(params[0], batch["x"]))
            return mean_square(layer(params[1], x), batch["y"])

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    data = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32)
    plan = autopar.parallelize(
        step,
        cluster=autopar.Cluster(1, 2),
        method=autopar.PipelineParallel(num_microbatches=1),
        batch_argnums=(1,),
    ).plan([layer_types(), layer_types()], {"x": data, "y": data})
    return [each.backward.kept for (each,) in plan.origin.pipeline.tasks.rounds]


def bytes_that_jax_saves(function, *args, counted=()):
    """Under the policy that keeps all products; of the arguments only those of these names count."""
    saved = saved_residuals(jax.checkpoint(function, policy=jax.checkpoint_policies.dots_saveable), *args)
    return sum(
        aval.size * aval.dtype.itemsize
        for aval, source in saved
        if "argument" not in source or any(f"argument {name}" in source for name in counted)
    )


def test_no_more_than_dots_saveable():
    first, second = kept_of_two_stages()
    data = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32)
    # The first layer's operand is the batch, which stays anyway.
    assert 0 < first.num_bytes <= bytes_that_jax_saves(layer, layer_types(), data)
    saved = bytes_that_jax_saves(
        lambda params, x, y: mean_square(layer(params, x), y), layer_types(), data, data, counted=("x",)
    )
    assert saved > bytes_that_jax_saves(layer, layer_types(), data), "x is counted"
    assert 0 < second.num_bytes <= saved
    for kept in (first, second):
        assert not any(eqn.primitive.name == "dot_general" for eqn in kept.again)
        assert "tanh" in {eqn.primitive.name for eqn in kept.again}, "gelu is run again"
