"""Flattening: one program without calls, without typed random keys, every variable its own.

In:     a jaxpr as JAX traces it, and the values of its constants.
Out:    a flat jaxpr (invars, then one invar per constant) and those constants. Inlined: `jit`, custom derivatives (they
        are not differentiated any more), `remat`, `composite`, linear solves, random bits. Kept, with flat bodies and
        without constants inside: `scan`, `while`, `cond`. Kept whole: Pallas, FFI, callbacks, `shard_map`, and what
        `autopar.sharding_rule` made one operation.
Method: one walk. A differentiated `remat` is inlined behind an `optimization_barrier` on its inputs, as JAX's own
        lowering does, so that no compiler merges the recomputation with the first computation. Name stacks are joined
        outside in, so that `transpose(jvp(...))` stands on every backward equation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar._jax import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    NameStack,
    Var,
    close_jaxpr,
    high_primitive_jaxpr,
    is_key,
    key_data,
    make_jaxpr,
    new_eqn,
    new_source_info,
    new_var,
    open_jaxpr,
    optimization_barrier_p,
    physical_aval,
    replace_eqn,
    scan_counts,
    scan_params,
    shaped,
    trace,
    without_context_mesh,
)
from autopar.ir.rewrite.batch_indices import batch_indices
from autopar.ir.rewrite.dead_code import remove_dead_code
from autopar.ir.source import caller_traceback
from autopar.ir.trace.fold import fold
from autopar.ir.trace.random import ALIASES, cache_key, physical_jaxpr, touches_keys

_JITS = ("jit", "pjit")

RECOMPUTED = "rematted_computation"
"""Scope that JAX itself puts on the equations that `remat` computes again in the backward pass."""


def flatten(jaxpr: Jaxpr, consts: Sequence[Any] = ()) -> tuple[Jaxpr, tuple[Any, ...]]:
    """The flat program of a jaxpr.

    Args:
        jaxpr: Any jaxpr; its invars stay the first invars, keys as integers.
        consts: Values of its `constvars`.

    Returns:
        The flat jaxpr, without constvars, and the arrays for its last invars, one per distinct constant.
    """
    block = _Block()
    invars = [_fresh(var.aval) for var in jaxpr.invars]
    outvars = _inline(_Walk(block, NameStack()), jaxpr, consts, invars)
    invars += block.captured.values()
    constants = dict(zip(block.captured.values(), block.values.values(), strict=True))
    flat = batch_indices(make_jaxpr(invars, outvars, block.eqns), constants)
    flat = remove_dead_code(flat, keep_inputs=len(jaxpr.invars))
    kept = set(flat.invars)
    return flat, tuple(value for var, value in constants.items() if var in kept)


def flat_function(function: Callable[..., Any], *avals: Any) -> Jaxpr:
    """A small function of ours, at these types, as a flat program. It may hold no arrays."""
    flat, consts = flatten(*open_jaxpr(trace(function, *avals)))
    assert not consts, f"{len(consts)} arrays are held by a function of ours"
    return flat


def inline_function(
    function: Callable[..., Any], operands: Sequence[Atom], source: Any = None
) -> tuple[list[JaxprEqn], list[Atom]]:
    """The equations of a small function of ours on these operands, and what its results are."""
    return inline(flat_function(function, *(a.aval for a in operands)), operands, source)


def inline(jaxpr: Jaxpr, operands: Sequence[Atom], source: Any = None) -> tuple[list[JaxprEqn], list[Atom]]:
    """A copy of a flat program's equations, over fresh variables, with `operands` for its invars.

    Args:
        jaxpr: Flat program.
        operands: One per invar.
        source: Source information that all of the equations get; None: none.

    Returns:
        The equations, and what the program's results are.
    """
    block = _Block()
    traceback, scope = (source.traceback, source.name_stack) if source is not None else (None, NameStack())
    outvars = _inline(_Walk(block, scope, lambda _: traceback), jaxpr, (), list(operands))
    assert not block.captured, "a flat program has no constants"
    return block.eqns, outvars


def inline_from(jaxpr: Jaxpr, operands: Sequence[Atom]) -> tuple[list[JaxprEqn], list[Atom]]:
    """A copy of a flat program's equations over fresh variables; each keeps its own source."""
    block = _Block()
    outvars = _inline(_Walk(block, NameStack()), jaxpr, (), list(operands))
    assert not block.captured, "a flat program has no constants"
    return block.eqns, outvars


