"""Traces the user's step at abstract arguments to one flat program.

In:     the step, its arguments (arrays, numbers, `jax.ShapeDtypeStruct`), which of them are static.
Out:    `Program`: a flat jaxpr (`flatten.py`) and how the user's pytrees, names and typed keys map to its variables.
Method: `jax.jit(...).trace`, so that arguments mean exactly what they mean to `jax.jit`; then the passes of `TRACE`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.tree_util import GetAttrKey, KeyPath, PyTreeDef

from autopar._jax import (
    Aval,
    ClosedJaxpr,
    Function,
    is_key,
    key_impl_name,
    on_device,
    open_jaxpr,
    shaped,
    trace_function,
)
from autopar.errors import TraceError
from autopar.ir.gradient import gradient_line
from autopar.ir.passes import Pass, run_passes, without_collection
from autopar.ir.program import Program
from autopar.ir.rewrite.dim_order import products_in_order
from autopar.ir.rewrite.one_dtype import products_of_one_dtype
from autopar.ir.rewrite.peeled_trips import roll_in_peeled_trips
from autopar.ir.rewrite.scan_slices import scan_slices
from autopar.ir.rewrite.sorted_keys import compute_sorted_numbers
from autopar.ir.rewrite.unique_writes import resolve_unique_writes
from autopar.ir.trace.constants import with_constants
from autopar.ir.trace.containers import accepts, in_containers, key_text
from autopar.ir.trace.flatten import FLATTEN, Traced, check_flat
from autopar.ir.trace.moved_out import restore_scopes
from autopar.ir.trace.parameters import SplitCall, Static, check_hashable, parameters_of, static_of
from autopar.ir.trace.random import raw_keys
from autopar.ir.trace.returned import is_of_objects, objects_in

TRACE: tuple[Pass[Traced], ...] = (
    *FLATTEN,
    Pass(
        "sorted_keys",
        "numbers of sorted samples, and counts by a search in a sorted key, are computed row by row",
        lambda step: step.by(compute_sorted_numbers),
    ),
    Pass(
        "moved_out",
        "what JAX hoisted out of a forward loop that takes gradients belongs to the forward pass",
        lambda step: step.by(restore_scopes),
    ),
    Pass(
        "peeled_trips",
        "a trip that stands before or behind a loop that adds up gradients is one of its trips",
        lambda step: step.by(roll_in_peeled_trips),
    ),
    Pass("scan_slices", "loops that read `layers[i]` in trip i scan", lambda step: step.by(scan_slices)),
    Pass("one_dtype", "products of two dtypes convert their operands", lambda step: step.by(products_of_one_dtype)),
    Pass("dim_order", "products keep the layout of large arrays", lambda step: step.by(products_in_order)),
    Pass(
        "unique_writes",
        "gradients of a scatter by a permutation do not test which write won",
        lambda step: step.by(resolve_unique_writes),
    ),
)
"""The passes that every step goes through."""


@without_collection()
def trace_step(
    fn: Function, args: Sequence[object], kwargs: Mapping[str, object] | None = None, static: Static | None = None
) -> Program:
    """Trace `fn(*args, **kwargs)`.

    Args:
        fn: The step. Its own exceptions pass through unchanged.
        args: Positional arguments: pytrees of arrays, numbers or `jax.ShapeDtypeStruct`.
        static: The static parameters; None: none is.

    Raises:
        TraceError: A leaf is no array, a static argument has no hash, an argument or a captured value is a tracer of
            another trace, or `jax.disable_jit` is on.
    """
    kwargs = dict(kwargs or {})
    name = name_of(fn)
    _check_jit(name)
    static = static or static_of(parameters_of(fn))
    call = static.split(args, kwargs)
    check_hashable(call.static, name)
    passed = {*range(len(args)), *(static.parameters.number_of(key) for key in kwargs)}
    arguments = _typed(call, name)

    names = [key for key in sorted(kwargs) if key in static.names]
    traced, out_tree = _traced(fn, call, arguments.tree, arguments.avals, static.positions(len(args)), names)
    jaxpr, keys = traced.jaxpr, raw_keys(traced.jaxpr)
    flat = run_passes(TRACE, traced, check_flat)
    out_avals = tuple(var.aval for var in jaxpr.outvars)
    num_args = len(arguments.avals)
    assert len(jaxpr.invars) == num_args, f"{len(jaxpr.invars)} invars for {num_args} argument leaves"
    return Program(
        name=name,
        jaxpr=flat.jaxpr,
        consts=tuple(flat.constants.values()),
        in_tree=arguments.tree,
        out_tree=out_tree,
        in_paths=arguments.paths,
        in_keys=arguments.keys,
        out_paths=_result_paths(call, out_tree, out_avals),
        in_avals=arguments.avals,
        out_avals=out_avals,
        key_inputs=_key_impls(arguments.avals),
        key_outputs=_key_impls(out_avals),
        num_args=num_args,
        static=tuple((argument, repr(value)) for argument, value in call.static),
        arguments=call.arguments,
        raw_keys=tuple(k for k, var in enumerate(jaxpr.invars) if var in keys),
        defaulted=tuple(n for n in static.parameters.optional if n not in passed),
        gradient=gradient_line(jaxpr),
    )


class _Typed(NamedTuple):
    """The argument leaves of a call: their tree, and the path of each as text and as JAX's keys, and its type."""

    tree: PyTreeDef
    paths: tuple[str, ...]
    keys: tuple[KeyPath, ...]
    avals: tuple[Aval, ...]


