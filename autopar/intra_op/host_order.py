"""Orders copies between the memories of device and host among the kernels of a body.

In:     a sharded body.
Out:    the copies that its instructions wait for besides their operands.
Method: a scheduler that hides latency would begin copies from the host with the program, and end copies to it with the
        program: all of them would be in device memory at once. Here a copy from the host waits for the kernel before it, and
        for the last one that reads something copied before, so that few are on the device; and what makes a value that goes to
        the host waits until those made before are there. Each copy still overlaps with the kernels in between.
        Values of loops' rows are copied in each trip, and need no order.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from autopar._jax import Var, copies_to_or_from_host, on_host
from autopar.intra_op.sharded import Body, Compute, Copy, Instruction, Region
from autopar.intra_op.traffic import is_fused, takes_waits
from autopar.ir.region import kind_of
from autopar.tuning import TUNING


def host_waits(body: Body, num_bytes: Callable[[Copy], int], is_program: bool) -> Mapping[int, tuple[Copy, ...]]:
    """Instruction -> the copies that it waits for.

    `num_bytes`: bytes of a copy on one device. `is_program`: the body is that of no loop or branch.
    """
    if not copies_any_host(body.instructions):
        return {}
    found = dict(arrivals(body, is_program))
    for position, awaited in _kernels_before(body, num_bytes, is_program):
        found[position] = (*found.get(position, ()), *awaited)
    return found


def copies_host(instruction: Instruction) -> bool:
    """Whether an instruction copies between the memories of device and host."""
    return isinstance(instruction, Compute) and copies_to_or_from_host(instruction.eqn)


def copies_any_host(instructions: Iterable[Instruction]) -> bool:
    """Whether any of the instructions copies between the memories of device and host."""
    puts = [i for i in instructions if isinstance(i, Compute) and i.eqn.primitive.name == "device_put"]
    return any(map(copies_host, puts))


def fetched_late(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The instructions, with each copy from the host where the array before is last read, or a loop ends, before its reader.

    Its reader may have been moved back, to wait for a collective.
    """
    if not copies_any_host(instructions):
        return tuple(instructions)
    fetches = {i.makes[0]: k for k, i in enumerate(instructions) if copies_host(i) and not on_host(i.makes[0][0].aval)}
    begins, fetched = list(range(len(instructions))), set[Copy]()
    last = -1
    for position, instruction in enumerate(instructions):
        read = [copy for copy in instruction.reads if copy in fetches]
        for copy in read:
            if copy not in fetched:
                fetched.add(copy)
                begins[fetches[copy]] = max(fetches[copy], last)
        if read or isinstance(instruction, Region):
            last = position + isinstance(instruction, Region)
    order = sorted(range(len(instructions)), key=lambda k: (begins[k], begins[k] == k, k))
    return tuple(instructions[k] for k in order)


def fetched_first(instruction: Instruction) -> Iterator[tuple[Copy, Copy]]:
    """Of a scan, the rows that a trip fetches from stacks in host memory, and the stacks."""
    if not isinstance(instruction, Region) or kind_of(instruction.eqn) != "scan":
        return
    for body in instruction.bodies:
        stacks = dict(zip(body.inputs, zip(instruction.eqn.invars, instruction.operands, strict=True), strict=True))
        for inner in filter(copies_host, body.instructions):
            atom, sharding = stacks.get(inner.reads[0], (None, None))
            if isinstance(atom, Var) and sharding is not None and on_host(atom.aval):
                yield inner.makes[0], (atom, sharding)


