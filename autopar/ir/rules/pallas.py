"""The rule of a Pallas kernel, from its grid and the index maps of its blocks.

In:     a `pallas_call`: a grid, and for each array the shape of a block and which block each step of the grid holds.
Out:    `ShardingRule`: a grid dim that walks the blocks of every result, and of the operands or not at all, is a factor
        that can be split; its length is that of the grid dim. On one device runs the same kernel over fewer steps. So is
        one whose steps add up the results that it does not walk (`kernel_steps.py`): fewer steps make a part of the sum.
Method: a dim of n blocks of b elements is two factors, `(block, inside)`, the second whole. What else keeps a grid dim
        whole: the kernel asks at which step it is (`program_id`: a causal mask) for more than to find its rows in whole
        arrays (`kernel_steps.py`), a block is written at several of its steps,
        or which one a step holds is known only when it runs. In a scratch buffer, and in a result that nothing reads, a step
        finds what the step before it left; a dim is split only if no step could tell this from the first: neither it nor a
        dim outside of it is asked for, or buffers are begun anew (`kernel_scratch.py`).
        Positions within a block need no such care: a block is the same block on one device.
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
from autopar.errors import warn
from autopar.ir.rules.index_map import BlockNumbers, block_numbers, digits_in, split_steps
from autopar.ir.rules.kernel_access import on_shorter_buffers, resized_buffer, shorter_loop, with_last_steps
from autopar.ir.rules.kernel_flops import kernel_flops
from autopar.ir.rules.kernel_scratch import is_begun_anew
from autopar.ir.rules.kernel_steps import BlockLoop, dims_added_up, loops_over_blocks, steps_over_blocks
from autopar.ir.rules.linearity import may_be_partial
from autopar.ir.rules.registry import register_named, replicated_rule, whole_kernel_warning
from autopar.ir.rules.rule import Dim, Factor, Shard, ShardingRule, Term, factor_names
from autopar.ir.source import source_line


@register_named("pallas_call")
def pallas_call(eqn: JaxprEqn) -> ShardingRule:
    """`a kernel over blocks (ab)c->(ab)c {whole b c}`: see the head of this file."""
    reason = _not_understood(eqn)
    if reason is None:
        kernel = _Kernel(eqn)
        rule = kernel.rule()
        if rule.splittable() or max(rule.sizes.values(), default=1) == 1:
            return rule
        reason = "; ".join(f"grid dim {dim}: {why}" for dim, why in sorted(kernel.whole.items()))
        reason = reason or ("no grid dim leads in every result" if kernel.grid else "it has no grid")
    name = eqn.params.get("name") or function_name(open_jaxpr(eqn.params["jaxpr"])[0]) or "pallas_call"
    warn(whole_kernel_warning(f"the Pallas kernel `{name}` at {source_line(eqn)}", reason, eqn))
    return dataclasses.replace(replicated_rule(eqn), flops=kernel_flops(eqn))


def _not_understood(eqn: JaxprEqn) -> str | None:
    """Why nothing can be told of a kernel; None: it can."""
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
    """One kernel while its rule is read: terms of its arrays, and why grid dims are whole.

    Attributes:
        results: Positions of results among the body's arguments.
        scratch: The same of buffers that outlive a step.
        overwrites: Operands whose memory results take.
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
        """The rule; `whole` then says why grid dims are."""
        eqn, num_inputs = self.eqn, self.mapping.num_inputs
        first = eqn.invars[: len(eqn.invars) - num_inputs]  # lengths of the grid, scalars for the index maps
        scalars = [tuple(self._inner(size) for size in atom.aval.shape) for atom in first]
        terms = [self._term(k) for k in range(len(self.maps))]
        operands, results = (*scalars, *terms[:num_inputs]), tuple(terms[num_inputs:])
        sums = self._added_up(results)
        self._keep_what_is_asked_for(results, sums)
        self._keep_what_does_not_move(results, sums)
        self._keep_what_is_overwritten(operands, results)
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
            local=functools.partial(_on_part, steps=steps, sums=last_steps, loops=self.loops, results=results),
        )

    @functools.cached_property
    def _user_dims(self) -> list[int]:
        """Which grid dim is the first, second, ... that the kernel itself knows of."""
        return [dim for dim in range(len(self.grid)) if dim not in self.mapping.vmapped_dims]

    def _loops(self) -> list[BlockLoop]:
        """Loops in the body over blocks of what every step has all of."""
        found = [] if self.overwrites else loops_over_blocks(self.body, self.results)
        return [loop for loop in found if None not in self._walked(loop)]

    def _steps(self) -> dict[int, BlockLoop]:
        """Grid dims by whose number the body finds blocks of what every step has all of."""
        asked = dict.fromkeys(_asked_for(self.body))
        found: dict[int, BlockLoop] = {}
        for own, dim in enumerate(self._user_dims):
            if own in asked and self.grid[dim] and not self.overwrites:
                *inner, trips = self.lengths[dim]
                loop = steps_over_blocks(self.body, own, trips, math.prod(inner), self.results, self.scratch)
                if loop is not None and None not in self._walked(loop):
                    found[dim] = loop
        return found

    def _walked(self, loop: BlockLoop) -> list[tuple[int, int] | None]:
        """(Array, dim) of what a loop goes over; None: of no array, or of one of which a step has but a part."""
        return [_dim_of_array(self.eqn, at, dim) for at, dim in loop.walked]

    def _added_up(self, results: Sequence[Term]) -> set[int]:
        """Grid dims over whose steps those results are sums that do not move with them."""
        if self.overwrites:
            return set()  # more may go from step to step than the sum
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
        """The major factor of a grid dim, which is split."""
        return self.factor_of[grid_dim, len(self.lengths[grid_dim]) - 1]

    def _moves(self, term: Term, grid_dim: int) -> bool:
        return any(self._step_factor(grid_dim) in dim for dim in term)

    def _keep_what_is_asked_for(self, results: Sequence[Term], sums: set[int]) -> None:
        """Grid dims whose index the kernel reads, by `program_id` or a name; or where a step may find what another left."""
        asked = {self._user_dims[dim] for dim in _asked_for(self.body) if dim < len(self._user_dims)}
        asked -= sums | self.steps.keys()
        if self.mapping.grid_names is not None:
            asked |= {dim for dim, name in enumerate(self.mapping.grid_names) if name is not None}
        for dim, length in enumerate(self.grid):
            if length is None:
                self.whole[dim] = "its length is known only when it runs"
            elif dim in asked:
                self.whole[dim] = "the kernel asks for its index (`program_id`), and may do something else at each"
            elif any(outer in asked for outer in range(dim)) or dim in self.steps:
                left = [*self.scratch, *(at for at in self._unread(results, dim) if dim not in sums)]
                if left and not self._parallel(dim) and not self._begins_anew(dim, left):
                    self.whole[dim] = "a scratch buffer may carry values along it"

    def _unread(self, results: Sequence[Term], grid_dim: int) -> list[int]:
        """Results, among the body's arguments, that do not move with a grid dim, and that nothing reads."""
        triples = zip(self.results, results, self.eqn.outvars, strict=True)
        return [at for at, term, var in triples if isinstance(var, DropVar) and not self._moves(term, grid_dim)]

    def _begins_anew(self, grid_dim: int, buffers: Sequence[int]) -> bool:
        """Whether these hold nothing that was there before a step of a grid dim."""
        numbers_of = {own: np.zeros(1, int) for own, dim in enumerate(self._user_dims) if dim > grid_dim}
        if grid_dim in self._user_dims:
            *inner, trips = self.lengths[grid_dim]
            numbers_of[self._user_dims.index(grid_dim)] = math.prod(inner) * np.arange(trips)
        return is_begun_anew(self.body, [self.body.invars[at] for at in buffers], numbers_of)

    def _parallel(self, dim: int) -> bool:
        """Whether who wrote the kernel says that the steps of a grid dim are independent."""
        semantics = getattr(self.eqn.params.get("compiler_params"), "dimension_semantics", None)
        if semantics is None or len(semantics) != len(self._user_dims) or dim not in self._user_dims:
            return False
        own = semantics[self._user_dims.index(dim)]
        return str(getattr(own, "value", own)).lower() == "parallel"

    def _inner(self, size: int) -> Dim:
        """A dim that is not split."""
        if size == 1:
            return ()
        factor = next(self.fresh)
        self.sizes[factor] = size
        self.never.append(factor)
        return (factor,)

    def _term(self, k: int) -> Term:
        """The dims of an array: of each the factors that walk its blocks and one inside a block."""
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
        """The factors that walk the blocks of a dim; None where the dim is not walked in step with the grid."""
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

    def _keep_what_does_not_move(self, results: Sequence[Term], sums: set[int]) -> None:
        """A grid dim that does not walk through every result that is read: some block is written at several steps."""
        for dim, length in enumerate(self.grid):
            unread = self._unread(results, dim)
            moves = all(self._moves(term, dim) or at in unread for at, term in zip(self.results, results, strict=True))
            if length != 1 and dim not in sums and not moves:
                self.whole.setdefault(dim, "results do not move with it: blocks are written at several of its steps")

    def _keep_what_is_overwritten(self, operands: Sequence[Term], results: Sequence[Term]) -> None:
        """An operand whose memory a result takes must be sharded as the result is."""
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
    """Elements of a block along one dim, counted in blocks by its index map; None of a dim that is not cut in blocks."""
    match type(block).__name__:
        case "int" | "Blocked":
            return int(getattr(block, "block_size", block))
        case "Squeezed" | "NoneType":
            return 1
    return None


