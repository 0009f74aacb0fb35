"""Evaluates the index maps of a Pallas kernel: which block of an array each step of the grid has.

In:     an index map as JAX traces it (grid indices, scalars known only at run time -> block numbers), the grid.
Out:    `block_numbers`: the numbers at every step of the grid; `split_steps` and `digits_in`: the same in mixed radix.
Method: a grid is small, so the map is run on all steps at once, in NumPy and without a device. The index of grid dim d
        is an array that is longer than 1 along dim d only, so the shape of a result tells which dims it depends on. A grid
        index is then written in digits, minor to major, and a map is understood if its block numbers count through digits:
        `i`, `i // 4` (a key head for four query heads), `i % 4`, `8 * i + j` all do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar._jax import Atom, ClosedJaxpr, Constant, Function, Jaxpr, JaxprEqn, Literal, Params, Var, open_jaxpr

MAX_STEPS = 2**20
"""Block numbers that depend on more steps than this are not evaluated."""


@dataclass(frozen=True, slots=True)
class BlockNumbers:
    """The block of one array dim at each step of a grid.

    Attributes:
        grid_dims: The grid dims it may depend on.
        numbers: int[grid...], of length 1 along other dims; None: known only at run time.
    """

    grid_dims: frozenset[int]
    numbers: np.ndarray | None


def block_numbers(index_map: Jaxpr | ClosedJaxpr, grid: Sequence[int | None]) -> list[BlockNumbers]:
    """Evaluate an index map, for each dim of its array; a grid dim of None has a length known only at run time."""
    jaxpr, consts = open_jaxpr(index_map)
    indices = [_index(dim, grid) for dim in range(len(grid))]
    unknown = [BlockNumbers(frozenset(), None)] * (len(jaxpr.invars) - len(grid))  # run-time scalars
    return _run(jaxpr, [_known(value, len(grid)) for value in consts], [*indices, *unknown], len(grid))


def _index(dim: int, grid: Sequence[int | None]) -> BlockNumbers:
    length = grid[dim]
    if length is None:
        return BlockNumbers(frozenset([dim]), None)
    numbers = np.arange(length, dtype=np.int32).reshape([length if d == dim else 1 for d in range(len(grid))])
    return BlockNumbers(frozenset([dim]), numbers)


def _known(value: Constant | int, ndim: int) -> BlockNumbers:
    numbers = np.asarray(value) if np.ndim(value) == 0 else None
    return BlockNumbers(frozenset(), None if numbers is None else numbers.reshape((1,) * ndim))


def _run(
    jaxpr: Jaxpr, consts: Sequence[BlockNumbers], operands: Sequence[BlockNumbers], ndim: int
) -> list[BlockNumbers]:
    env: dict[Var, BlockNumbers] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=False))

    def read(atom: Atom) -> BlockNumbers:
        return _known(np.asarray(atom.val, atom.aval.dtype), ndim) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _step(eqn, [read(atom) for atom in eqn.invars], ndim), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _step(eqn: JaxprEqn, operands: Sequence[BlockNumbers], ndim: int) -> list[BlockNumbers]:
    dims = frozenset[int]().union(*(operand.grid_dims for operand in operands))
    if eqn.primitive.name in ("jit", "pjit", "closed_call"):
        body, consts = open_jaxpr(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")))
        return _run(body, [_known(value, ndim) for value in consts], operands, ndim)
    if not operands:
        dims = frozenset(range(ndim))  # such as `program_id`
    return [BlockNumbers(dims, numbers_of(eqn, [each.numbers for each in operands], ndim))] * len(eqn.outvars)


def numbers_of(eqn: JaxprEqn, operands: Sequence[np.ndarray | None], front: int) -> np.ndarray | None:
    """Evaluate an equation on known operands; None: an operand or the operation is unknown.

    `front`: how many dims of steps lead each array; they have length 1 where all steps agree.
    """
    arrays = [array for array in operands if array is not None]
    if len(arrays) < len(operands) or len(eqn.outvars) != 1 or not hasattr(eqn.outvars[0].aval, "dtype"):
        return None
    aval, name, params = eqn.outvars[0].aval, eqn.primitive.name, eqn.params
    shape = tuple(aval.shape)
    if name == "iota":
        line = np.arange(shape[params["dimension"]], dtype=aval.dtype).reshape(*(1,) * front, -1)
        return _spread(line, shape, (params["dimension"],), front)
    if name in ("broadcast_in_dim", "broadcast_to"):
        last = range(len(shape) - (arrays[0].ndim - front), len(shape))
        return _spread(arrays[0], shape, params.get("broadcast_dimensions", last), front)
    if name in ("reshape", "squeeze") and arrays[0].size <= MAX_STEPS:
        return arrays[0].reshape(*arrays[0].shape[:front], *shape)
    steps = np.broadcast_shapes(*(array.shape[:front] for array in arrays))
    if name not in OPERATIONS or math.prod(steps) * math.prod(shape) > MAX_STEPS:
        return None
    aligned = [a.reshape(*a.shape, *(1,) * len(shape)) if a.ndim == front else a for a in arrays]
    with np.errstate(all="ignore"):
        made = np.asarray(OPERATIONS[name](params, *aligned)).astype(aval.dtype)
    for axis in range(front if made.dtype == np.bool_ else 0):
        first = made.take([0], axis)
        made = first if (made == first).all() else made  # all steps agree
    return made


def _spread(array: np.ndarray, shape: Sequence[int], dims: Sequence[int], front: int) -> np.ndarray:
    """Broadcast an array to the result's shape, behind the dims of steps."""
    lengths = [1] * len(shape)
    for d, size in zip(dims, array.shape[front:], strict=True):
        lengths[d] = size
    return np.broadcast_to(array.reshape(*array.shape[:front], *lengths), (*array.shape[:front], *shape))