def is_recomputed(eqn: JaxprEqn) -> bool:
    """Whether `eqn` belongs to the second run of a `remat` body."""
    return any(getattr(scope, "name", None) == RECOMPUTED for scope in eqn.source_info.name_stack.stack)


@dataclass
class _Block:
    """The equations of one body under construction, and the constants it uses, by identity."""

    eqns: list[JaxprEqn] = field(default_factory=list)
    captured: dict[int, Var] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)

    def constant(self, value: Any) -> Var:
        """The variable of a constant that a jaxpr inside holds."""
        return self.capture(id(value), key_data(value) if is_key(shaped(value)) else value)

    def capture(self, identity: int, value: Any) -> Var:
        if identity not in self.captured:
            self.captured[identity] = new_var(shaped(value))
            self.values[identity] = value
        return self.captured[identity]


@dataclass(frozen=True, slots=True)
class _Walk:
    """Where equations go, and what the calls above them add to their source."""

    block: _Block
    scope: NameStack
    place: Callable[[Any], Any] = lambda traceback: traceback
    shared: dict[Any, tuple[Jaxpr, tuple[Any, ...]]] = field(default_factory=dict)

    def into(self, block: _Block, callee: Jaxpr, eqn: JaxprEqn, extra_scope: str | None = None) -> _Walk:
        """The walk through `callee`, called by `eqn` (already placed)."""
        caller = eqn.source_info.traceback
        scope = eqn.source_info.name_stack
        if extra_scope is not None:
            scope = scope.extend(extra_scope)
        is_jit = eqn.primitive.name in _JITS
        place = functools.partial(caller_traceback, callee, caller=caller, is_jit=is_jit)
        return _Walk(block, scope, place, self.shared)


def _fresh(aval: Any) -> Var:
    return new_var(physical_aval(aval) if is_key(aval) else aval)


def _inline(walk: _Walk, jaxpr: Jaxpr, consts: Sequence[Any], operands: Sequence[Atom]) -> list[Atom]:
    """Append the flat equations of `jaxpr` to the walk's block; returns what its outvars are."""
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


def _step(walk: _Walk, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom]:
    """Append what one equation flattens to; its own invars are only looked at, `operands` stand for them."""
    name = eqn.primitive.name
    if name in _HANDLERS:
        return _HANDLERS[name](walk, eqn, operands)
    if name in ALIASES or _is_identity(eqn, operands):
        return operands[:1]
    if name == "device_put" and all(device is None for device in eqn.params["devices"]):
        return operands  # to nowhere in particular, as `jax.scipy.sparse.linalg.cg` has it
    if touches_keys(eqn):
        return _keys(walk, eqn, operands)
    known = fold(eqn, operands)
    if known is not None:
        return [known]
    return _keep(walk, eqn, operands)


def _keep(walk: _Walk, eqn: JaxprEqn, operands: Sequence[Atom], params: dict[str, Any] | None = None) -> list[Atom]:
    outvars = [_fresh(var.aval) for var in eqn.outvars]
    walk.block.eqns.append(replace_eqn(eqn, invars=operands, outvars=outvars, params=params))
    return list(outvars)


def _is_identity(eqn: JaxprEqn, operands: Sequence[Atom]) -> bool:
    name = eqn.primitive.name
    if name not in _MAYBE_IDENTITY or eqn.outvars[0].aval != operands[0].aval:
        return False
    match name:
        case "transpose":
            return list(eqn.params["permutation"]) == sorted(eqn.params["permutation"])
        case "reshape":
            return eqn.params["dimensions"] is None and len(operands) == 1
        case "broadcast_in_dim":
            return list(eqn.params["broadcast_dimensions"]) == list(range(operands[0].aval.ndim))
    return True


_MAYBE_IDENTITY = frozenset(
    {"broadcast_in_dim", "convert_element_type", "copy", "copy_p", "reshape", "squeeze", "stop_gradient", "transpose"}
)


# Calls.


def _call(walk: _Walk, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom]:
    body, consts = open_jaxpr(_callee(eqn))
    return _inline(walk.into(walk.block, body, eqn), body, consts, operands)


def _callee(eqn: JaxprEqn) -> Jaxpr | ClosedJaxpr:
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr", "fwd_jaxpr", "call", "callee"):
        if isinstance(eqn.params.get(name), Jaxpr | ClosedJaxpr):
            return eqn.params[name]
    raise AssertionError(f"`{eqn.primitive}` holds no program among {list(eqn.params)}")