def _dim_of_array(eqn: JaxprEqn, at: int, dim: int) -> tuple[int, int] | None:
    """(Array, dim) of a dim of the buffer that is the `at`-th argument of a body; None: no step has all of it."""
    mapping, (body, _) = eqn.params["grid_mapping"], open_jaxpr(eqn.params["jaxpr"])
    k = at - (len(body.invars) - len(mapping.scratch_avals) - len(mapping.block_mappings))
    if not 0 <= k < len(mapping.block_mappings) or mapping.block_mappings[k].transforms:
        return None
    each = mapping.block_mappings[k]
    kept = [d for d, block in enumerate(each.block_shape) if type(block).__name__ not in ("Squeezed", "NoneType")]
    return (k, kept[dim]) if _block_size(each.block_shape[kept[dim]]) == each.array_aval.shape[kept[dim]] else None


def _asked_for(body: Jaxpr) -> Iterator[int]:
    """Dims of the grid, as the kernel counts them, whose index or length it uses."""
    used = {atom for eqn in body.eqns for atom in eqn.invars if isinstance(atom, Var)}
    used.update(atom for atom in body.outvars if isinstance(atom, Var))
    for eqn in body.eqns:
        if eqn.primitive.name in ("program_id", "num_programs") and eqn.outvars[0] in used:
            yield eqn.params["axis"]
        for inner in bodies_in(eqn):
            yield from _asked_for(inner)


def _on_part(
    eqn: JaxprEqn,
    shard: Shard,
    *operands: jax.Array,
    steps: Mapping[int, Factor],
    sums: Mapping[int, int],
    loops: Mapping[Factor, BlockLoop],
    results: Sequence[Term],
) -> Sequence[jax.Array]:
    """The kernel over the steps of one device.

    Args:
        steps: The major factor of each grid dim.
        sums: Grid dims whose steps are added up, by the number that the kernel knows them by.
        loops: Loops in the body, by the factor that they go over.
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
    """The body with a shorter loop, and blocks of the length of what it goes over."""
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
