"""The checker of streams: planned streams pass; of streams changed at random none that would go wrong does.

A second opinion on changed streams is `interpret`, which runs them on terms instead of arrays.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.streams.check import StreamError, check_streams
from autopar.streams.emit import Emission, emit_instructions
from autopar.streams.instructions import Free, Instruction, Recv, Run, Send, Streams
from autopar.streams.schedules import find_schedule
from tests.models.registry import CASES
from tests.sweep import QUICK, SLOW

Instructions = Mapping[int, Sequence[Instruction]]
NUM_MICROBATCHES = 4


def mlp():
    """An MLP whose gradients are clipped by their norm: the update joins all stages."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    params = [jnp.full((12, 12), 0.1) for _ in range(5)]

    def loss_fn(params, batch):
        x = batch["x"]
        for kernel in params:
            x = jnp.tanh(x @ kernel)
        return jnp.mean((x - batch["y"]) ** 2)

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, moments = optimizer.update(grads, state["moments"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "moments": moments, "fixed": state["fixed"]}, {"loss": loss}

    state = {"params": params, "moments": optimizer.init(params), "fixed": jnp.ones(12)}
    return step, state, {"x": jnp.ones((8, 12)), "y": jnp.ones((8, 12))}


def gpt():
    case = CASES["gpt_tied_dropout"]()
    return case.step, case.state, case.batches[0]


MODELS = {"mlp": mlp, "gpt": gpt}
PIPELINES = [
    ("mlp", 2, "gpipe"),
    ("mlp", 4, "1f1b"),
    ("gpt", 2, "1f1b"),
    ("gpt", 4, "gpipe"),
    ("mlp", 2, "zb-h1"),
    ("mlp", 2, "interleaved"),
]


@functools.cache
def planned(model: str, num_stages: int, schedule: str) -> autopar.Plan:
    step, state, batch = MODELS[model]()
    return autopar.parallelize(
        step,
        cluster=autopar.Cluster.local(jax.devices()[:num_stages], device=SLOW, intra=QUICK),
        method=autopar.PipelineParallel(num_stages=num_stages, num_microbatches=NUM_MICROBATCHES, schedule=schedule),
        batch_argnums=(1,),
    ).plan(state, batch)


@functools.cache
def streams_of(model: str, num_stages: int, schedule: str) -> Streams:
    """The stages of GPipe are those of 1F1B, and are planned once."""
    origin = planned(model, num_stages, schedule if schedule != "gpipe" else "1f1b").origin
    if schedule != "gpipe":
        return origin.pipeline.streams
    order = find_schedule(schedule).order(num_stages, NUM_MICROBATCHES)
    state = [origin.program.jaxpr.invars[k] for k in origin.roles.state]
    return emit_instructions(Emission(origin.pipeline.tasks, origin.pipeline.stages, order, state))


@pytest.mark.parametrize("model, num_stages, schedule", PIPELINES)
def test_planned_streams_pass(model, num_stages, schedule):
    streams = streams_of(model, num_stages, schedule)
    check_streams(streams, NUM_MICROBATCHES)
    results = interpret(streams, streams.instructions)
    assert len(results) == len(streams.results)
    runs = Counter(i.program for stream in streams.instructions.values() for i in stream if isinstance(i, Run))
    for name, plan in streams.programs.items():
        assert runs[name] == (NUM_MICROBATCHES if plan.task.kind in ("F", "B", "W") else 1)
    assert sum(n for name, n in runs.items() if name.endswith("/B")) >= NUM_MICROBATCHES * (num_stages - 1)


# A second opinion.


class Harm(Exception):
    """The streams go wrong."""


class _Mesh:
    """One mesh under `interpret`: its memory holds terms, and it works as far as it can."""

    def __init__(self, streams: Streams, mesh: int, todo: Sequence[Instruction], terms: dict[Any, int]):
        self.streams, self.mesh, self.terms, self.at, self.todo = streams, mesh, terms, 0, todo
        self.memory: dict[int, int | None] = {}  # None: overwritten in place, to be let go of and not to be read
        for at in (*(at for _, at in streams.arguments), *streams.numbers):
            buffer = streams.buffers[at]
            if buffer.mesh == mesh:
                self.memory[at] = self.term(buffer.value.kind, id(buffer.value.key), buffer.microbatch)
        self.given = set(self.memory)

    def term(self, *parts: Any) -> int:
        """Equal terms have equal numbers."""
        return self.terms.setdefault(parts, len(self.terms))

    def read(self, buffer: int) -> int:
        term = self.memory.get(buffer)
        if term is None:
            raise Harm(f"mesh {self.mesh}: b{buffer} is read and is not there")
        return term

    def work(self, mail: dict[tuple[int, int, int], list[int]]) -> bool:
        start = self.at
        while self.at < len(self.todo):
            instruction = self.todo[self.at]
            match instruction:
                case Run():
                    self.run(instruction)
                case Send(buffers, peer, message):
                    if (message, self.mesh, peer) in mail:
                        raise Harm(f"message {message} is sent twice")
                    mail[message, self.mesh, peer] = [self.read(b) for b in buffers]
                case Recv(buffers, peer, message):
                    if (message, peer, self.mesh) not in mail:
                        break
                    values = mail.pop((message, peer, self.mesh))
                    if len(values) != len(buffers):
                        raise Harm(f"message {message} is of another length")
                    self.memory.update(zip(buffers, values, strict=True))
                case Free(buffers):
                    for buffer in buffers:
                        if buffer not in self.memory:
                            raise Harm(f"mesh {self.mesh}: b{buffer} is let go of and is not there")
                        del self.memory[buffer]
            self.at += 1
        return self.at > start

    def run(self, run: Run) -> None:
        plan = self.streams.programs[run.program]
        operands = [self.read(b) for b in run.inputs]
        slots = [*plan.inputs, *plan.written_rows]
        if len(operands) != len(slots) + plan.needs_number or len(run.outputs) != len(plan.outputs):
            raise Harm(f"{run} has other operands")
        grown = {(b.kind, id(b.key)) for b in plan.outputs if b.kind in ("sum", "rows")}
        for slot, buffer in zip(slots, run.inputs, strict=False):
            if (slot.kind, id(slot.key)) in grown:
                self.memory[buffer] = None
        for k, buffer in enumerate(run.outputs):
            self.memory[buffer] = self.term("run", run.program, run.microbatch, *operands, k)


def interpret(streams: Streams, instructions: Instructions) -> list[int | None]:
    """The terms of the results of changed streams; terms of one `streams` can be compared.

    Raises:
        Harm: They wait for ever, read what is not there, or leave something behind.
    """
    meshes = {mesh: _Mesh(streams, mesh, todo, _TERMS) for mesh, todo in instructions.items()}
    mail: dict[tuple[int, int, int], list[int]] = {}
    while any([mesh.work(mail) for mesh in meshes.values()]):
        pass
    if any(mesh.at < len(mesh.todo) for mesh in meshes.values()):
        raise Harm("they wait for ever")
    if mail:
        raise Harm("a message is never received")
    results = [None if at is None else meshes[streams.buffers[at].mesh].read(at) for at in streams.results]
    for number, mesh in meshes.items():
        left = set(mesh.memory) - mesh.given - {at for at in streams.results if at is not None}
        if left:
            raise Harm(f"mesh {number}: b{min(left)} stays")
    return results


_TERMS: dict[Any, int] = {}


# Changes.


def drop(random, streams, stream):
    del stream[random.integers(len(stream))]


def duplicate(random, streams, stream):
    k = random.integers(len(stream))
    stream.insert(random.integers(k, len(stream)) + 1, stream[k])


def swap(random, streams, stream):
    a = random.integers(len(stream) - 1)
    b = a + 1 if random.random() < 0.5 else random.integers(len(stream))
    stream[a], stream[b] = stream[b], stream[a]


def other_buffer(random, streams, stream):
    """Half of the time a buffer that could be mistaken for the right one: of the same kind, on the same mesh."""
    k, name = _pick(random, [(k, name) for k, i in enumerate(stream) for name in _BUFFERS[type(i)] if getattr(i, name)])
    buffers = list(getattr(stream[k], name))
    at = random.integers(len(buffers))
    right = streams.buffers[buffers[at]]
    known = range(len(streams.buffers))
    like = [
        b for b in known if (streams.buffers[b].value.kind, streams.buffers[b].mesh) == (right.value.kind, right.mesh)
    ]
    buffers[at] = _pick(random, like if random.random() < 0.5 else known)
    stream[k] = dataclasses.replace(stream[k], **{name: tuple(buffers)})


def other_message(random, streams, stream):
    k = _pick(random, [k for k, i in enumerate(stream) if isinstance(i, Send | Recv)])
    known = [i.message for s in streams.instructions.values() for i in s if isinstance(i, Send)]
    stream[k] = dataclasses.replace(stream[k], message=_pick(random, [*known, max(known) + 1]))


def other_peer(random, streams, stream):
    k = _pick(random, [k for k, i in enumerate(stream) if isinstance(i, Send | Recv)])
    stream[k] = dataclasses.replace(stream[k], peer=_pick(random, list(streams.instructions)))


def _pick(random, options):
    return options[random.integers(len(options))]


_BUFFERS = {Run: ("inputs", "outputs"), Send: ("buffers",), Recv: ("buffers",), Free: ("buffers",)}
CHANGES = (drop, duplicate, swap, other_buffer, other_message, other_peer)
PER_CHANGE = 12


def judge(streams, changed):
    """(rejected by the checker, harm or ""). Held to what buffers and programs are."""
    try:
        check_streams(dataclasses.replace(streams, instructions=changed), NUM_MICROBATCHES)
        rejected = False
    except StreamError:
        rejected = True
    try:
        harm = "" if interpret(streams, changed) == interpret(streams, streams.instructions) else "another result"
    except Harm as error:
        harm = str(error)
    return rejected, harm


def test_changed_streams():
    random = np.random.default_rng(0)
    verdicts = Counter()
    for model, num_stages, schedule in PIPELINES:
        streams = streams_of(model, num_stages, schedule)
        for change in CHANGES * PER_CHANGE:
            mesh = int(random.integers(num_stages))
            stream = list(streams.instructions[mesh])
            change(random, streams, stream)
            if stream == list(streams.instructions[mesh]):
                continue
            rejected, harm = judge(streams, {**streams.instructions, mesh: stream})
            assert rejected or not harm, f"{model} {num_stages} {schedule} {change.__name__}, mesh {mesh}: {harm}"
            verdicts[rejected, bool(harm)] += 1
    assert verdicts.total() >= 300
    assert verdicts[True, True] >= 0.6 * verdicts.total()
    assert verdicts[False, False] > 0, "some changes do no harm, and the checker lets them pass"
    assert verdicts[True, False] < 0.05 * verdicts.total()


# One change of each kind, by hand.


def first(stream, kind, skip=0, **wanted):
    """Position of the first instruction of a kind with the wanted fields."""
    found = [
        k
        for k, i in enumerate(stream)
        if isinstance(i, kind) and all(getattr(i, name) == value for name, value in wanted.items())
    ]
    return found[skip]


def replaced(stream, k, **fields):
    return [*stream[:k], dataclasses.replace(stream[k], **fields), *stream[k + 1 :]]


def without(stream, k):
    return [*stream[:k], *stream[k + 1 :]]


def moved(stream, k, to):
    stream = list(stream)
    stream.insert(to, stream.pop(k))
    return stream


def no_first_receive(s):
    return without(s, first(s, Recv))


def no_first_send(s):
    return without(s, first(s, Send))


def received_from_itself(s):
    return replaced(s, first(s, Recv), peer=1)


def sends_the_values_twice(s):
    k = first(s, Send)
    return replaced(s, k, buffers=s[k].buffers * 2)


def receives_too_early(s):
    return moved(s, first(s, Recv, skip=-1), 0)


def last_forward_missing(s):
    return without(s, first(s, Run, program="stage1/F", microbatch=3))


def forward_twice(s):
    k = first(s, Run, program="stage1/F", microbatch=2)
    return [*s[: k + 1], *s[k:]]


def number_of_no_microbatch(s):
    return replaced(s, first(s, Run, program="stage1/F", microbatch=3), microbatch=9)


def operands_turned_round(s):
    k = first(s, Run, program="stage1/B")
    return replaced(s, k, inputs=s[k].inputs[::-1])


def one_operand_less(s):
    k = first(s, Run, program="stage1/B")
    return replaced(s, k, inputs=s[k].inputs[1:])


def residual_of_another_microbatch(s):
    k, other = (first(s, Run, program="stage1/F", microbatch=m) for m in (0, 1))
    return replaced(s, k, outputs=(s[other].outputs[0], *s[k].outputs[1:]))


def backward_first(s):
    k = first(s, Run, program="stage1/B", microbatch=0)
    return moved(s, k, first(s, Run, program="stage1/F", microbatch=0))


def freed_before_it_is_read(s):
    made = s[first(s, Run, program="stage1/F", microbatch=0)].outputs[0]
    k = next(k for k, i in enumerate(s) if isinstance(i, Free) and made in i.buffers)
    return moved(s, k, first(s, Run, program="stage1/B", microbatch=0))


def freed_twice(s):
    k = first(s, Free)
    return [*s[: k + 1], *s[k:]]


def never_freed(s):
    made = s[first(s, Run, program="stage1/F", microbatch=0)].outputs[0]
    k = next(k for k, i in enumerate(s) if isinstance(i, Free) and made in i.buffers)
    return replaced(s, k, buffers=tuple(b for b in s[k].buffers if b != made))


@pytest.mark.parametrize(
    "change, message",
    [
        (no_first_receive, "no one receives message"),
        (no_first_send, "no one sends message"),
        (received_from_itself, "is received by mesh 1 from 1"),
        (sends_the_values_twice, "holds other values"),
        (receives_too_early, "wait for each other: mesh 0 for .*; mesh 1 for receive "),
        (last_forward_missing, "stage1/F never runs for microbatch 3"),
        (forward_twice, r"run stage1/F \(stage 1, microbatch 2\): runs twice"),
        (number_of_no_microbatch, r"run stage1/F \(stage 1, microbatch 9\): runs uncalled for"),
        (operands_turned_round, "reads b[0-9]+, which holds "),
        (one_operand_less, "reads [0-9]+ buffers, the program has [0-9]+"),
        (residual_of_another_microbatch, "makes b[0-9]+, which holds loop of microbatch 1"),
        (backward_first, "is not written yet"),
        (freed_before_it_is_read, "was freed before"),
        (freed_twice, "is freed and not live"),
        (never_freed, "is never freed"),
    ],
)
def test_what_is_wrong_is_told(change, message):
    streams = streams_of("mlp", 2, "1f1b")
    changed = {**streams.instructions, 1: change(list(streams.instructions[1]))}
    with pytest.raises(StreamError, match=message):
        check_streams(dataclasses.replace(streams, instructions=changed), NUM_MICROBATCHES)
    assert judge(streams, changed)[1], "and it is harm indeed"


def test_another_parameter():
    """The wrong one of two values of the same shape is found by its name alone."""
    streams = streams_of("gpt", 2, "gpipe")
    stream = list(streams.instructions[0])
    k = first(stream, Run, program="stage0/F")
    consts = [at for at in stream[k].inputs if streams.buffers[at].value.kind == "const"]
    a, b = consts[:2]
    turned = {a: b, b: a}
    changed = replaced(stream, k, inputs=tuple(turned.get(at, at) for at in stream[k].inputs))
    with pytest.raises(StreamError, match="reads b[0-9]+, which holds const"):
        changed = {**streams.instructions, 0: changed}
        check_streams(dataclasses.replace(streams, instructions=changed), NUM_MICROBATCHES)


def test_result_that_is_an_argument_is_kept():
    streams = streams_of("mlp", 2, "1f1b")
    given = {at for _, at in streams.arguments}
    kept = next(at for at in streams.results if at in given)
    mesh = streams.buffers[kept].mesh
    changed = {**streams.instructions, mesh: [*streams.instructions[mesh], Free((kept,))]}
    with pytest.raises(Harm):
        interpret(streams, changed)
    with pytest.raises(StreamError):
        check_streams(dataclasses.replace(streams, instructions=changed), NUM_MICROBATCHES)
