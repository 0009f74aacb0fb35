"""Lowers operations on typed random keys to operations on their integers: a flat program has no typed keys.

In:     an equation on typed keys (`jax.random.key`): a random primitive, or an operation that moves keys.
Out:    a closed jaxpr that does the same to the keys' integers: `key<fry>[s]` becomes `uint32[s, 2]`.
Method: random primitives become what JAX itself lowers them to. For threefry that is `threefry2x32` over counters
        (`iota_2x32_shape`), which is elementwise: it shards like any other elementwise work, and the numbers equal those of
        one device. Operations that move keys are mapped over the trailing dimension of the integers.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Sequence

import jax
from jax import lax

from autopar._jax import (
    Atom,
    ClosedJaxpr,
    Function,
    Jaxpr,
    JaxprEqn,
    Literal,
    Params,
    Var,
    bind_eqn,
    eqn_context,
    is_key,
    key_primitive_implementation,
    open_jaxpr,
    physical_aval,
    trace,
)

ALIASES = frozenset({"random_wrap", "random_unwrap", "random_clone"})
"""Primitives that are the identity on a key's integers."""


def touches_keys(eqn: JaxprEqn) -> bool:
    """Whether an operand or a result of `eqn` is an array of typed keys."""
    return any(is_key(atom.aval) for atom in eqn.invars) or any(is_key(var.aval) for var in eqn.outvars)


def raw_keys(jaxpr: Jaxpr) -> dict[Var, None]:
    """Variables of a traced program, before flattening, that are wrapped as one typed key: made by `jax.random.PRNGKey`."""
    found: dict[Var, None] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "random_wrap" and not eqn.outvars[0].aval.shape:
            found.update((a, None) for a in eqn.invars if not isinstance(a, Literal))
        for body, operands in _called(eqn):
            inside = raw_keys(body)
            pairs = zip(body.invars, operands, strict=True)
            found.update((a, None) for var, a in pairs if var in inside and not isinstance(a, Literal))
    return found


def _called(eqn: JaxprEqn) -> Iterator[tuple[Jaxpr, Sequence[Atom]]]:
    """The programs inside an equation, except tests of loops, with their operands: the last ones of the equation."""
    for name, value in eqn.params.items():
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, Jaxpr | ClosedJaxpr) and name != "cond_jaxpr":
                body, _ = open_jaxpr(inner)
                if len(body.invars) <= len(eqn.invars):
                    yield body, eqn.invars[len(eqn.invars) - len(body.invars) :]


def physical_jaxpr(eqn: JaxprEqn) -> ClosedJaxpr:
    """The program that `eqn` is on the integers of keys.

    `eqn`: an equation on keys that is neither a call nor a loop nor one of `ALIASES`.

    Returns:
        A closed jaxpr from the physical operands to the physical results. It may contain jits, and for
        `random_gamma` typed keys: the caller flattens it.
    """
    with eqn_context(eqn):
        return trace(_physical_function(eqn), *(physical_aval(atom.aval) for atom in eqn.invars))


def cache_key(eqn: JaxprEqn) -> Hashable | None:
    """A key, equal for equations with the same `physical_jaxpr`; None: the parameters cannot be hashed."""
    key = (
        eqn.primitive,
        tuple(eqn.params.items()),
        tuple((atom.aval.shape, atom.aval.dtype, atom.aval.weak_type) for atom in eqn.invars),
        eqn.ctx,
    )
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _physical_function(eqn: JaxprEqn) -> Function:
    implementation = key_primitive_implementation(eqn)
    if implementation is not None:
        return implementation
    params = eqn.params
    match eqn.primitive.name:
        case "slice":
            return functools.partial(_slice, params)
        case "squeeze":
            return lambda x: lax.squeeze(x, params["dimensions"])
        case "reshape":
            return lambda x: lax.reshape(x, (*params["new_sizes"], x.shape[-1]))
        case "transpose":
            return lambda x: lax.transpose(x, (*params["permutation"], x.ndim - 1))
        case "broadcast_in_dim":
            return functools.partial(_broadcast, params)
        case "concatenate":
            return lambda *parts: lax.concatenate(parts, params["dimension"])
        case "eq":
            return lambda x, y: lax.reduce_and(x == y, (x.ndim - 1,))
        case "ne":
            return lambda x, y: lax.reduce_or(x != y, (x.ndim - 1,))
        case "dynamic_slice":
            return functools.partial(_dynamic_slice, params["slice_sizes"])
        case "dynamic_update_slice":
            return lambda x, update, *starts: lax.dynamic_update_slice(x, update, (*starts, _zero_like(starts)))
    in_axes = tuple(len(atom.aval.shape) if is_key(atom.aval) else None for atom in eqn.invars)
    mapped = jax.vmap(lambda *operands: bind_eqn(eqn, *operands), in_axes, [-1] * len(eqn.outvars))
    if any(axis is not None for axis in in_axes):
        return mapped
    raise NotImplementedError(f"`{eqn.primitive}` makes typed random keys of something else")


def _slice(params: Params, x: jax.Array) -> jax.Array:
    strides = None if params["strides"] is None else (*params["strides"], 1)
    return lax.slice(x, (*params["start_indices"], 0), (*params["limit_indices"], x.shape[-1]), strides)


def _broadcast(params: Params, x: jax.Array) -> jax.Array:
    shape = (*params["shape"], x.shape[-1])
    return lax.broadcast_in_dim(x, shape, (*params["broadcast_dimensions"], len(shape) - 1))


def _dynamic_slice(slice_sizes: tuple[int, ...], x: jax.Array, *starts: jax.Array) -> jax.Array:
    return lax.dynamic_slice(x, (*starts, _zero_like(starts)), (*slice_sizes, x.shape[-1]))


def _zero_like(starts: tuple[jax.Array, ...]) -> jax.Array:
    return lax.full((), 0, starts[0].dtype) if starts else lax.full((), 0, "int32")
