"""Traces the per-device program: interprets a sharded body as JAX code under one fully manual `shard_map`.

In:     a `Body` (`intra_op/sharded.py`), local arrays.
Out:    local results; the traced program has exactly the collectives that the body lists.
Method: an interpreter over copies `(var, sharding) -> local array`; loops and branches recurse. An equation has
        local operands in its strategy's shardings, and its results after the strategy's reductions.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import assert_never

import jax
import jax.numpy as jnp
from jax import lax

from autopar._jax import JaxprEqn, Literal, Var, bind_eqn, on_host
from autopar.cost.steps import Mask, Step
from autopar.intra_op.sharded import Body, Compute, Copy, Fused, Gate, Instruction, Move, Region
from autopar.intra_op.strategies import Strategy
from autopar.ir.region import kind_of, region_of
from autopar.ir.rules.rule import Shard, ShardingRule
from autopar.mesh import Sharding
from autopar.partition.ahead import Ahead, is_seed, waits_at
from autopar.partition.collectives import apply_fused, apply_step, is_along_rows, reduce_at_once, with_rows_major
from autopar.partition.late import find_waits
from autopar.partition.order import after, communicates, needs_order
from autopar.partition.overlap import GPU_PLATFORMS
from autopar.partition.owned import owned_copies, without_loss
from autopar.partition.stacks import scan_into_late_stacks
from autopar.partition.unsent import unsent_waits
from autopar.tuning import TUNING

Copies = dict[Copy, jax.Array]


def run_body(
    body: Body, arguments: Sequence[jax.Array], axis_sizes: Mapping[str, int], platform: str = ""
) -> list[jax.Array]:
    """Run a sharded program on one device's shards of the arguments; call it inside `shard_map`.

    Args:
        body: The sharded program.
        arguments: Local arrays, one per input of the program.
        axis_sizes: Sizes of the mesh axes.
        platform: Platform of the devices, for workarounds: CPUs may reorder collectives (`order.py`), GPUs transpose stacks
            (`collectives.py`).
    """
    copies: Copies = dict(zip(body.inputs, arguments, strict=True))
    owned: dict[Copy, None] = {}
    keeps_order = platform == "cpu" and needs_order(body)
    earlier: jax.Array | None = None
    ahead = Ahead(body, lambda copy: _num_bytes(_local_type(*copy, axis_sizes)))
    late = find_waits(body, ahead.num_bytes)
    unsent = dict(unsent_waits(body, ahead.num_bytes))
    results, losses = {atom for atom, _ in body.outputs if isinstance(atom, Var)}, list[jax.Array]()
    for position, instruction in enumerate(body.instructions):
        is_ordered = keeps_order and communicates(instruction)
        if waits_at(instruction):
            delayed, awaited = ahead.of_again(position)
            copies.update(
                {
                    copy: after(copies[copy], *map(lax.optimization_barrier, (copies[c] for c in awaited)))
                    for copy in delayed
                }
            )
        if position in ahead.of_large:
            waiting, awaited = ahead.of_large[position]
            copies[waiting] = after(copies[waiting], *(copies[copy] for copy in awaited))
        first = [(copies[copy], freed) for copy, freed in ahead.of_loop(position)]
        constants = _delayed_constants(ahead, position, copies)
        undelayed = {copy: copies[copy] for copy in constants}
        copies.update(constants)
        if position in late:
            waiting, work = late[position]
            undelayed[waiting] = copies[waiting]
            copies[waiting] = after(copies[waiting], copies[work])
        if position in unsent:
            waiting, awaited = unsent[position]
            undelayed.setdefault(waiting, copies[waiting])
            copies[waiting] = after(copies[waiting], *(copies[copy] for copy in awaited))
        made = _run_instruction(
            instruction, copies, axis_sizes, platform, earlier if is_ordered else None, owned, first
        )
        if isinstance(instruction, Compute) and all(_num_bytes(array) < TUNING.late_bytes for array in made.values()):
            if is_seed(instruction):
                made = {copy: after(array, *losses) for copy, array in made.items()}
            losses += [array for (var, _), array in made.items() if var in results and not array.ndim]
        copies.update(undelayed)
        copies.update(made)
        copies.update(_delayed_carries(ahead, position, copies))
        still = list(owned_copies(instruction, owned))
        for copy in made:
            owned.pop(copy, None)
        owned.update(dict.fromkeys(still))
        if is_ordered:
            earlier = next(iter(made.values()), earlier)
    return [_read(copies, atom, sharding, axis_sizes) for atom, sharding in body.outputs]


def _run_instruction(
    instruction: Instruction,
    copies: Copies,
    axis_sizes: Mapping[str, int],
    platform: str,
    earlier: jax.Array | None,
    owned: Container[Copy],
    first: Sequence[tuple[jax.Array, int]],
) -> Copies:
    """Run an instruction and return the copies that it makes.

    Its operands wait for `earlier`, those of a loop also for `first`; `owned`: the owned sums (`owned.py`).
    """
    match instruction:
        case Move() | Fused():
            moves = instruction.moves if isinstance(instruction, Fused) else (instruction,)
            arrays = [after(copies[m.var, m.source], copies[m.earlier] if m.earlier else None) for m in moves]
            arrays[0] = after(arrays[0], earlier)
            arrays = [a if m.narrow is None else a.astype(m.narrow) for m, a in zip(moves, arrays, strict=True)]
            if isinstance(instruction, Move) and platform in GPU_PLATFORMS:
                arrays = [with_rows_major(arrays[0], instruction.step)]
            exact = all((move.var, move.source) in owned for move in moves)
            results = _move(arrays, [move.step for move in moves], axis_sizes, platform, exact)
            return {
                (m.var, m.target): a if m.narrow is None else a.astype(m.var.aval.dtype)
                for m, a in zip(moves, results, strict=True)
            }
        case Compute(eqn, rule, strategy):
            operands = [_read(copies, a, s, axis_sizes) for a, s in zip(eqn.invars, strategy.operands, strict=True)]
            operands[:1] = [after(operand, earlier) for operand in operands[:1]]
            results = run_equation(eqn, rule, strategy, axis_sizes, operands, platform)
            return dict(zip(zip(eqn.outvars, strategy.results, strict=True), results, strict=True))
        case Region(eqn, operands, results):
            arrays = [_read(copies, a, s, axis_sizes) for a, s in zip(eqn.invars, operands, strict=True)]
            arrays = _begin_after(instruction, arrays, first)
            made = _run_region(instruction, _some_after(arrays, earlier), axis_sizes, platform)
            return dict(zip(zip(eqn.outvars, results, strict=True), made, strict=True))
        case Gate():
            return {}  # `run_body` has delayed its copies
        case _:
            assert_never(instruction)


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


def _delayed_constants(ahead: Ahead, position: int, copies: Copies) -> Copies:
    """A loop's large operands that depend on constants alone (`ahead.py`), made to wait for its largest carry."""
    region, constants = ahead.body.instructions[position], ahead.of_numbers(position)
    if not isinstance(region, Region) or not constants:
        return {}
    entering = [b for b in region_of(region.eqn).bindings if b.outer is not None]
    given = list(zip(entering, zip(region.eqn.invars, region.operands, strict=True), strict=True))
    carried = [copies[c] for b, c in given if b.role == "carry" and not isinstance(c[0], Literal)]
    first = max(carried, key=_num_bytes, default=None)
    return {copy: after(copies[copy], first) for copy in constants}


