"""Traces the per-device program: interprets a sharded body as JAX code under one fully manual `shard_map`.

In:     a `Body` (`intra_op/sharded.py`), local arrays.
Out:    local results; the traced program has exactly the collectives that the body lists.
Method: an interpreter over copies `(var, sharding) -> local array`; loops and branches recurse. An equation has
        local operands in its strategy's shardings, and its results after the strategy's reductions.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import assert_never

import jax
import jax.numpy as jnp
from jax import lax

from autopar._jax import JaxprEqn, Literal, Var, bind_eqn, on_host
from autopar.cost.steps import AllGather, AllReduce, Mask, Step
from autopar.grouping import grouped
from autopar.intra_op.host_order import copies_host
from autopar.intra_op.sharded import Body, Compute, Copy, Fused, Gate, Instruction, Move, Region, communicates
from autopar.intra_op.strategies import Strategy
from autopar.intra_op.traffic import is_fused
from autopar.ir.region import region_of
from autopar.ir.rules.on_platforms import as_on_gpus, bind_on_cpu
from autopar.ir.rules.rule import Shard, ShardingRule
from autopar.mesh import Sharding
from autopar.partition.ahead import Ahead
from autopar.partition.collectives import apply_fused, apply_step, is_along_rows, reduce_at_once, with_rows_major
from autopar.partition.late import late_delays
from autopar.partition.order import (
    Delay,
    after,
    after_in_buffer,
    after_on_host,
    end_of,
    first_element,
    host_buffer,
    host_delays,
    in_buffers,
    needs_order,
    through_barrier,
)
from autopar.partition.overlap import GPU_PLATFORMS
from autopar.partition.owned import owned_copies, without_loss
from autopar.partition.selected import add_to_selected
from autopar.partition.stacks import begun_late, overwritten, scan_into
from autopar.tuning import TUNING

Copies = dict[Copy, jax.Array]


def run_body(
    body: Body,
    arguments: Sequence[jax.Array],
    axis_sizes: Mapping[str, int],
    platform: str = "",
    is_program: bool = True,
    carries: Sequence[Copy] = (),
) -> list[jax.Array]:
    """Run a sharded program on one device's shards of the arguments; call it inside `shard_map`.

    Args:
        body: The sharded program.
        arguments: Local arrays, one per input of the program.
        axis_sizes: Sizes of the mesh axes.
        platform: Platform of the devices, for workarounds: CPUs may reorder collectives (`order.py`), GPUs transpose stacks
            (`collectives.py`).
        is_program: The body is that of no loop or branch.
        carries: Of the inputs, those that a loop's trip has from the one before.
    """
    copies: Copies = dict(zip(body.inputs, arguments, strict=True))
    buffers: Copies = {}
    pinned = frozenset(copies if platform in GPU_PLATFORMS else ())
    owned: dict[Copy, None] = {}
    keeps_order = platform == "cpu" and needs_order(body)
    earlier: jax.Array | None = None
    ahead = Ahead(body, lambda copy: _num_bytes(_local_type(*copy, axis_sizes)))
    of_hosts = host_delays(body, ahead.num_bytes, is_program) if platform in GPU_PLATFORMS else []
    others = *late_delays(body, ahead.num_bytes, carries), *ahead.unsent()
    waits = *ahead.delays(), *others, *of_hosts
    delays = grouped((delay.position, delay) for delay in waits)
    in_buffer = in_buffers(body, of_hosts)
    kept = _added_up(body, ahead.made_at) if platform in GPU_PLATFORMS else ()
    for position, instruction in enumerate(body.instructions):
        is_ordered = keeps_order and communicates(instruction)
        undelayed = _delay(copies, buffers, delays.get(position, ()), pinned if _is_elementwise(instruction) else ())
        if copies_host(instruction):
            _keep_there(
                copies, [copy for copy in instruction.reads if ahead.made_at[copy] >= 0 and copy not in buffers]
            )
        first = [(copies[copy], freed) for copy, freed in ahead.before_loop(position)]
        spent = [copy for copy in instruction.reads if is_program and ahead.readers[copy][-1] == position]
        reader = ahead.only_reader(instruction)
        made = _run_instruction(
            instruction, copies, axis_sizes, platform, earlier if is_ordered else None, owned, first, spent, reader
        )
        if of_hosts and _gathers_for_update(instruction, ahead):
            made = {copy: with_rows_major(a) for copy, a in made.items()}
        if copies_host(instruction):
            buffers.update({copy: host_buffer(array) for copy, array in made.items() if copy in in_buffer})
        buffers.update({copy: buffers[read] for read, copy in through_barrier(instruction) if read in buffers})
        copies.update(undelayed)
        copies.update({copy: lax.optimization_barrier(a) if copy in kept else a for copy, a in made.items()})
        still = list(owned_copies(instruction, owned))
        for copy in made:
            owned.pop(copy, None)
        owned.update(dict.fromkeys(still))
        if is_ordered:
            earlier = next(iter(made.values()), earlier)
    return [_read(copies, atom, sharding, axis_sizes) for atom, sharding in body.outputs]


def _is_elementwise(instruction: Instruction) -> bool:
    return isinstance(instruction, Compute) and is_fused(instruction) and not instruction.rule.moves_data


def _gathers_for_update(instruction: Instruction, ahead: Ahead) -> bool:
    """Whether only elementwise work reads what is gathered: XLA would update in the layout of the gather, and transpose all
    state in the end."""
    readers = (ahead.body.instructions[k] for copy in instruction.makes for k in ahead.readers.get(copy, ()))
    return _gathers_rows(instruction) and all(map(_is_elementwise, readers))


def _keep_there(copies: Copies, made: Iterable[Copy]) -> None:
    """Before copies back, keep XLA from simplifying a copy to host memory and back to no copy at all."""
    copies.update({copy: lax.optimization_barrier(copies[copy]) for copy in made if on_host(copy[0].aval)})


def _added_up(body: Body, made_at: Mapping[Copy, int]) -> set[Copy]:
    """All-reduced values that, perhaps cast, elementwise work reads beside an input of the body.

    Where that adds up a loop's sum, XLA for GPUs would move the all-reduce behind the loop, where it overlaps with nothing,
    and add up in the dtype that is sent; a barrier keeps it from that. An update is no such sum.
    """
    found: set[Copy] = set()
    for instruction in body.instructions:
        if isinstance(instruction, Compute) and is_fused(instruction) and len(instruction.reads) > 1:
            if any(made_at[copy] < 0 for copy in instruction.reads) and not instruction.rule.reused:
                for copy in instruction.reads:
                    while (at := made_at[copy]) >= 0:
                        maker = body.instructions[at]
                        if _all_reduces(maker):
                            found.add(copy)
                        if not isinstance(maker, Compute) or not is_fused(maker) or len(maker.reads) != 1:
                            break
                        (copy,) = maker.reads
    return found


def _all_reduces(instruction: Instruction) -> bool:
    return isinstance(instruction, Move | Fused) and all(isinstance(m.step, AllReduce) for m in instruction.moves)


def _delay(copies: Copies, buffers: Copies, delays: Iterable[Delay], pinned: Container[Copy]) -> Copies:
    """Apply the delays of one position; return the undelayed copies that later instructions read.

    `buffers`: in host memory, of copies that this program has put there. `pinned`: copies that stay in the layout that they
    have.
    """
    undelayed: Copies = {}
    for delay in delays:
        awaited = [copies[copy] for copy in delay.awaited]
        if delay.of_hosts:
            awaited = [
                end_of(buffers[copy]) if copy in buffers else first_element(array) if on_host(copy[0].aval) else array
                for copy, array in zip(delay.awaited, awaited, strict=True)
            ]
        held = {copy: copies[copy] for copy in delay.copies}
        for copy, array in held.items():
            earlier = map(lax.optimization_barrier, awaited) if delay.whole else awaited
            if copy in buffers:
                waits = after_in_buffer(buffers[copy], array.shape, *earlier)
            elif delay.of_hosts and on_host(copy[0].aval):
                waits = after_on_host(array, *earlier)
            else:
                waits = after(array, *earlier) if awaited else lax.optimization_barrier(array)
            copies[copy] = with_rows_major(waits) if copy in pinned and waits is not array else waits
        if not delay.lasts:
            undelayed = held | undelayed
    return undelayed


def _run_instruction(
    instruction: Instruction,
    copies: Copies,
    axis_sizes: Mapping[str, int],
    platform: str,
    earlier: jax.Array | None,
    owned: Container[Copy],
    first: Sequence[tuple[jax.Array, int]],
    spent: Container[Copy],
    reader: JaxprEqn | None,
) -> Copies:
    """Run an instruction and return the copies that it makes.

    Its operands wait for `earlier`, those of a loop also for `first`; `owned`: the owned sums (`owned.py`); `spent`: copies
    that nothing reads later; `reader`: the only equation that reads what it makes.
    """
    match instruction:
        case Move() | Fused():
            moves = instruction.moves
            arrays = [after(copies[m.var, m.source], copies[m.earlier] if m.earlier else None) for m in moves]
            arrays[0] = after(arrays[0], earlier)
            arrays = [a if m.narrow is None else a.astype(m.narrow) for m, a in zip(moves, arrays, strict=True)]
            if platform in GPU_PLATFORMS and _gathers_rows(instruction):
                arrays = [with_rows_major(arrays[0])]
            exact = all((move.var, move.source) in owned for move in moves)
            results = _move(arrays, [move.step for move in moves], axis_sizes, platform, exact)
            if len(moves) > 1 and isinstance(moves[0].step, AllGather):  # else readers keep the packed array
                results = lax.optimization_barrier(results)
            return {
                (m.var, m.target): a if m.narrow is None else a.astype(m.var.aval.dtype)
                for m, a in zip(moves, results, strict=True)
            }
        case Compute(eqn, rule, strategy):
            operands = [_read(copies, a, s, axis_sizes) for a, s in zip(eqn.invars, strategy.operands, strict=True)]
            operands[:1] = [after(operand, earlier) for operand in operands[:1]]
            results = run_equation(eqn, rule, strategy, axis_sizes, operands, platform, reader)
            return dict(zip(zip(eqn.outvars, strategy.results, strict=True), results, strict=True))
        case Region(eqn, operands, results):
            arrays = [_read(copies, a, s, axis_sizes) for a, s in zip(eqn.invars, operands, strict=True)]
            arrays = _begin_after(instruction, arrays, first)
            made = _run_region(instruction, _some_after(arrays, earlier), axis_sizes, platform, spent)
            return dict(zip(zip(eqn.outvars, results, strict=True), made, strict=True))
        case Gate():
            return {}  # `run_body` has delayed its copies
        case _:
            assert_never(instruction)


def _gathers_rows(instruction: Instruction) -> bool:
    """Whether an instruction is a gather along an inner dim, not packed with others."""
    step = instruction.step if isinstance(instruction, Move) else None
    return isinstance(step, AllGather) and step.dim > 0


def _move(
    arrays: Sequence[jax.Array], steps: Sequence[Step], axis_sizes: Mapping[str, int], platform: str, exact: bool
) -> list[jax.Array]:
    def carry_out(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        if len(arrays) == 1 and not (platform == "cpu" and is_along_rows(steps[0])):
            return [apply_step(arrays[0], steps[0], axis_sizes)]
        return apply_fused(arrays, steps, axis_sizes)

    return without_loss(arrays, steps, axis_sizes, carry_out) if exact else carry_out(arrays)


def _some_after(operands: Sequence[jax.Array], earlier: jax.Array | None) -> list[jax.Array]:
    """Make the small operands of a loop wait: it begins once all are ready, and delaying large ones would cost memory."""
    if earlier is None:
        return list(operands)
    limit = max(sum(array.size for array in operands) // 64, min((array.size for array in operands), default=0))
    return [after(array, earlier) if array.size <= limit else array for array in operands]


def _begin_after(
    region: Region, operands: Sequence[jax.Array], first: Sequence[tuple[jax.Array, int]]
) -> list[jax.Array]:
    """Make a loop's small carries, and its smallest operand, wait for `first`."""
    arrays = list(operands)
    parts = region_of(region.eqn)
    smallest = min(range(len(arrays)), key=lambda k: (not arrays[k].size, arrays[k].size, k), default=0)
    for witness, freed in first:
        for k, (b, array) in enumerate(zip(parts.of_operands(parts.bindings), arrays, strict=True)):
            if k == smallest or (b.role == "carry" and _num_bytes(array) <= TUNING.late_part * freed):
                arrays[k] = after(array, witness)
    return arrays