def arrivals(body: Body, is_program: bool) -> Mapping[int, tuple[Copy, ...]]:
    """Instruction -> the values in host memory that it waits for until they are there; argument as in `host_waits`.

    Values that are made between the same two kernels are awaited together, by the first of those made after the next kernel;
    the last ones by the kernel that is as far from them as they were from those before.
    """
    if not copies_any_host(body.instructions):
        return {}
    results, arrays, kernel = body.results, _arrays(body), -1
    made_at, before, kernels = dict[Copy, int](), list[int](), list[int]()
    groups: dict[int, list[tuple[int, int, Copy]]] = {}  # last kernel before -> maker, its copy to the host, the result
    for position, instruction in enumerate(body.instructions):
        before.append(kernel)
        if copies_host(instruction) and not on_host(instruction.reads[0][0].aval):
            (there,), maker = instruction.makes, made_at.get(instruction.reads[0], -1)
            if maker >= 0 and (is_program or there not in results):
                groups.setdefault(before[maker], []).append((maker, position, there))
        elif _is_kernel(instruction, arrays):
            kernel = position
            kernels.append(position)
        made_at.update(dict.fromkeys(instruction.makes, position))
    found: dict[int, tuple[Copy, ...]] = {}
    earlier: list[tuple[int, int, Copy]] = []
    gap = 0
    for group in groups.values():
        first = min(maker for maker, _, _ in group)
        if earlier:
            gap = first - earlier[0][0]
            found[_place(body, earlier[-1][1] + 1, first)] = tuple(there for _, _, there in earlier)
        earlier = group
    if earlier:
        last = earlier[-1][1]
        then = next((at for at in kernels if at > last + gap), None)
        if then is not None:
            found[_place(body, last + 1, then)] = tuple(there for _, _, there in earlier)
    return found


class _Made(NamedTuple):
    """A kernel's result, and its bytes on one device."""

    size: int
    copy: Copy


def _kernels_before(
    body: Body, num_bytes: Callable[[Copy], int], is_program: bool
) -> Iterator[tuple[int, tuple[Copy, ...]]]:
    """Copies from the host, and the kernels' results that each waits for."""
    arrays, given = _arrays(body), set() if is_program else set(body.inputs)
    fetched: set[Copy] = set()  # and what is computed from it
    kernels, late = list[_Made](), list[_Made]()
    for position, instruction in enumerate(body.instructions):
        is_late = not fetched.isdisjoint(instruction.reads)
        if copies_host(instruction) and on_host(instruction.reads[0][0].aval):
            is_late = True
            if instruction.reads[0] not in given:
                least = TUNING.late_part * num_bytes(instruction.makes[0])
                ends = (next((each for each in reversed(made) if each.size >= least), None) for made in (kernels, late))
                yield position, tuple(dict.fromkeys(end.copy for end in ends if end is not None))
        elif _is_kernel(instruction, arrays):
            here = [_Made(num_bytes(copy), copy) for copy in instruction.makes if not on_host(copy[0].aval)]
            if here:
                for made in (kernels, late) if is_late else (kernels,):
                    _put_last(made, max(here, key=lambda each: each.size))
        fetched.update(instruction.makes if is_late else ())


def _put_last(made: list[_Made], largest: _Made) -> None:
    """Append a result, without those before that are no larger: whoever looks for a size from the end finds this one."""
    while made and made[-1].size <= largest.size:
        made.pop()
    made.append(largest)


def _arrays(body: Body) -> set[Copy]:
    """The results of a body, and what it copies to the host."""
    return {
        *body.results,
        *(i.reads[0] for i in body.instructions if copies_host(i) and not on_host(i.reads[0][0].aval)),
    }


def _is_kernel(instruction: Instruction, arrays: Container[Copy]) -> bool:
    """Whether an instruction is certainly run where it stands: it is not fused, or makes some of these arrays."""
    if isinstance(instruction, Region):
        return kind_of(instruction.eqn) != "barrier"
    if not isinstance(instruction, Compute) or copies_host(instruction):
        return False
    return (
        not is_fused(instruction)
        or bool(instruction.strategy.reductions)
        or any(copy in arrays for copy in instruction.makes)
    )


def _place(body: Body, begin: int, last: int) -> int:
    """The last elementwise operation since `begin` that leads to the instruction at `last`, where a wait is fused; or that."""
    needed = set(body.instructions[last].reads)
    for at in range(last, begin - 1, -1):
        instruction = body.instructions[at]
        if at == last or not needed.isdisjoint(instruction.makes):
            if takes_waits(instruction):
                return at
            needed.update(instruction.reads)
    return last