def _delayed_carries(ahead: Ahead, position: int, copies: Copies) -> Copies:
    """The carries of a loop that communicates, made to wait for its stacks (`ahead.py`)."""
    region = ahead.body.instructions[position]
    if not isinstance(region, Region) or kind_of(region.eqn) != "scan" or not communicates(region):
        return {}
    rows = [copies[copy] for copy in ahead.behind_loop(position)]
    return {copy: after(copies[copy], *rows) for copy in region.makes[: len(region_of(region.eqn).carries)]}


def _begin_after(
    region: Region, operands: Sequence[jax.Array], first: Sequence[tuple[jax.Array, int]]
) -> list[jax.Array]:
    """Make a loop's small carries, and its smallest operand, wait for `first`."""
    arrays = list(operands)
    if not arrays or not first:
        return arrays
    entering = [b for b in region_of(region.eqn).bindings if b.outer is not None]
    smallest = min(range(len(arrays)), key=lambda k: (not arrays[k].size, arrays[k].size, k))
    for witness, freed in first:
        for k, (b, array) in enumerate(zip(entering, arrays, strict=True)):
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


def _local_types(region: Region, axis_sizes: Mapping[str, int]) -> list[jax.ShapeDtypeStruct | None]:
    """Local types of a region's results; None: in host memory."""
    made = zip(region.eqn.outvars, region.results, strict=True)
    return [None if on_host(var.aval) else _local_type(var, sharding, axis_sizes) for var, sharding in made]