def _typed(call: SplitCall, name: str) -> _Typed:
    """The argument leaves of a call; `name`: the step's, for errors.

    Raises `TraceError`: a leaf is no array, or is being traced.
    """
    found, tree = jax.tree_util.tree_flatten_with_path((call.args, call.kwargs))
    names = [argument.name for argument in call.arguments]
    paths = _shortened([(_argument_path(path, names), path[-1]) for path, _ in found])
    avals = tuple(_aval_of(leaf, path, name) for path, (_, leaf) in zip(paths, found, strict=True))
    return _Typed(tree, paths, tuple(path for path, _ in found), avals)


def _result_paths(call: SplitCall, tree: PyTreeDef, avals: Sequence[Aval]) -> tuple[str, ...]:
    """Readable paths of the leaves of a step's result; `avals`: their types."""
    names = [argument.name for argument in call.arguments]
    found = jax.tree_util.tree_flatten_with_path(in_containers(tree, [_type_of(aval) for aval in avals], ()))[0]
    return _shortened([(_result_path(path, tree, names), path[-1] if path else None) for path, _ in found])


def _key_impls(avals: Sequence[Aval]) -> tuple[str | None, ...]:
    """The generator of each array of typed keys; None for other arrays."""
    return tuple(key_impl_name(aval) if is_key(aval) else None for aval in avals)


_FOR_EACH_DEVICE = (
    "autopar: `{0}` is written for each of several devices, as for `jax.pmap`. Write it for one device, which sees the whole "
    "batch: leave out `pmean` and its like (a mean over the batch is one over all devices), and pass state and batch "
    "without a leading dim of devices. Or pass it with its `jax.pmap`: parallelize(jax.pmap({0}, axis_name=...))."
)


def _traced(
    fn: Function,
    call: SplitCall,
    in_tree: PyTreeDef,
    in_avals: Sequence[Aval],
    static_positions: Sequence[int],
    static_names: Sequence[str],
) -> tuple[Traced, PyTreeDef]:
    """The step as JAX traces it, and the structure of its results.

    Raises `TraceError`: the step uses a tracer of another trace.
    """
    name, types = name_of(fn), [_type_of(aval) for aval in in_avals]

    def trace(fn: Function) -> tuple[ClosedJaxpr, list[object], PyTreeDef]:
        if accepts(in_tree, types):
            args, kwargs = call.joined(*jax.tree.unflatten(in_tree, types))
            return trace_function(fn, args, kwargs, static_positions, static_names)
        # a class takes nothing but arrays: it is built inside the trace, from tracers
        return trace_function(functools.partial(_call_flat, fn, call, in_tree), types, {})

    try:
        try:
            closed, captured, out_tree = trace(fn)
        except TypeError as error:  # JAX cannot return text, or the step itself has failed, and will again
            try:
                closed, captured, out_tree = trace(with_constants(fn))
            except TypeError:
                raise error from None
    except NameError as error:
        if "unbound axis name" in str(error):
            error.add_note(_FOR_EACH_DEVICE.format(name))
        raise
    except jax.errors.UnexpectedTracerError as error:
        raise TraceError(
            f"`{name}` uses a value that was left over from another trace.",
            given=f"`{name}`, which closes over a traced value (or reads one from a global, a list, an object)",
            wrong=f"a traced value means nothing outside of the function that it was made in.\n{error}",
            do=f"pass the value to `{name}` as an argument, or return it from where it was made.",
        ) from error
    jaxpr, consts = open_jaxpr(closed)
    foreign = [value for value in (*captured, *consts) if isinstance(value, jax.core.Tracer)] or captured
    if foreign:
        raise _closed_over_tracer(name, foreign[0])
    return Traced(jaxpr, dict(zip(jaxpr.constvars, consts, strict=True)), len(jaxpr.invars)), out_tree


