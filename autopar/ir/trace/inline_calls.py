"""Inlines calls: appends the flat equations of a jaxpr to a block.

In:     any jaxpr, the values of its constants, and its operands.
Out:    flat equations in a `Block`. Inlined: `jit`, custom derivatives (nothing is differentiated after tracing), `remat`,
        `composite`, `unstack`, linear solves, random bits, primitives without a rule that JAX itself lowers as a program;
        `shard_map` and `pmap`, as the work of all their devices.
        Kept, with flat bodies and without constants inside: `scan`, `while`, `cond`.
        Kept whole: Pallas, FFI, callbacks, and what `autopar.sharding_rule` made one operation.
Method: one walk. A differentiated `remat` is inlined behind an `optimization_barrier` on its inputs, as JAX's own
        lowering does, so that no compiler merges the recomputation with the first computation. The call's name stack is
        put before that of each inlined equation, so that every backward equation has its `transpose(jvp(...))`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar._jax import (
    Atom,
    Aval,
    ClosedJaxpr,
    Constant,
    Function,
    Jaxpr,
    JaxprEqn,
    Literal,
    NameStack,
    Var,
    high_primitive_jaxpr,
    is_key,
    key_data,
    lowered_program,
    new_eqn,
    new_source_info,
    new_var,
    on_host,
    open_jaxpr,
    optimization_barrier_p,
    physical_aval,
    replace_eqn,
    shaped,
    trace,
    without_axes,
    without_context_mesh,
)
from autopar.ir.region import Binding, closed_bodies, region_of
from autopar.ir.rules.grouped_product import grouped_product_p
from autopar.ir.rules.registry import has_rule
from autopar.ir.rules.replicated import list_of
from autopar.ir.source import caller_traceback
from autopar.ir.trace.fold import fold, is_identity
from autopar.ir.trace.grouped_products import grouped_product, known_results
from autopar.ir.trace.manual_axes import INVARIANT, TYPES_ONLY, ManualProgram, plain_collective
from autopar.ir.trace.random import ALIASES, cache_key, physical_jaxpr, touches_keys

_JITS = ("jit", "pjit")


@dataclass
class Block:
    """The equations of one body under construction, and the constants it uses, by `id`."""

    eqns: list[JaxprEqn] = field(default_factory=list)
    captured: dict[int, Var] = field(default_factory=dict)
    values: dict[int, Constant] = field(default_factory=dict)

    def constant(self, value: Constant) -> Var:
        """The variable of a constant that an inner jaxpr captures."""
        return self.capture(id(value), key_data(value) if is_key(shaped(value)) else value)

    def capture(self, identity: int, value: Constant) -> Var:
        if identity not in self.captured:
            self.captured[identity] = new_var(shaped(value))
            self.values[identity] = value
        return self.captured[identity]


@dataclass(frozen=True, slots=True)
class Walk:
    """The context of inlining one jaxpr.

    Attributes:
        block: Where equations are appended.
        scope: Name stack of the enclosing calls.
        flatten: Flattens the programs that implement random bits.
        place: From an equation's traceback to the one to keep, which may be the call's.
        shared: Cache of those flattened programs.
        known: For `grouped_products.py`: variables of the jaxprs being walked -> how they are computed from no input.
    """

    block: Block
    scope: NameStack
    flatten: Callable[[Jaxpr, Sequence[Constant]], tuple[Jaxpr, tuple[Constant, ...]]]
    place: Callable[[object], object] = lambda traceback: traceback
    shared: dict[Hashable, tuple[Jaxpr, tuple[Constant, ...]]] = field(default_factory=dict)
    known: dict[Var, str] = field(default_factory=dict)

    def hand_on(self, given: Sequence[Atom], to: Sequence[Atom]) -> None:
        """Copy what is `known` of the values `given` to the variables `to` that they are bound to."""
        for source, target in zip(given, to, strict=True):
            if isinstance(target, Var):
                self.known.pop(target, None)
                if isinstance(source, Var) and source in self.known:
                    self.known[target] = self.known[source]

    def into(self, block: Block, callee: Jaxpr, eqn: JaxprEqn, extra_scope: str | None = None) -> Walk:
        """The walk through `callee`, called by `eqn`, whose source location is final."""
        caller = eqn.source_info.traceback
        scope = eqn.source_info.name_stack
        if extra_scope is not None:
            scope = scope.extend(extra_scope)
        is_jit = eqn.primitive.name in _JITS
        place = functools.partial(caller_traceback, callee, caller=caller, is_jit=is_jit)
        return Walk(block, scope, self.flatten, place, self.shared, self.known)

    def instead_of(self, eqn: JaxprEqn) -> Walk:
        """The walk through a program that implements `eqn`, whose source location is final."""
        traceback = eqn.source_info.traceback
        return Walk(self.block, eqn.source_info.name_stack, self.flatten, lambda _: traceback, self.shared, self.known)


def append_function(walk: Walk, function: Function, operands: Sequence[Atom]) -> list[Atom]:
    """As `append_flat`, for a Python function, which is traced at these operands."""
    jaxpr, consts = open_jaxpr(trace(function, *(a.aval for a in operands)))
    return append_flat(walk, jaxpr, consts, operands)


def fresh(aval: Aval) -> Var:
    """A new variable; for typed keys, of their integers; in a `shard_map`, of no mesh."""
    return new_var(physical_aval(aval) if is_key(aval) else without_axes(aval))


def append_flat(walk: Walk, jaxpr: Jaxpr, consts: Sequence[Constant], operands: Sequence[Atom]) -> list[Atom]:
    """Append the flat equations of a program to the walk's block; its results."""
    block = walk.block
    env: dict[Var, Atom] = dict(zip(jaxpr.constvars, map(block.constant, consts), strict=True))
    env.update(zip(jaxpr.invars, operands, strict=True))

    def read(atom: Atom) -> Atom:
        if isinstance(atom, Literal):
            return atom if np.ndim(atom.val) == 0 and not is_key(atom.aval) else block.constant(atom.val)
        return env[atom]

    for eqn in jaxpr.eqns:
        source = eqn.source_info
        source = new_source_info(walk.place(source.traceback), walk.scope + source.name_stack)
        placed = replace_eqn(without_context_mesh(eqn), source_info=source)
        results = _step(walk, placed, [read(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _step(walk: Walk, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom]:
    """Append what one equation flattens to, over `operands`; its own invars give only types."""
    name = eqn.primitive.name
    if name in _HANDLERS:
        return _HANDLERS[name](walk, eqn, operands)
    if name in ALIASES or name in TYPES_ONLY or is_identity(eqn, operands):
        return operands[:1]
    if touches_keys(eqn):
        return _keys(walk, eqn, operands)
    if name == "device_put":
        return _device_put(walk, eqn, operands)
    if (known := fold(eqn, operands)) is not None:
        return [known]
    stands_for = None if has_rule(eqn.primitive) or list_of(name) is not None else lowered_program(eqn)
    if stands_for is not None:
        body, consts = open_jaxpr(stands_for)
        return append_flat(walk.instead_of(eqn), body, consts, operands)
    return _keep(walk, eqn, operands)


def _keep(walk: Walk, eqn: JaxprEqn, operands: Sequence[Atom]) -> list[Atom]:
    outvars = [fresh(var.aval) for var in eqn.outvars]
    walk.block.eqns.append(replace_eqn(eqn, invars=operands, outvars=outvars))
    return list(outvars)


def _device_put(walk: Walk, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom]:
    """One copy per operand of a `device_put` that changes memory space; other operands pass through."""
    placed = list(operands)
    for at, (operand, var) in enumerate(zip(operands, eqn.outvars, strict=True)):
        if on_host(operand.aval) != on_host(var.aval):
            params = {name: (values[at],) for name, values in eqn.params.items()}
            placed[at] = fresh(var.aval)
            walk.block.eqns.append(replace_eqn(eqn, invars=[operand], outvars=[placed[at]], params=params))
    return placed


# Calls.


def _call(walk: Walk, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom]:
    product = grouped_product(eqn, walk.known)
    if product is not None:  # megablox: the kernel and its index arrays become one operation
        params, of = product
        outvars, read = [fresh(var.aval) for var in eqn.outvars], [operands[k] for k in of]
        walk.block.eqns.append(new_eqn(grouped_product_p, read, outvars, params, source_info=eqn.source_info))
        return list(outvars)
    body, consts = open_jaxpr(_callee(eqn))
    walk.hand_on(eqn.invars, body.invars)
    results = append_flat(walk.into(walk.block, body, eqn), body, consts, operands)
    walk.hand_on(body.outvars, eqn.outvars)
    walk.known.update(known_results(eqn, walk.known))
    return results


def _callee(eqn: JaxprEqn) -> Jaxpr | ClosedJaxpr:
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr", "fwd_jaxpr", "call", "callee"):
        if isinstance(eqn.params.get(name), Jaxpr | ClosedJaxpr):
            return eqn.params[name]
    raise AssertionError(f"`{eqn.primitive}` holds no program among {list(eqn.params)}")


def _high_primitive(walk: Walk, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom]:
    body, consts = open_jaxpr(high_primitive_jaxpr(eqn))
    return append_flat(walk.instead_of(eqn), body, consts, operands)


def _shard_map(walk: Walk, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom]:
    body = eqn.params["jaxpr"]
    flat, values = walk.flatten(body, ())
    program = ManualProgram.of(eqn, flat)
    given = [*operands, *map(walk.block.constant, values)]
    given = append_function(walk.instead_of(eqn), program.cut, given)
    mapped, consts = open_jaxpr(trace(program.on_all_devices, *(a.aval for a in given)))
    results = append_flat(walk.into(walk.block, body, eqn), mapped, consts, given)
    return append_function(walk.instead_of(eqn), program.join, results)


def _collective(walk: Walk, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom]:
    """A `psum` over dims by number, as `jax.vmap(..., axis_name=...)` leaves it: a plain reduction."""
    axes = eqn.params.get("axes", ("",))
    if not all(isinstance(axis, int) for axis in axes):
        return _keep(walk, plain_collective(eqn), operands)
    reduce = _REDUCTIONS[eqn.primitive.name]
    return append_function(walk.instead_of(eqn), lambda *arrays: [reduce(a, axes) for a in arrays], operands)


_REDUCTIONS: dict[str, Function] = {"psum": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}


def _linear_solve(walk: Walk, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom]:
    """Inline the solve function of a `custom_linear_solve`, which is the same once differentiation is done."""
    lengths = eqn.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    solve_operands = operands[first : first + lengths.solve] + operands[sum(lengths) :]
    body, consts = open_jaxpr(eqn.params["jaxprs"].solve)
    return append_flat(walk.into(walk.block, body, eqn), body, consts, solve_operands)


def _remat(walk: Walk, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom]:
    """Inline a `remat` body; in the backward pass behind one barrier on the inputs for which `prevent_cse` holds."""
    body, consts = open_jaxpr(eqn.params["jaxpr"])
    prevent_cse = eqn.params["prevent_cse"]
    behind = [prevent_cse] * len(operands) if isinstance(prevent_cse, bool) else list(prevent_cse)
    behind = [wanted and isinstance(atom, Var) for wanted, atom in zip(behind, operands, strict=True)]
    differentiated = eqn.params["differentiated"]
    if differentiated and any(behind):
        entering = [atom for atom, wanted in zip(operands, behind, strict=True) if wanted]
        fresh = [new_var(atom.aval) for atom in entering]
        source = new_source_info(eqn.source_info.traceback, eqn.source_info.name_stack.extend("checkpoint"))
        walk.block.eqns.append(new_eqn(optimization_barrier_p, entering, fresh, {}, source_info=source))
        passed = iter(fresh)
        operands = [next(passed) if wanted else atom for atom, wanted in zip(operands, behind, strict=True)]
    return append_flat(walk.into(walk.block, body, eqn, "checkpoint"), body, consts, operands)


def _keys(walk: Walk, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom]:
    key = cache_key(eqn)
    if key not in walk.shared:
        jaxpr, consts = open_jaxpr(physical_jaxpr(eqn))
        walk.shared[key] = walk.flatten(jaxpr, consts)
    flat, values = walk.shared[key] if key is not None else walk.shared.pop(key)
    return append_flat(walk.instead_of(eqn), flat, (), [*operands, *map(walk.block.constant, values)])


# Loops and branches.


def _region(walk: Walk, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom]:
    """Append a region with flat bodies; constants that they capture become operands."""
    region = region_of(eqn)
    blocks = [Block() for _ in region.bodies]
    inputs = [[fresh(var.aval) for var in body.invars] for body in region.bodies]
    outputs = []
    for binding in region.consts:
        if binding.operand is not None:
            walk.hand_on([binding.operand] * len(binding.variables), binding.variables)
    for block, closed, invars in zip(blocks, closed_bodies(eqn), inputs, strict=True):
        body, consts = open_jaxpr(closed)
        outputs.append(append_flat(walk.into(block, body, eqn), body, consts, invars))
    outvars = [fresh(var.aval) for var in eqn.outvars]
    values = {identity: value for block in blocks for identity, value in block.values.items()}
    nowhere = (None,) * len(blocks)
    captured = [
        Binding("const", walk.block.capture(key, value), tuple(block.captured.get(key) for block in blocks), nowhere)
        for key, value in values.items()
    ]
    bindings = [*captured, *region.rebound(operands, inputs, outputs, outvars)]
    flat = region.rebuild(bindings, [block.eqns for block in blocks])
    if region.kind == "while" and outputs[0][0].aval.shape:
        return _batched_while(walk, flat)
    walk.block.eqns.append(flat)
    return list(outvars)


def _batched_while(walk: Walk, eqn: JaxprEqn) -> list[Atom]:
    """Append the loop that a `vmap` of a `while` means: it runs until all samples are done, and keeps those that are.

    As in JAX's lowering, but the flags of running samples are carried instead of computed in both test and body.
    """
    region = region_of(eqn)
    (test, body), consts, carries = region.bodies, region.consts, region.carries
    around, inside = (Walk(block, NameStack(), walk.flatten) for block in (walk.block, Block()))
    testing = Block()
    (going,) = append_flat(around, test, (), region.entering(0, [b.operand for b in region.bindings]))
    held, old, go = [new_var(b.var.aval) for b in consts], [new_var(b.var.aval) for b in carries], new_var(going.aval)
    of_test, of_body = ([var for var, b in zip(held, consts, strict=True) if b.inputs[k] is not None] for k in (0, 1))
    new = append_flat(inside, body, (), [*of_body, *old])
    ours = replace(walk.instead_of(eqn), block=inside.block)
    kept = [append_function(ours, _where, [go, *both])[0] for both in zip(new, old, strict=True)]
    (still,) = append_flat(inside, test, (), [*of_test, *kept])
    (still_going,) = append_function(ours, jnp.logical_and, [go, still])
    tested = new_var(go.aval)
    (any_goes,) = append_function(replace(ours, block=testing), jnp.any, [tested])
    nowhere, outvars = (None, None), [new_var(var.aval) for var in old]
    bindings = [
        Binding("test", None, nowhere, (any_goes, None)),
        *(Binding("const", b.operand, (None, var), nowhere) for b, var in zip(consts, held, strict=True)),
        *(
            Binding("carry", b.operand, (new_var(var.aval), var), (None, value), result)
            for b, var, value, result in zip(carries, old, kept, outvars, strict=True)
        ),
        Binding("carry", going, (tested, go), (None, still_going), new_var(go.aval)),
    ]
    walk.block.eqns.append(region.rebuild(bindings, [testing.eqns, inside.block.eqns]))
    return list(outvars)


def _where(go: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    return lax.select(lax.broadcast_in_dim(go, old.shape, range(go.ndim)), new, old)


def _unstack(walk: Walk, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom]:
    """Append slices, as in JAX's lowering: of a slice it is known which block of a dim it takes."""
    axis = eqn.params["axis"]

    def parts(x: jax.Array) -> list[jax.Array]:
        return [lax.index_in_dim(x, k, axis, keepdims=False) for k in range(x.shape[axis])]

    return append_function(walk.instead_of(eqn), parts, operands)


def _cond(walk: Walk, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom]:
    only = _only_branch(eqn, operands[0])
    if only is not None:
        body, consts = open_jaxpr(only)
        return append_flat(walk.into(walk.block, body, eqn), body, consts, operands[1:])
    return _region(walk, eqn, operands)


def _only_branch(eqn: JaxprEqn, index: Atom) -> ClosedJaxpr | None:
    """The branch that is always taken: the index is a literal, or only unsupported platforms have branches of their own."""
    branches = eqn.params["branches"]
    if isinstance(index, Literal):
        return branches[min(max(int(index.val), 0), len(branches) - 1)]
    platforms = eqn.params.get("branches_platforms")
    if platforms and platforms[-1] is None and not any(_MACHINES & set(names) for names in platforms[:-1]):
        return branches[-1]  # such as `jnp.diag`'s branch for Mosaic, which exists only inside of Pallas kernels
    return None


_MACHINES = frozenset({"cpu", "cuda", "rocm", "tpu"})
_CALLS = (
    "call", "closed_call", "composite", "core_call", "core_closed_call", "custom_jvp_call", "custom_jvp_call_jaxpr",
    "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_vmap_call", "eval_jaxpr", "jit", "linear_call", "pjit",
    "remat_opt", "xla_metadata_call",
)  # fmt: skip
_HANDLERS: dict[str, Callable[[Walk, JaxprEqn, list[Atom]], list[Atom]]] = {
    **dict.fromkeys(_CALLS, _call),
    **dict.fromkeys(("checkpoint", "remat", "remat2"), _remat),
    "call_hi_primitive": _high_primitive,
    "call_hi_primitive_linearized": _high_primitive,
    "custom_linear_solve": _linear_solve,
    **dict.fromkeys((*_REDUCTIONS, *INVARIANT), _collective),
    "shard_map": _shard_map,
    "scan": _region,
    "while": _region,
    "cond": _cond,
    "unstack": _unstack,
}
