"""Longer dims change nothing: the padded program equals `jax.jit`, in numbers, infinities and NaN, and lengths divide."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autopar._jax import all_equations, eval_jaxpr
from autopar.ir.check import check_program
from autopar.ir.rewrite.padding import pad_dims
from autopar.ir.trace.trace import trace_step

VOCABULARY, HEADS, TOKENS, WIDTH = 13, 5, 11, 12


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed + sum(shape)).normal(size=shape), jnp.float32)


def train(loss_fn):
    def step(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def head(logits_loss):
    """A tied embedding in front and behind."""

    def loss(params, batch):
        x = jnp.tanh(params["table"][batch["ids"]] @ params["w"])
        return logits_loss(x @ params["table"].T + params["bias"], batch["ids"])

    params = {"table": normal(VOCABULARY, WIDTH), "w": normal(WIDTH, WIDTH), "bias": normal(VOCABULARY)}
    ids = jnp.asarray(np.random.default_rng(0).integers(0, VOCABULARY, (4, 7)))
    return train(loss), (params, {"ids": ids.at[0, 0].set(VOCABULARY - 1)}), {VOCABULARY: 16}


def one_hot(logits, ids):
    return -(jax.nn.one_hot(ids, VOCABULARY) * jax.nn.log_softmax(logits)).sum(-1).mean()


def integer(logits, ids):
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids).mean()


def out_of_range(logits, ids):
    """Labels behind the end of the vocabulary, that would lie in the tail: they are filled, or clamped."""
    shifted = ids + 2
    filled = jnp.take_along_axis(logits, shifted[..., None], -1, mode="fill", fill_value=0.5)
    clamped = jnp.take_along_axis(logits, shifted[..., None], -1, mode="clip")
    return (filled + 2 * clamped).mean() + jax.nn.logsumexp(logits, -1).mean()


def accuracy(logits, ids):
    """The best class, the best three, sums along the vocabulary: of the user's length."""
    best = (jax.lax.stop_gradient(logits).argmax(-1) == ids).mean()
    return integer(logits, ids) + best + jax.lax.top_k(logits, 3)[0].mean() + jnp.cumsum(logits, -1).mean()


def smallest(logits, ids):
    any_large, all_small = (logits > 1).any(-1), (logits < 3).all(-1)
    return (logits.min(-1) - logits.max(-1) + any_large + 2 * all_small).mean() + logits.prod(-1).mean()


def attention(width=WIDTH):
    def loss(params, batch):
        x = batch["x"]
        q, k, v = ((x @ params[name]).reshape(*x.shape[:2], HEADS, -1) for name in "qkv")
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        keep = jax.random.bernoulli(jax.random.key(3), 0.8, scores.shape)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jnp.where(keep, scores, 0), v)
        x = x + mixed.reshape(*x.shape[:2], -1) @ params["out"]
        x = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)
        return ((x[:, 0] @ params["head"]) ** 2).mean() + x.mean() + (x.reshape(-1, width) @ params["head"]).max()

    params = {name: normal(width, HEADS * 4, seed=k) for k, name in enumerate("qkv")}
    params |= {"out": normal(HEADS * 4, width), "head": normal(width, 3)}
    return train(loss), (params, {"x": normal(2, TOKENS, width)})


def heads():
    return *attention(), {HEADS: 8}


def tokens():
    return *attention(), {TOKENS: 16}


def heads_and_tokens():
    return *attention(), {TOKENS: 12, HEADS: 8}


def in_a_loop():
    step, (params, batch) = attention()
    del params["head"]

    def loss(params, batch):
        def layer(x, p):
            q, k, v = ((x @ p[name]).reshape(*x.shape[:2], HEADS, -1) for name in "qkv")
            scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
            return x + jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(*x.shape[:2], -1) @ p["out"], None

        return (jax.lax.scan(jax.checkpoint(layer), batch["x"], params)[0] ** 2).mean()

    stacked = jax.tree.map(lambda a: jnp.stack([a, -a]) / 4, params)
    return train(loss), (stacked, batch), {HEADS: 8}


def half(logits, ids):
    return integer(logits.astype(jnp.bfloat16).astype(jnp.float32), ids)


CASES = {
    **{f.__name__: (lambda f=f: head(f)) for f in (one_hot, integer, out_of_range, accuracy, smallest, half)},
    **{f.__name__: f for f in (heads, tokens, heads_and_tokens, in_a_loop)},
}


def pad_step(step, args, lengths):
    """The step with longer dims, and its program."""
    program = trace_step(step, args)
    padded = pad_dims(program.jaxpr, lengths)
    check_program(padded)
    run = jax.jit(lambda *xs: eval_jaxpr(padded, [], *xs))
    return lambda *args: program.unflatten_outputs(run(*program.flatten_inputs(jax.tree.leaves(args)))), padded


@pytest.mark.parametrize("name", CASES)
def test_equal_to_jit(name):
    """With infinity and NaN among the weights, too."""
    step, args, lengths = CASES[name]()
    (run, padded), plain = pad_step(step, args, lengths), jax.jit(step)
    leaf = "w" if "w" in args[0] else "q"
    weights = args[0][leaf]
    for poison in (None, np.inf, np.nan):
        args[0][leaf] = weights if poison is None else weights.at[(0,) * weights.ndim].set(poison)
        got, wanted = run(*args), plain(*args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), got, wanted)
    products = [e for e in all_equations(padded) if e.primitive.name == "dot_general"]
    sizes = [size for e in products for v in (*e.invars, *e.outvars) for size in v.aval.shape]
    assert not any(size in lengths for size in sizes)
    assert all(long in sizes for long in lengths.values())


def test_the_optimizer_stays_as_it_is():
    """No moment is padded: of the state only what products read is made longer, once."""
    optimizer = optax.adamw(1e-3)
    _, (params, batch), lengths = head(integer)

    def step(params, moments, batch):
        grads = jax.grad(lambda p: integer(p["table"][batch["ids"]] @ p["table"].T + p["bias"], batch["ids"]))(params)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments

    args = (params, optimizer.init(params), batch)
    run, padded = pad_step(step, args, lengths)
    got = run(*args)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6),
        got,
        jax.jit(step)(params, optimizer.init(params), batch),
    )
    pads = [e.outvars[0].aval.size for e in padded.eqns if e.primitive.name == "pad"]
    assert sorted(pads) == [16, 16 * WIDTH]


def test_nothing_of_that_length():
    step, args, _ = head(integer)
    program = trace_step(step, args)
    assert pad_dims(program.jaxpr, {}).eqns == program.jaxpr.eqns
