"""The rule of a Pallas kernel, from its grid and the index maps of its blocks.

In:     a `pallas_call`: a grid, and for each array the block shape and the block that each step of the grid has.
Out:    `ShardingRule`: a grid dim that walks the blocks of every result, and walks operands fully or not at all, is a factor
        of the grid dim's length, which may be split; so is one whose steps add up the results that it does not walk
        (`kernel_steps.py`), where fewer steps make a partial sum. The per-device program is the kernel over fewer steps.
Method: a dim of n blocks of b elements is two factors, `(block, inside)`, the second whole. A grid dim is whole if the
        kernel reads its index (`program_id`: a causal mask) for more than to find its rows in whole arrays
        (`kernel_steps.py`), if a block is written at several of its steps, or if the block of a step is known only at run
        time. A kernel that copies blocks by itself begins the copies of the next step, too, and finds that step by numbers
        in its program, which are not those of a smaller grid. A scratch buffer, or a result that nothing reads, may carry
        values from step to step; then a dim is split only if neither its own index nor that of an outer dim is read, or if
        the buffers are overwritten first (`kernel_steps.py`). Positions within a block do not matter: a block is the same
        block on one device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar._jax import DropVar, Jaxpr, JaxprEqn, Var, all_equations, bind_eqn, bodies_in, function_name, open_jaxpr
from autopar.ir.rules.index_map import BlockNumbers, block_numbers, digits_in, split_steps
from autopar.ir.rules.kernel_access import on_shorter_buffers, resized_buffer, shorter_loop, with_last_steps
from autopar.ir.rules.kernel_flops import kernel_flops
from autopar.ir.rules.kernel_steps import (
    BlockLoop,
    dims_added_up,
    is_begun_anew,
    loops_over_blocks,
    steps_over_blocks,
)
from autopar.ir.rules.linearity import may_be_partial
from autopar.ir.rules.registry import register_named, whole_kernel
from autopar.ir.rules.rule import Dim, Factor, Shard, ShardingRule, Term, factor_names


@register_named("pallas_call")
def pallas_call(eqn: JaxprEqn) -> ShardingRule:
    """`(ab)c->(ab)c {whole b c}` for a kernel over blocks: see the top of this file."""
    reason = _not_understood(eqn)
    if reason is None:
        kernel = _Kernel(eqn)
        rule = kernel.rule()
        if rule.splittable() or max(rule.sizes.values(), default=1) == 1:
            return rule
        reason = "; ".join(f"grid dim {dim}: {why}" for dim, why in sorted(kernel.whole.items()))
        reason = reason or ("no grid dim leads in every result" if kernel.grid else "it has no grid")
    name = eqn.params.get("name") or function_name(open_jaxpr(eqn.params["jaxpr"])[0]) or "pallas_call"
    return dataclasses.replace(whole_kernel(eqn, f"the Pallas kernel `{name}`", reason), flops=kernel_flops(eqn))


def _not_understood(eqn: JaxprEqn) -> str | None:
    """Why a kernel cannot be analysed; None: it can."""
    mapping = eqn.params.get("grid_mapping")
    wanted = ("grid", "block_mappings", "num_inputs", "num_outputs", "vmapped_dims", "scratch_avals")
    if not all(hasattr(mapping, name) for name in wanted):
        return "this release of JAX describes kernels in a way that autopar does not know"
    if eqn.effects or any(not hasattr(atom.aval, "dtype") for atom in eqn.invars):
        return "it has effects besides its results"
    if len(mapping.block_mappings) != mapping.num_inputs + len(eqn.outvars) or mapping.local_grid_env is not None:
        return "it is written for a part of another kernel"
    if any(getattr(each, "indexed_by", None) is not None for each in mapping.block_mappings):
        return "one operand says which blocks of another are read"
    names = {inner.primitive.name for inner in all_equations(open_jaxpr(eqn.params["jaxpr"])[0])}
    if any(name.startswith("prng_") for name in names):
        return "it draws random numbers from one stream"
    return None


class _Kernel:
    """The derivation of one kernel's rule.

    Attributes:
        results: Positions of results among the body's arguments.
        scratch: Positions of buffers that outlive a step.
        overwrites: (operand, result) pairs that share memory.
        whole: Grid dims that may not be split -> why.
    """

    def __init__(self, eqn: JaxprEqn):
        self.eqn, self.mapping = eqn, eqn.params["grid_mapping"]
        self.body, _ = open_jaxpr(eqn.params["jaxpr"])
        self.overwrites = eqn.params.get("input_output_aliases") or ()
        scratch = len(self.body.invars) - len(self.mapping.scratch_avals)
        self.results, self.scratch = range(scratch - len(eqn.outvars), scratch), range(scratch, len(self.body.invars))
        self.grid: tuple[int | None, ...] = tuple(n if isinstance(n, int) else None for n in self.mapping.grid)
        self.whole: dict[int, str] = {}
        self.sizes: dict[Factor, int] = {}
        self.never: list[Factor] = []
        self.fresh = factor_names()
        self.maps = [block_numbers(each.index_map_jaxpr, self.grid) for each in self.mapping.block_mappings]
        blocked = [
            number
            for numbers, each in zip(self.maps, self.mapping.block_mappings, strict=True)
            for number, block in zip(numbers, each.block_shape, strict=False)
            if _block_size(block) is not None
        ]
        self.lengths = split_steps(self.grid, blocked)
        self.loops = {next(self.fresh): loop for loop in self._loops()}
        self.factor_of = {
            (dim, k): next(self.fresh) for dim, digits in enumerate(self.lengths) for k in range(len(digits))
        }
        self.steps = {} if self.loops else self._steps()
        self.loops |= {self._step_factor(dim): loop for dim, loop in self.steps.items()}

    def rule(self) -> ShardingRule:
        """Derive the rule, and fill `whole`."""
        eqn, num_inputs = self.eqn, self.mapping.num_inputs
        first = eqn.invars[: len(eqn.invars) - num_inputs]  # lengths of the grid, scalars for the index maps
        scalars = [tuple(self._inner(size) for size in atom.aval.shape) for atom in first]
        terms = [self._term(k) for k in range(len(self.maps))]
        operands, results = (*scalars, *terms[:num_inputs]), tuple(terms[num_inputs:])
        sums = self._summed_dims(results)
        self._keep_read_dims(results, sums)
        self._keep_unmoved_dims(results, sums)
        self._keep_aliased_dims(operands, results)
        standing = {factor for term in (*operands, *results) for dim in term for factor in dim}
        whole = [f for (d, k), f in self.factor_of.items() if d in self.whole or k < len(self.lengths[d]) - 1]
        steps = {dim: self._step_factor(dim) for dim in range(len(self.grid))}
        last_steps = {self._user_dims.index(dim): dim for dim in sums}
        return ShardingRule(
            operands,
            results,
            {factor: size for factor, size in self.sizes.items() if factor in standing},
            summed=(
                *(steps[dim] for dim in sorted(sums) if dim not in self.whole and steps[dim] in standing),
                *(factor for factor, loop in self.loops.items() if loop.adds_up),
            ),
            whole=tuple(factor for factor in (*whole, *self.never) if factor in standing),
            flops=kernel_flops(eqn),
            local=functools.partial(_on_shard, steps=steps, sums=last_steps, loops=self.loops, results=results),
        )

    @functools.cached_property
    def _user_dims(self) -> list[int]:
        """The grid dims in the kernel's own numbering, which leaves out dims that `vmap` added."""
        return [dim for dim in range(len(self.grid)) if dim not in self.mapping.vmapped_dims]

    def _loops(self) -> list[BlockLoop]:
        """Loops in the body over blocks of arrays that every step has in full."""
        found = [] if self.overwrites else loops_over_blocks(self.body, self.results)
        return [loop for loop in found if None not in self._walked(loop)]

    def _steps(self) -> dict[int, BlockLoop]:
        """Grid dims by whose index the body finds its blocks in arrays that every step has in full."""
        asked = dict.fromkeys(_read_dims(self.body))
        found: dict[int, BlockLoop] = {}
        for own, dim in enumerate(self._user_dims):
            if own in asked and self.grid[dim] and not self.overwrites:
                *inner, trips = self.lengths[dim]
                loop = steps_over_blocks(self.body, own, trips, math.prod(inner), self.results, self.scratch)
                if loop is not None and None not in self._walked(loop):
                    found[dim] = loop
        return found

    def _walked(self, loop: BlockLoop) -> list[tuple[int, int] | None]:
        """(Array, dim) of each buffer dim that a loop goes over; None: no array, or one that a step has only a block of."""
        return [_dim_of_array(self.eqn, at, dim) for at, dim in loop.walked]

    def _summed_dims(self, results: Sequence[Term]) -> set[int]:
        """Grid dims over which the results that do not move with them are sums."""
        if self.overwrites:
            return set()  # steps may pass on more than the sum
        shared = {}
        for at, term, var in zip(self.results, results, self.eqn.outvars, strict=True):
            still = [d for d in self._user_dims if self.grid[d] != 1 and not self._moves(term, d)]
            if still and not may_be_partial(var.aval.dtype):
                return set()
            shared[at] = frozenset(map(self._user_dims.index, still))
        grid = [self.grid[dim] for dim in self._user_dims]
        shared = {at: dims for at, dims in shared.items() if dims}
        return {self._user_dims[dim] for dim in dims_added_up(self.body, grid, shared, self.scratch)}

    def _step_factor(self, grid_dim: int) -> Factor:
        """The major factor of a grid dim, the one that may be split."""
        return self.factor_of[grid_dim, len(self.lengths[grid_dim]) - 1]

    def _moves(self, term: Term, grid_dim: int) -> bool:
        return any(self._step_factor(grid_dim) in dim for dim in term)

    def _keep_read_dims(self, results: Sequence[Term], sums: set[int]) -> None:
        """Keep grid dims whole whose index the kernel reads, by `program_id` or a name, or that may carry values."""
        asked = {self._user_dims[dim] for dim in _read_dims(self.body) if dim < len(self._user_dims)}
        asked -= sums | self.steps.keys()
        if self.mapping.grid_names is not None:
            asked |= {dim for dim, name in enumerate(self.mapping.grid_names) if name is not None}
        for dim, length in enumerate(self.grid):
            if length is None:
                self.whole[dim] = "its length is known only when it runs"
            elif dim in asked:
                self.whole[dim] = f"the kernel asks for its index (`program_id`), {self._what_for}"
            elif any(outer in asked for outer in range(dim)) or dim in self.steps:
                left = [*self.scratch, *(at for at in self._unread(results, dim) if dim not in sums)]
                if left and not self._parallel(dim) and not self._is_overwritten_first(dim, left):
                    self.whole[dim] = "a scratch buffer may carry values along it"

    @functools.cached_property
    def _what_for(self) -> str:
        """What the kernel may do with its index in the grid."""
        if any(inner.primitive.name == "dma_start" for inner in all_equations(self.body)):
            return "to copy blocks by itself (`dma_start`), also for later steps, whose number is written into it"
        return "and may do something else at each"

    def _unread(self, results: Sequence[Term], grid_dim: int) -> list[int]:
        """Results, as positions among the body's arguments, that nothing reads and that do not move with a grid dim."""
        triples = zip(self.results, results, self.eqn.outvars, strict=True)
        return [at for at, term, var in triples if isinstance(var, DropVar) and not self._moves(term, grid_dim)]

    def _is_overwritten_first(self, grid_dim: int, buffers: Sequence[int]) -> bool:
        """Whether each step of a grid dim overwrites these buffers before it reads them."""
        numbers_of = {own: np.zeros(1, int) for own, dim in enumerate(self._user_dims) if dim > grid_dim}
        if grid_dim in self._user_dims:
            *inner, trips = self.lengths[grid_dim]
            numbers_of[self._user_dims.index(grid_dim)] = math.prod(inner) * np.arange(trips)
        return is_begun_anew(self.body, [self.body.invars[at] for at in buffers], numbers_of)

    def _parallel(self, dim: int) -> bool:
        """Whether the kernel's author declares the steps of a grid dim independent."""
        semantics = getattr(self.eqn.params.get("compiler_params"), "dimension_semantics", None)
        if semantics is None or len(semantics) != len(self._user_dims) or dim not in self._user_dims:
            return False
        own = semantics[self._user_dims.index(dim)]
        return str(getattr(own, "value", own)).lower() == "parallel"

    def _inner(self, size: int) -> Dim:
        """A new dim that may not be split."""
        if size == 1:
            return ()
        factor = next(self.fresh)
        self.sizes[factor] = size
        self.never.append(factor)
        return (factor,)

    def _term(self, k: int) -> Term:
        """The term of an array: each dim has the factors that walk its blocks, then one for positions in a block."""
        each, numbers = self.mapping.block_mappings[k], self.maps[k]
        unknown = BlockNumbers(frozenset(range(len(self.grid))), None)
        dims: list[Dim] = []
        for position, size in enumerate(each.array_aval.shape):
            block = _block_size(each.block_shape[position])
            number = numbers[position] if len(numbers) == len(each.block_shape) else unknown
            taken = {factor for dim in dims for factor in dim}
            loops = [factor for factor, loop in self.loops.items() if (k, position) in self._walked(loop)]
            if loops:
                self.sizes[loops[0]] = self.loops[loops[0]].trips
                dims.append((loops[0], *self._inner(size // self.loops[loops[0]].trips)))
                continue
            walk = self._walk(size, block, number, taken)
            dims.append(self._inner(size) if walk is None else (*walk, *self._inner(block or 1)))
        return tuple(dims)

    def _walk(self, size: int, block: int | None, number: BlockNumbers, taken: set[Factor]) -> Dim | None:
        """The factors that walk the blocks of a dim; None: the grid does not walk it evenly."""
        if number.numbers is not None and not number.numbers.any():  # always the same block: nothing moves along it
            return () if block == size else None
        digits = None
        if block is not None and size % block == 0:
            digits = digits_in(number, size // block, self.lengths)
        walk = None if digits is None else tuple(self.factor_of[digit] for digit in digits)
        if walk is None or taken.intersection(walk):
            for dim in number.grid_dims:
                self.whole.setdefault(dim, "which block a step holds is no plain function of it")
            return None
        self.sizes.update({self.factor_of[d, k]: self.lengths[d][k] for d, k in digits or ()})
        return walk

    def _keep_unmoved_dims(self, results: Sequence[Term], sums: set[int]) -> None:
        """Keep grid dims whole that do not walk every result that is read: some block is written at several steps."""
        for dim, length in enumerate(self.grid):
            unread = self._unread(results, dim)
            moves = all(self._moves(term, dim) or at in unread for at, term in zip(self.results, results, strict=True))
            if length != 1 and dim not in sums and not moves:
                self.whole.setdefault(dim, "results do not move with it: blocks are written at several of its steps")

    def _keep_aliased_dims(self, operands: Sequence[Term], results: Sequence[Term]) -> None:
        """Keep grid dims whole by which an operand and the result in its memory would be sharded differently."""
        num_dynamic = sum(length is None for length in self.grid)
        for operand, result in self.overwrites:
            pair = [_without(term, self.never) for term in (operands[operand + num_dynamic], results[result])]
            moving = {factor for term in pair for dim in term for factor in dim}
            if pair[0] != pair[1]:
                for (dim, _), factor in self.factor_of.items():
                    if factor in moving:
                        self.whole.setdefault(dim, "a result overwrites an operand that moves in another way")


def _without(term: Term, factors: Sequence[Factor]) -> Term:
    return tuple(tuple(factor for factor in dim if factor not in factors) for dim in term)


def _block_size(block: Any) -> int | None:
    """Elements of a block along one dim, if its index map counts in blocks; else None."""
    match type(block).__name__:
        case "int" | "Blocked":
            return int(getattr(block, "block_size", block))
        case "Squeezed" | "NoneType":
            return 1
    return None


def _dim_of_array(eqn: JaxprEqn, at: int, dim: int) -> tuple[int, int] | None:
    """(Array, dim) of dim `dim` of the body's `at`-th argument; None: it is no array, or a step has only a block of it."""
    mapping, (body, _) = eqn.params["grid_mapping"], open_jaxpr(eqn.params["jaxpr"])
    k = at - (len(body.invars) - len(mapping.scratch_avals) - len(mapping.block_mappings))
    if not 0 <= k < len(mapping.block_mappings) or mapping.block_mappings[k].transforms:
        return None
    each = mapping.block_mappings[k]
    kept = [d for d, block in enumerate(each.block_shape) if type(block).__name__ not in ("Squeezed", "NoneType")]
    return (k, kept[dim]) if _block_size(each.block_shape[kept[dim]]) == each.array_aval.shape[kept[dim]] else None


def _read_dims(body: Jaxpr) -> Iterator[int]:
    """The grid dims, in the kernel's numbering, whose index or length the body uses."""
    used = {atom for eqn in body.eqns for atom in eqn.invars if isinstance(atom, Var)}
    used.update(atom for atom in body.outvars if isinstance(atom, Var))
    for eqn in body.eqns:
        if eqn.primitive.name in ("program_id", "num_programs") and eqn.outvars[0] in used:
            yield eqn.params["axis"]
        for inner in bodies_in(eqn):
            yield from _read_dims(inner)


def _on_shard(
    eqn: JaxprEqn,
    shard: Shard,
    *operands: jax.Array,
    steps: Mapping[int, Factor],
    sums: Mapping[int, int],
    loops: Mapping[Factor, BlockLoop],
    results: Sequence[Term],
) -> Sequence[jax.Array]:
    """The per-device program: the kernel over the device's steps.

    Args:
        steps: The major factor of each grid dim.
        sums: Grid dims over which results are sums, by their number in the kernel.
        loops: Loops over blocks, by the factor of their trips.
        results: Terms of the results.
    """
    mapping = eqn.params["grid_mapping"]
    counts = [shard.num_shards(steps[dim]) for dim in range(len(mapping.grid))]
    grid = tuple(n // count if isinstance(n, int) else n for n, count in zip(mapping.grid, counts, strict=True))
    shapes = [array.shape for array in operands[len(operands) - mapping.num_inputs :]]
    shapes += [tuple(map(shard.local_dim, term)) for term in results]
    blocks = [
        each.replace(array_aval=each.array_aval.update(shape=shape))
        for each, shape in zip(mapping.block_mappings, shapes, strict=True)
    ]
    body, _ = open_jaxpr(eqn.params["jaxpr"])
    body = with_last_steps(body, {own: (mapping.grid[dim], grid[dim]) for own, dim in sums.items()})
    for factor, loop in loops.items():
        if shard.num_shards(factor) > 1:
            body, blocks = _with_fewer_trips(eqn, body, blocks, loop, shard.local_size(factor))
    params = {**eqn.params, "jaxpr": body, "grid_mapping": mapping.replace(grid=grid, block_mappings=tuple(blocks))}
    if "out_avals" in params:
        made = shapes[mapping.num_inputs :]
        params["out_avals"] = tuple(a.update(shape=s) for a, s in zip(params["out_avals"], made, strict=True))
    cost = params.get("cost_estimate")
    if cost is not None:
        parts = math.prod(map(shard.num_shards, dict.fromkeys((*steps.values(), *loops))))
        names = [field.name for field in dataclasses.fields(cost) if isinstance(getattr(cost, field.name), int)]
        params["cost_estimate"] = dataclasses.replace(cost, **{name: getattr(cost, name) // parts for name in names})
    return bind_eqn(eqn, *operands, params=params)


def _with_fewer_trips(
    eqn: JaxprEqn, body: Jaxpr, blocks: list[Any], loop: BlockLoop, trips: int
) -> tuple[Jaxpr, list[Any]]:
    """The body with `trips` trips of a loop over blocks, and block shapes of that length."""
    walked: dict[int, dict[int, int]] = {}
    blocks = list(blocks)
    for at, dim in loop.walked:
        length = body.invars[at].aval.shape[dim] // loop.trips * trips
        walked.setdefault(at, {})[dim] = length
        place = _dim_of_array(eqn, at, dim)
        assert place is not None
        k, position = place
        block = blocks[k].block_shape[position]
        shorter = length if isinstance(block, int) else dataclasses.replace(block, block_size=length)
        shape = (*blocks[k].block_shape[:position], shorter, *blocks[k].block_shape[position + 1 :])
        aval = resized_buffer(blocks[k].transformed_block_aval, {dim: length})
        blocks[k] = blocks[k].replace(block_shape=shape, transformed_block_aval=aval)
    body = on_shorter_buffers(body, walked)
    return body if loop.at is None else shorter_loop(body, loop.at, trips), blocks