def _run_region(
    region: Region, operands: Sequence[jax.Array], axis_sizes: Mapping[str, int], platform: str
) -> Sequence[jax.Array]:
    params, parts = region.eqn.params, region_of(region.eqn)
    runs = [lambda *arrays, body=body: tuple(run_body(body, arrays, axis_sizes, platform)) for body in region.bodies]
    of_role: dict[str, list[jax.Array]] = {role: [] for role in ("test", "const", "carry", "xs", "through")}
    entering = [b for b in parts.bindings if b.outer is not None]
    for b, array in zip(entering, operands, strict=True):
        of_role[b.role].append(array)
    consts, carries = of_role["const"], tuple(of_role["carry"])
    match parts.kind:
        case "scan":

            def step(carried, rows):
                made = runs[0](*consts, *carried, *rows)
                return made[: len(carried)], made[len(carried) :]

            how = {name: params[name] for name in ("length", "reverse", "unroll")}
            if platform == "cpu":
                types = _local_types(region, axis_sizes)[len(carries) :]
                last, stacks = scan_into_late_stacks(step, carries, tuple(of_role["xs"]), types, **how)
            else:
                last, stacks = lax.scan(step, carries, tuple(of_role["xs"]), **how)
            return [*last, *stacks]
        case "while":
            num_tests = sum(b.inner[0] is not None for b in parts.consts)
            return lax.while_loop(
                lambda carried: runs[0](*consts[:num_tests], *carried)[0],
                lambda carried: runs[1](*consts[num_tests:], *carried),
                carries,
            )
        case "cond":
            return lax.switch(of_role["test"][0], runs, *consts)
        case "barrier":
            return lax.optimization_barrier(tuple(operands))


def run_equation(
    eqn: JaxprEqn,
    rule: ShardingRule,
    strategy: Strategy,
    axis_sizes: Mapping[str, int],
    operands: Sequence[jax.Array],
    platform: str = "",
) -> list[jax.Array]:
    """Run `eqn` under `strategy` on this device; call it inside `shard_map`."""
    shard = Shard(strategy.axes_of, axis_sizes, rule.sizes, platform=platform)
    if strategy.travels and rule.travel is not None:
        # Each product sends its own rows, as planned: the added dependence keeps XLA from merging equal sends.
        first, second, *others = operands
        sent = [
            after(*pair) if k in rule.travel.travelling else pair[0]
            for k, pair in enumerate(((first, second), (second, first)))
        ]
        operands = [*sent, *others]
    if rule.once:
        results = _run_once(eqn, rule, shard, axis_sizes, operands)
    elif rule.local is not None:
        results = list(rule.local(eqn, shard, *operands))
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
