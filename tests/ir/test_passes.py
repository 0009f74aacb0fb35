"""Lists of passes: carried out in order, checked behind each, and told in the documents."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar._jax import make_jaxpr
from autopar.inter_op import cut
from autopar.intra_op import shard
from autopar.ir.passes import Pass, run_passes
from autopar.ir.trace.trace import trace_step
from autopar.search.passes import PHASES
from autopar.streams import emit
from autopar.streams.instructions import Recv

HOW_IT_WORKS = Path(__file__).parents[2] / "docs" / "how-it-works.md"


def train_step(w, batch):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(batch @ w) ** 2))(w)
    return w - 0.1 * grad, loss


ARGS = jnp.ones((8, 8)), jnp.ones((8, 8))


def two_layers(weights, batch):
    def loss_of(weights):
        first, second = weights
        return jnp.mean((jnp.tanh(batch @ first) @ second) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], loss


def broken(passes, name, breaks):
    """The list, with a pass that makes something wrong of what it makes."""
    return tuple(dataclasses.replace(p, run=lambda x, p=p: breaks(p.run(x))) if p.name == name else p for p in passes)


def without_the_first_equation(jaxpr):
    return make_jaxpr(jaxpr.invars, jaxpr.outvars, jaxpr.eqns[1:])


@pytest.mark.parametrize("name", [each.name for each in PHASES["trace"]])
def test_the_pass_that_breaks_a_program_is_named(name, monkeypatch):
    def breaks(made):
        return dataclasses.replace(made, jaxpr=without_the_first_equation(made.jaxpr))

    monkeypatch.setattr("autopar.ir.trace.trace.TRACE", broken(PHASES["trace"], name, breaks))
    with pytest.raises(AssertionError, match=f"after the pass `{name}`: .*used before it is defined"):
        trace_step(train_step, ARGS)


@pytest.mark.parametrize("name", [each.name for each in PHASES["apart"]])
def test_also_of_a_pipeline(name, monkeypatch):
    monkeypatch.setattr(cut, "APART", broken(cut.APART, name, lambda made: made.by(without_the_first_equation)))
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=2)
    step = autopar.parallelize(train_step, cluster=autopar.Cluster.of("4 h100"), method=method)
    with pytest.raises(AssertionError, match=f"after the pass `{name}`"):
        step.plan(*ARGS)


def without_the_first_instruction(body, mesh, bucket):
    return dataclasses.replace(body, instructions=body.instructions[1:])


def with_one_choice_less(setting):
    """Of the first decision that has several, the mask tells of one less."""
    node = next(node for node in setting.graph.nodes if node.num_choices > 1)
    setting.allowed.masks[node.index] = np.ones(node.num_choices - 1, bool)
    return setting


def with_a_lost_message(emission):
    streams = dict(emission.streams.instructions)
    at = next(k for k, i in enumerate(streams[1]) if isinstance(i, Recv))
    streams[1] = (*streams[1][:at], *streams[1][at + 1 :])
    return emission.to(dataclasses.replace(emission.streams, instructions=streams))


@pytest.mark.parametrize(
    "module, phase, name, breaks, says",
    [
        (shard, "SHARD", "restrict", with_one_choice_less, "a mask of"),
        (emit, "EMIT", "emit", with_a_lost_message, "no one receives message"),
        (emit, "EMIT", "free", with_a_lost_message, "no one receives message"),
    ],
)
def test_also_of_sharding_and_of_streams(module, phase, name, breaks, says, monkeypatch):
    monkeypatch.setattr(module, phase, broken(getattr(module, phase), name, breaks))
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=2)
    step = autopar.parallelize(two_layers, cluster=autopar.Cluster.of("4 h100"), method=method)
    with pytest.raises(AssertionError, match=f"after the pass `{name}`: .*{says}"):
        step.plan([ARGS[0], ARGS[0]], ARGS[1])


def test_a_wrong_conversion_is_found(monkeypatch):
    """A sharded program that reads what was never made."""
    monkeypatch.setattr("autopar.intra_op.lower.fuse_collectives", without_the_first_instruction)
    step = autopar.parallelize(
        train_step, cluster=autopar.Cluster.of("4 h100"), method=autopar.ShardParallel(mesh_shape=(4,))
    )
    with pytest.raises(AssertionError, match="after the pass `fuse`: .* is not defined"):
        step.plan(*ARGS)


def test_off(monkeypatch):
    """Without `AUTOPAR_CHECK` nothing is checked."""
    monkeypatch.delenv("AUTOPAR_CHECK")
    passes = [Pass("one", "", lambda x: x + 1), Pass("two", "", lambda x: 2 * x)]
    assert run_passes(passes, 1, lambda x: 1 / 0) == 4


def test_documents_tell_the_lists():
    """The table names the file of each pass of the lists, in their order."""
    rows = re.findall(r"^\| (.*?) \| (.*?) \| (.*?) \| .*?\|$", HOW_IT_WORKS.read_text(), re.MULTILINE)
    named = {name.split(":* ")[-1]: re.findall(r"(\w+)(?:\.py)?`", where) for name, _, where in rows}
    told = {
        "trace": [*named["flatten"], *named["rewrite"]],
        "apart": named["apart"],
        "whole": named["microbatches"],
        "microbatches": named["microbatches"],
        "shard": named["shard"],
        "lower": named["lower"],
        "emit": named["emit"],
    }
    for phase, passes in PHASES.items():
        assert [stem for stem in told[phase] if stem in [p.name for p in passes]] == [p.name for p in passes], phase