def _num_bytes(array: jax.Array | jax.ShapeDtypeStruct) -> int:
    return array.size * array.dtype.itemsize


def _local_type(var: Var, sharding: Sharding, axis_sizes: Mapping[str, int]) -> jax.ShapeDtypeStruct:
    """Of a copy on one device."""
    parts = [math.prod(axis_sizes[axis] for axis in axes) for axes in sharding.dims]
    shape = [size // count for size, count in zip(var.aval.shape, parts, strict=True)]
    return jax.ShapeDtypeStruct(tuple(shape), var.aval.dtype)


def _read(copies: Copies, atom: Var | Literal, sharding: Sharding, axis_sizes: Mapping[str, int]) -> jax.Array:
    if not isinstance(atom, Literal):
        return copies[atom, sharding]
    value = jnp.asarray(atom.val, dtype=atom.aval.dtype)
    return apply_step(value, Mask(sharding.partial), axis_sizes) if sharding.partial else value


def _run_region(
    region: Region,
    operands: Sequence[jax.Array],
    axis_sizes: Mapping[str, int],
    platform: str,
    spent: Container[Copy],
) -> Sequence[jax.Array]:
    params, parts = region.eqn.params, region_of(region.eqn)
    carried = [
        [c for b, c in zip(parts.entering(k, parts.bindings), body.inputs, strict=True) if b.role == "carry"]
        for k, body in enumerate(region.bodies)
    ]
    runs = [
        lambda *arrays, body=body, carries=carries: tuple(
            run_body(body, arrays, axis_sizes, platform, is_program=False, carries=carries)
        )
        for body, carries in zip(region.bodies, carried, strict=True)
    ]
    of_role: dict[str, list[jax.Array]] = {role: [] for role in ("test", "const", "carry", "xs", "through")}
    read: list[Copy] = []
    for b, array, sharding in zip(parts.of_operands(parts.bindings), operands, region.operands, strict=True):
        of_role[b.role].append(array)
        read += [(b.operand, sharding)] if b.role == "xs" else []
    consts, carries = of_role["const"], tuple(of_role["carry"])
    match parts.kind:
        case "scan":
            how = {name: params[name] for name in ("length", "reverse", "unroll")}
            made = list(zip(region.eqn.outvars, region.results, strict=True))[len(carries) :]

            def step(carried, rows):
                results = runs[0](*consts, *carried, *_in_layout(rows, read, platform))
                return results[: len(carried)], _in_layout(results[len(carried) :], made, platform)

            types = [_local_type(*copy, axis_sizes) for copy in made]
            there = [on_host(var.aval) for var, _ in made]
            xs = tuple(of_role["xs"])
            over = overwritten(types, there, xs, [stack in spent for stack in read])
            own = {k: kind for k, kind in enumerate(types) if not there[k] and k not in over}
            late = begun_late(region, carries, xs, own, platform)
            last, stacks = scan_into(late, over, step, carries, xs, **how)
            return [*last, *stacks]
        case "while":
            num_tests = sum(b.inputs[0] is not None for b in parts.consts)
            return lax.while_loop(
                lambda carried: runs[0](*consts[:num_tests], *carried)[0],
                lambda carried: runs[1](*consts[num_tests:], *carried),
                carries,
            )
        case "cond":
            return lax.switch(of_role["test"][0], runs, *consts)
        case "barrier":
            kept = iter(lax.optimization_barrier([x for x in operands if not on_host(jax.typeof(x))]))
            return [x if on_host(jax.typeof(x)) else next(kept) for x in operands]


def _in_layout(rows: Sequence[jax.Array], stacks: Iterable[Copy], platform: str) -> Sequence[jax.Array]:
    """Rows of stacks, on GPUs in the layout that all stacks in device memory have (`with_rows_major`)."""
    if platform not in GPU_PLATFORMS:
        return rows
    return [a if on_host(var.aval) else with_rows_major(a) for a, (var, _) in zip(rows, stacks, strict=True)]


def run_equation(
    eqn: JaxprEqn,
    rule: ShardingRule,
    strategy: Strategy,
    axis_sizes: Mapping[str, int],
    operands: Sequence[jax.Array],
    platform: str = "",
    reader: JaxprEqn | None = None,
) -> list[jax.Array]:
    """Run `eqn` under `strategy` on this device; call it inside `shard_map`. `reader`: the only one of its result here."""
    shard = Shard(strategy.axes_of, axis_sizes, rule.sizes, platform=platform)
    if strategy.exchanged_over and rule.exchange is not None:
        # Each product sends its own rows, as planned: the added dependence keeps XLA from merging equal sends.
        pairs = enumerate((operands[:2], operands[1::-1]))
        sent = [after(*pair) if k in rule.exchange.exchanged else pair[0] for k, pair in pairs]
        operands = [*sent, *operands[2:]]
    if platform in GPU_PLATFORMS:
        operands = as_on_gpus(eqn, operands)
    if rule.host_call:
        results = _run_once(eqn, rule, shard, axis_sizes, operands)
    elif rule.local is not None:
        results = list(rule.local(eqn, shard, *operands))
    elif platform == "cpu":
        results = bind_on_cpu(eqn, operands, None if strategy.reductions else reader)
    elif platform in GPU_PLATFORMS and rule.selected is not None and len(operands) == 2:  # a third: an initial value
        results = [add_to_selected(eqn, *operands)]
    else:
        results = bind_eqn(eqn, *operands)
    for kind, axes in strategy.reductions:
        results = reduce_at_once(results, kind, axes)
    return results


def _run_once(
    eqn: JaxprEqn, rule: ShardingRule, shard: Shard, axis_sizes: Mapping[str, int], operands: Sequence[jax.Array]
) -> list[jax.Array]:
    """Run a call into the host on the first device only; the others return zeros, so that the sum is right."""

    def call(*arrays: jax.Array) -> list[jax.Array]:
        return bind_eqn(eqn, *arrays) if rule.local is None else list(rule.local(eqn, shard, *arrays))

    def nothing(*_: jax.Array) -> list[jax.Array]:
        return [jnp.zeros(var.aval.shape, var.aval.dtype) for var in eqn.outvars]

    first = lax.axis_index(tuple(axis_sizes)) == 0
    return lax.cond(first, call, nothing, *operands)