def _high(walk: _Walk, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom]:
    body, consts = open_jaxpr(high_primitive_jaxpr(eqn))
    traceback = eqn.source_info.traceback
    inside = _Walk(walk.block, eqn.source_info.name_stack, lambda _: traceback, walk.shared)
    return _inline(inside, body, consts, operands)


def _of_mapped(walk: _Walk, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom]:
    """What `jax.vmap(..., axis_name=...)` leaves of a `psum` over its axis: over dims of its operands, which have no name."""
    axes = eqn.params["axes"]
    if not all(isinstance(axis, int) for axis in axes):
        return _keep(walk, eqn, operands)
    if not axes:
        return operands
    reduce = _REDUCTIONS[eqn.primitive.name]
    eqns, results = inline_function(lambda *arrays: [reduce(a, axes) for a in arrays], operands, eqn.source_info)
    walk.block.eqns += eqns
    return results


_REDUCTIONS: dict[str, Callable[..., Any]] = {"psum": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}


def _linear_solve(walk: _Walk, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom]:
    """`custom_linear_solve` only differs from its solve function when it is differentiated."""
    lengths = eqn.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    solve_operands = operands[first : first + lengths.solve] + operands[sum(lengths) :]
    body, consts = open_jaxpr(eqn.params["jaxprs"].solve)
    return _inline(walk.into(walk.block, body, eqn), body, consts, solve_operands)


def _remat(walk: _Walk, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom]:
    """Inlined; in the backward pass behind one barrier on the inputs that are not to be shared with the forward."""
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
    return _inline(walk.into(walk.block, body, eqn, "checkpoint"), body, consts, operands)


def _keys(walk: _Walk, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom]:
    key = cache_key(eqn)
    if key not in walk.shared:
        jaxpr, consts = open_jaxpr(physical_jaxpr(eqn))
        walk.shared[key] = flatten(jaxpr, consts)
    flat, values = walk.shared[key] if key is not None else walk.shared.pop(key)
    traceback = eqn.source_info.traceback
    inside = _Walk(walk.block, eqn.source_info.name_stack, lambda _: traceback, walk.shared)
    return _inline(inside, flat, (), [*operands, *map(walk.block.constant, values)])


# Loops and branches.


def _flat_body(walk: _Walk, eqn: JaxprEqn, closed: ClosedJaxpr) -> tuple[Jaxpr, _Block]:
    """The flat body of a structured equation, and its block: constants are still to be made operands."""
    body, consts = open_jaxpr(closed)
    block = _Block()
    invars = [_fresh(var.aval) for var in body.invars]
    outvars = _inline(walk.into(block, body, eqn), body, consts, invars)
    return make_jaxpr(invars, outvars, block.eqns), block


def _with_captures(body: Jaxpr, own: _Block, all_of: _Block) -> Jaxpr:
    """`body` with one more leading invar per constant of `all_of`, its own or not."""
    invars = [own.captured.get(key) or new_var(var.aval) for key, var in all_of.captured.items()]
    return make_jaxpr([*invars, *body.invars], body.outvars, body.eqns)


def _capture(block: _Block, inner: _Block) -> list[Atom]:
    """The variables of the enclosing block for the constants of an inner one."""
    return [block.capture(identity, value) for identity, value in inner.values.items()]


def _scan(walk: _Walk, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom]:
    body, block = _flat_body(walk, eqn, eqn.params["jaxpr"])
    num_consts, num_carry = scan_counts(eqn.params)
    body = _with_captures(body, block, block)
    params = scan_params(eqn.params, body, num_consts + len(block.captured), num_carry)
    return _keep(walk, eqn, [*_capture(walk.block, block), *operands], params)


def _while(walk: _Walk, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom]:
    test, test_block = _flat_body(walk, eqn, eqn.params["cond_jaxpr"])
    body, body_block = _flat_body(walk, eqn, eqn.params["body_jaxpr"])
    test, body = _with_captures(test, test_block, test_block), _with_captures(body, body_block, body_block)
    num_test, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    tests = [*_capture(walk.block, test_block), *operands[:num_test]]
    consts = [*_capture(walk.block, body_block), *operands[num_test : num_test + num_body]]
    carries = operands[num_test + num_body :]
    if test.outvars[0].aval.shape:
        return _while_of_each(walk, eqn, (test, tests), (body, consts), carries)
    return _keep(walk, eqn, [*tests, *consts, *carries], _while_params(eqn, test, len(tests), body, len(consts)))