def _quotient(_: Params, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Division; of integers rounded towards zero, as in XLA."""
    if np.issubdtype(np.result_type(a, b), np.floating):
        return a / b
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.maximum(np.abs(b), 1))


def _select(_: Params, which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    return np.select([which == k for k in range(len(cases))], list(cases))


def _of(function: Function) -> Function:
    return lambda _, *arrays: function(*arrays)


OPERATIONS: Mapping[str, Function] = {
    **{name: _of(getattr(np, name)) for name in ("abs", "sign")},
    **{"add": _of(np.add), "sub": _of(np.subtract), "mul": _of(np.multiply), "neg": _of(np.negative)},
    **{"max": _of(np.maximum), "min": _of(np.minimum), "rem": _of(np.fmod), "div": _quotient},
    **{"and": _of(np.bitwise_and), "or": _of(np.bitwise_or), "xor": _of(np.bitwise_xor), "not": _of(np.invert)},
    **{"eq": _of(np.equal), "ne": _of(np.not_equal), "lt": _of(np.less), "le": _of(np.less_equal)},
    **{"gt": _of(np.greater), "ge": _of(np.greater_equal), "select_n": _select},
    "shift_left": _of(np.left_shift),
    "shift_right_arithmetic": _of(np.right_shift),
    "clamp": _of(lambda low, x, high: np.minimum(np.maximum(x, low), high)),
    **dict.fromkeys(("convert_element_type", "copy", "copy_p", "stop_gradient"), _of(lambda x: x)),
}
"""Elementwise operations in NumPy: functions of the equation's parameters and the arrays."""


Digit = tuple[int, int]
"""(grid dim, number of the digit, from the minor one)"""


def split_steps(grid: Sequence[int | None], maps: Sequence[BlockNumbers]) -> list[tuple[int, ...]]:
    """For each grid dim, the lengths of its digits, minor to major, such that the maps count through digits.

    One digit, the dim itself, where no map needs more, or where the maps' digits do not fit together.
    """
    changes: list[set[int]] = [set() for _ in grid]
    for numbers in (each.numbers for each in maps if each.numbers is not None):
        for dim in range(numbers.ndim):
            change = _first_change(_along(numbers, dim))
            if change is not None:
                changes[dim].add(change)
    return [_digits(length, sorted(changes[dim])) for dim, length in enumerate(grid)]


def _along(numbers: np.ndarray, dim: int) -> np.ndarray:
    """The numbers along one grid dim, at the first step of the others."""
    return numbers[tuple(slice(None) if d == dim else 0 for d in range(numbers.ndim))]


def _first_change(line: np.ndarray) -> int | None:
    """The first position where the numbers stop being constant or growing linearly; None: there is none."""
    if len(line) < 2:
        return None
    even = line[0] + (line[1] - line[0]) * np.arange(len(line))
    apart = np.flatnonzero(line != even)
    return int(apart[0]) if len(apart) else None


def _digits(length: int | None, changes: Sequence[int]) -> tuple[int, ...]:
    if length is None:
        return (1,)
    places = [1, *changes, length]
    if any(b % a for a, b in zip(places, places[1:], strict=False)):
        return (length,)
    return tuple(b // a for a, b in zip(places, places[1:], strict=False))


def digits_in(each: BlockNumbers, num_blocks: int, lengths: Sequence[tuple[int, ...]]) -> tuple[Digit, ...] | None:
    """The digits, major to minor, through which block numbers count 0, 1, ... `num_blocks` - 1; None: they do not."""
    numbers = each.numbers
    if numbers is None or numbers.flat[0] != 0:
        return None
    step_of: dict[Digit, int] = {}
    rebuilt = np.zeros((1,) * numbers.ndim, np.int64)
    for dim in range(numbers.ndim):
        if numbers.shape[dim] == 1:
            continue
        line = _along(numbers, dim)
        place, values = 1, np.arange(len(line))
        for k, length in enumerate(lengths[dim]):
            step = int(line[place]) if length > 1 else 0
            if step:
                step_of[dim, k] = step
                counted = step * (values // place % length)
                rebuilt = rebuilt + counted.reshape([-1 if d == dim else 1 for d in range(numbers.ndim)])
            place *= length
    if not np.array_equal(np.broadcast_to(rebuilt, numbers.shape), numbers):
        return None
    minor_first = sorted(step_of, key=step_of.__getitem__)
    count = 1
    for digit in minor_first:
        if step_of[digit] != count:
            return None
        count *= lengths[digit[0]][digit[1]]
    return tuple(reversed(minor_first)) if count == num_blocks else None
