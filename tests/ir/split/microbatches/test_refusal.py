"""What cannot be worked through in microbatches is refused, with the user's line."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from autopar.errors import BatchError, MicrobatchError
from autopar.ir.split.microbatches import phases
from autopar.ir.split.microbatches.phases import find_phases
from autopar.ir.split.microbatches.refusal import refusal
from autopar.ir.split.microbatches.waiting import SamplesWaitError
from tests.ir.split.cases import (
    BATCH,
    HERE,
    Case,
    Tree,
    cases_in_parts,
    descend,
    mlp,
    primitives_in,
    sgd,
    sgd_of_state,
    split_case,
    squares,
    trace_case,
    traced,
    typed_key,
)
from tests.ir.split.losses import (
    LOSS_CASES,
    batch_norm_loss,
    root_loss,
    shuffled_loss,
    softmax_over_batch_loss,
    while_any_loss,
)
from tests.ir.split.models import accumulating_step
from tests.ir.traced import split_microbatches


def contrastive_loss(params: Tree, batch: Tree) -> jax.Array:
    z = mlp(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(z @ z.T, jnp.arange(z.shape[0])).mean()


def reversed_loss(params: Tree, batch: Tree) -> jax.Array:
    return ((mlp(params, batch["x"])[::-1] - batch["y"]) ** 2).mean()


def running_loss(params: Tree, batch: Tree) -> jax.Array:
    """Each sample meets what the samples before have left."""
    body = lambda h, x: (jnp.tanh(x @ params["w1"] + h),) * 2  # noqa: E731
    _, h = lax.scan(body, params["bias"], batch["x"])
    return ((h @ params["w2"] - batch["y"]) ** 2).mean()


def uneven_loss(params: Tree, batch: Tree) -> jax.Array:
    """One row more than there are samples."""
    return (mlp(params, jnp.concatenate([batch["x"], params["w1"][:1]])) ** 2).mean()


def across_blocks_loss(params: Tree, batch: Tree) -> jax.Array:
    """Three rows of one block and the next block are no whole number of any equal blocks."""
    z = mlp(params, jnp.concatenate([batch["x"], 2 * batch["x"]]))
    return (z[BATCH - 3 :] ** 2).mean()


def hardest_loss(params: Tree, batch: Tree) -> jax.Array:
    return lax.top_k(squares(params, batch), BATCH // 2)[0].mean()


REFUSED = {
    "BatchNorm": (sgd(batch_norm_loss), "sub", "batch_norm"),
    "root of the mean": (sgd(root_loss), "sqrt", "root_loss"),
    "contrastive": (sgd(contrastive_loss), "dot_general", "contrastive_loss"),
    "softmax over the batch": (sgd(softmax_over_batch_loss), "max", "softmax_over_batch_loss"),
    "reversed": (sgd(reversed_loss), "rev", "reversed_loss"),
    "shuffled": (sgd_of_state(shuffled_loss), "sub", "shuffled_loss"),
    "scan that remembers samples": (sgd(running_loss), "scan", "running_loss"),
    "uneven blocks": (sgd(uneven_loss), "concatenate", "uneven_loss"),
    "slice across blocks": (sgd(across_blocks_loss), "slice", "across_blocks_loss"),
    "while any": (sgd(while_any_loss), "while", "while_any_loss"),
    "hardest samples": (sgd(hardest_loss), "top_k", "hardest_loss"),
}


@cases_in_parts({name: Case(step, extra=typed_key) for name, (step, _, _) in REFUSED.items()})
def test_refused(case, count, request):
    operation, function = next((o, f) for step, o, f in REFUSED.values() if step is case.step)
    with pytest.raises(MicrobatchError) as info:
        split_case(case, count)
    error = info.value
    assert error.operation == operation
    assert re.fullmatch(rf"{HERE}:\d+ \({function}\)", error.source)
    message = str(error)
    assert f"{count} microbatches" in message and f"`{operation}` at {error.source}" in message
    assert "num_microbatches=1" in message
    # These alone could take their own microbatch's value; of samples taken by index a microbatch has only some.
    of_sums = operation in ("sub", "sqrt", "max", "while") and function != "shuffled_loss"
    assert ('microbatch_semantics="per_microbatch"' in message) == of_sums


def chunked_loss(params: Tree, batch: Tree) -> jax.Array:
    """Five samples at a time, and what is left."""
    return lax.map(lambda x: jnp.mean(mlp(params, x) ** 2), batch["x"], batch_size=5).mean()


def test_why_not():
    """A scan over samples, a row behind samples and parts of the batch are no batch statistics."""
    cases = {
        running_loss: "(?s)more than sums.*pass them with samples first.*training step.*once for each",
        uneven_loss: "no whole number of batches",
        chunked_loss: "(?s)cuts samples .*batch_size that divides the batch",
    }
    for loss, words in cases.items():
        with pytest.raises(MicrobatchError, match=words) as info:
            split_case(Case(sgd(loss)), 2)
        assert "statistics" not in str(info.value)


def test_a_loop_that_ends_with_its_last_sample():
    def around_another(params: Tree, batch: Tree) -> jax.Array:
        return lax.fori_loop(0, 2, lambda _, loss: loss + lax.stop_gradient(while_any_loss(params, batch)), 0.0)

    told = "(?s)how long it goes on depends on all samples of the whole batch.*each sample end by itself.*fixed number of turns"
    for loss in (while_any_loss, around_another):
        with pytest.raises(MicrobatchError, match=told) as info:
            split_case(Case(sgd(loss)), 2)
        assert info.value.operation == "while"


def balanced_loss(params: Tree, batch: Tree) -> jax.Array:
    """As a mixture of experts whose load is balanced: the gradient of each sample reads a mean of all, within a scan."""

    def layer(carry, w):
        x, penalty = carry
        gates = jax.nn.softmax(x @ w)
        return (jnp.tanh(x @ w), penalty + balance(gates)), None

    def balance(gates):
        return (gates.mean(0) * lax.stop_gradient(gates > 0.5).astype(gates.dtype).mean(0)).sum()

    x = batch["x"] @ params["w1"]
    (x, penalty), _ = lax.scan(layer, (x, 0.0), jnp.stack([jnp.eye(x.shape[1])] * 2) * params["bias"])
    return x.mean() + penalty


def test_the_sum_that_is_waited_for():
    with pytest.raises(MicrobatchError, match=r"which `reduce_sum` at \S+:\d+ \(balance\) makes\), and single samples"):
        split_case(Case(sgd(balanced_loss)), 2)


def test_a_single_trip_is_no_loop():
    """Then forward and backward of the user's own accumulation are there to be cut between stages."""
    case = Case(accumulating_step)
    assert not primitives_in(split_case(case, 4)[1].loop.eqns)["scan"]
    (scan,) = (eqn for eqn in split_case(case, 2)[1].loop.eqns if eqn.primitive.name == "scan")
    assert scan.params["length"] == 2