def _while_params(eqn: JaxprEqn, test: Jaxpr, num_tests: int, body: Jaxpr, num_consts: int) -> dict[str, Any]:
    return {
        **eqn.params,
        "cond_jaxpr": close_jaxpr(test),
        "body_jaxpr": close_jaxpr(body),
        "cond_nconsts": num_tests,
        "body_nconsts": num_consts,
    }


def _while_of_each(
    walk: _Walk,
    eqn: JaxprEqn,
    test: tuple[Jaxpr, Sequence[Atom]],
    body: tuple[Jaxpr, Sequence[Atom]],
    carries: Sequence[Atom],
) -> list[Atom]:
    """A loop that ends for each sample in its own time (`vmap` of a `while`): what is done is kept as it is.

    As in JAX's lowering, but for what goes on, which is carried along instead of being computed in test and body both.
    """
    first, (going,) = inline_from(test[0], [*test[1], *carries])
    walk.block.eqns += first
    entering = [*test[1], *body[1], *carries, going]
    inside = [new_var(a.aval) for a in entering]
    num_consts = len(entering) - len(carries) - 1
    old, go = inside[num_consts:-1], inside[-1]
    eqns, new = inline_from(body[0], [*inside[len(test[1]) : num_consts], *old])
    kept = []
    for before, after in zip(old, new, strict=True):
        more, results = inline_function(_where, [go, after, before])
        eqns += more
        kept += results
    again, (still,) = inline_from(test[0], [*inside[: len(test[1])], *kept])
    more, still_going = inline_function(jnp.logical_and, [go, still])
    loop = make_jaxpr(inside, [*kept, *still_going], [*eqns, *again, *more])
    params = _while_params(eqn, _any_of_last(loop.invars[num_consts:]), 0, loop, num_consts)
    outvars = [new_var(a.aval) for a in (*old, go)]
    walk.block.eqns.append(replace_eqn(eqn, invars=entering, outvars=outvars, params=params))
    return list(outvars[:-1])


def _where(go: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    return lax.select(lax.broadcast_in_dim(go, old.shape, range(go.ndim)), new, old)


def _any_of_last(like: Sequence[Var]) -> Jaxpr:
    """The test whether the last value has a true element."""
    inside = [new_var(var.aval) for var in like]
    eqns, outvars = inline_function(jnp.any, inside[-1:])
    return make_jaxpr(inside, outvars, eqns)


def _cond(walk: _Walk, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom]:
    only = _only_branch(eqn, operands[0])
    if only is not None:
        body, consts = open_jaxpr(only)
        return _inline(walk.into(walk.block, body, eqn), body, consts, operands[1:])
    branches = [_flat_body(walk, eqn, branch) for branch in eqn.params["branches"]]
    union = _Block()
    for _, block in branches:
        union.captured.update(block.captured)
        union.values.update(block.values)
    params = {
        **eqn.params,
        "branches": tuple(close_jaxpr(_with_captures(body, block, union)) for body, block in branches),
    }
    return _keep(walk, eqn, [operands[0], *_capture(walk.block, union), *operands[1:]], params)


def _only_branch(eqn: JaxprEqn, index: Atom) -> ClosedJaxpr | None:
    """The branch that is always taken: of a known index, or where no machine of ours has a branch of its own."""
    branches = eqn.params["branches"]
    if isinstance(index, Literal):
        return branches[min(max(int(index.val), 0), len(branches) - 1)]
    platforms = eqn.params.get("branches_platforms")
    if platforms and platforms[-1] is None and not any(_MACHINES & set(names) for names in platforms[:-1]):
        return branches[-1]  # `jnp.diag` has one for Mosaic, which exists only inside of Pallas kernels
    return None


_MACHINES = frozenset({"cpu", "cuda", "rocm", "tpu"})
_CALLS = (
    "call", "closed_call", "composite", "core_call", "core_closed_call", "custom_jvp_call", "custom_jvp_call_jaxpr",
    "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_vmap_call", "eval_jaxpr", "jit", "linear_call", "pjit",
    "remat_opt", "xla_metadata_call",
)  # fmt: skip
_HANDLERS: dict[str, Callable[[_Walk, JaxprEqn, list[Atom]], list[Atom]]] = {
    **dict.fromkeys(_CALLS, _call),
    **dict.fromkeys(("checkpoint", "remat", "remat2"), _remat),
    "call_hi_primitive": _high,
    "call_hi_primitive_linearized": _high,
    "custom_linear_solve": _linear_solve,
    **dict.fromkeys(_REDUCTIONS, _of_mapped),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