def _call_flat(fn: Function, call: SplitCall, tree: PyTreeDef, *leaves: object) -> object:
    args, kwargs = call.joined(*jax.tree.unflatten(tree, leaves))
    return fn(*args, **kwargs)


def _type_of(aval: Aval) -> jax.ShapeDtypeStruct:
    """The type alone, so that the array's placement has no influence on the trace."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def name_of(fn: object) -> str:
    """The user's name of a step."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def _argument_path(path: KeyPath, names: Sequence[str]) -> str:
    """Path of a leaf of `(args, kwargs)`."""
    in_kwargs, argument, *rest = path
    first = argument.key if in_kwargs.idx == 1 else names[argument.idx]
    return "/".join((first, *map(key_text, rest)))


def _result_path(path: KeyPath, tree: PyTreeDef, names: Sequence[str]) -> str:
    """Path of a leaf of the result; a new array of an object has the path of the argument."""
    updated = objects_in(tree).updated
    if is_of_objects(tree):
        first, path = path[0], path[1:]
        if first.idx < len(updated):
            return "/".join((names[updated[first.idx]], *map(key_text, path)))
    return "/".join(("result", *map(key_text, path)))


def _shortened(paths: Sequence[tuple[str, object]]) -> tuple[str, ...]:
    """Paths without a last "/value" that is the attribute of a wrapper around one array (`flax.nnx.Param`)."""
    parents = Counter(path.rpartition("/")[0] for path, _ in paths)
    return tuple(
        path.removesuffix("/value")
        if isinstance(last, GetAttrKey) and last.name == "value" and parents[path.rpartition("/")[0]] == 1
        else path
        for path, last in paths
    )


def _check_jit(name: str) -> None:
    if jax.config.jax_disable_jit:
        raise TraceError(
            f"`{name}` cannot run without jit.",
            given="jax.disable_jit",
            wrong="autopar traces a step, and what it runs are compiled programs.",
            do=f"leave jax.disable_jit; or, to look into the function line by line, call `{name}.__wrapped__`.",
            path="",
        )


def check_not_traced(leaf: object, path: str, name: str) -> None:
    """Check that an argument is no tracer. Raises `TraceError`: it is one."""
    if isinstance(leaf, jax.core.Tracer):
        raise TraceError(
            f"argument `{path}` of `{name}` is being traced.",
            given=f"{path} = {_tracer_text(leaf)}",
            wrong="autopar plans and runs whole steps; inside of jit, grad, vmap or scan there is nothing to run on.",
            do=f"call `{name}` outside of other transformations, or transform the function before autopar sees it, "
            f"which is `{name}.__wrapped__` (for `jax.eval_shape`, too).",
            path=path,
        )


def _aval_of(leaf: object, path: str, name: str) -> Aval:
    check_not_traced(leaf, path, name)
    try:
        return on_device(shaped(leaf))  # its present placement does not matter
    except (TypeError, ValueError, OverflowError) as error:
        raise TraceError(
            f"argument `{path}` of `{name}` is not an array.",
            given=f"{path} = {' '.join(repr(leaf).split()):.80}, a {type(leaf).__name__}"
            + (f" of {leaf.dtype}" if hasattr(leaf, "dtype") else ""),
            wrong=f"every leaf of the arguments becomes an array on the devices, and this cannot: {error}"
            if isinstance(error, OverflowError)
            else "every leaf of the arguments becomes an array on the devices, and this cannot.",
            do=_instead_of(leaf),
            path=path,
        ) from None


def _instead_of(leaf: object) -> str:
    """What to pass for a leaf that is no array."""
    if isinstance(leaf, Iterator):
        return "pass what it yields, one batch in each call: next(...)."
    if hasattr(leaf, "__array__") and not isinstance(leaf, np.ndarray):  # another library's
        return "pass numpy.asarray(...) of it."
    return (
        "name the whole argument in static_argnums or static_argnames if the program depends on it, leave the leaf out of the "
        "pytree, or make it an array."
    )


def _tracer_text(tracer: object) -> str:
    """The class and type of a tracer; its own text may hold all the numbers."""
    return f"a {type(tracer).__name__} of {jax.typeof(tracer)}"


def _closed_over_tracer(name: str, tracer: object) -> TraceError:
    return TraceError(
        f"`{name}` closes over a traced value.",
        given=f"`{name}`, which uses {_tracer_text(tracer)} from outside",
        wrong="the value exists only while the jit, grad, vmap or scan that made it is traced: it has no data.",
        do=f"pass it to `{name}` as an argument, and call `{name}` outside of other transformations.",
    )