def test_batch_that_does_not_divide():
    case = LOSS_CASES["mean"]
    with pytest.raises(BatchError, match="does not divide") as info:
        split_case(case, 3)
    assert info.value.size == BATCH
    assert re.search("(?s)8 samples, num_microbatches=3.*no multiple of 3.*divides the batch size", str(info.value))


def test_no_batch():
    case = LOSS_CASES["mean"]
    program, _ = traced(case)
    with pytest.raises(BatchError, match="(?s)there is no batch.*num_microbatches=2.*batch_argnums"):
        split_microbatches(program.jaxpr, 2, ())


def test_only_the_error_that_is_told_is_written(monkeypatch):
    """Each takes a walk through the whole program, and every operation that waits would have one."""
    written = []

    def counted(*arguments):
        written.append(arguments)
        return refusal(*arguments)

    monkeypatch.setattr(phases, "refusal", counted)
    with pytest.raises(MicrobatchError, match="sub"):
        split_case(Case(sgd(batch_norm_loss)), 2)
    assert len(written) == 1


def test_a_loop_of_steps_is_told_of_the_samples_that_it_reads():
    """It runs after the loop over microbatches, and samples wait for it; the first that it reads are parameters."""

    def step(state, batch):
        params = state["params"]
        x = jnp.tanh(mlp(params, batch["x"]))

        def turn(judge, _):
            grads = jax.grad(lambda judge: jnp.vdot(judge, params["w2"][:4, :1]) + jnp.mean((x @ judge) ** 2))(judge)
            return judge - 0.1 * grads, None

        judge, _ = jax.lax.scan(turn, params["w2"][:4, :1], None, length=3)
        value, grads = jax.value_and_grad(lambda params: jnp.mean(mlp(params, batch["x"]) @ judge))(params)
        return {**state, "params": descend(params, grads)}, {"loss": value}

    program, batch = trace_case(Case(step))
    (loop,) = (eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "scan")
    with pytest.raises(SamplesWaitError) as info:
        find_phases(program.jaxpr, 2, batch, whole=[loop])
    assert f"operand of shape ({BATCH}, 4)" in str(info.value.error)
