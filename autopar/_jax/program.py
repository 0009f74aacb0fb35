"""Adapters for jaxprs and their equations: build, change, trace and run them, and find their source.

In:     functions, jaxprs, equations.
Out:    the same for JAX 0.10 and 0.11: a closed jaxpr is a class of its own in 0.10, and a jaxpr with constants in 0.11;
        `scan` separates its operands by counts in 0.10 and by a tree in 0.11.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import source_info_util as _source_info_util
from jax._src.core import eval_jaxpr as _eval_jaxpr
from jax._src.lax.lax import optimization_barrier_p

from autopar._jax.types import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, NameStack, Primitive, SourceInfo, Var
from autopar._jax.values import on_host


def open_jaxpr(closed: Any) -> tuple[Jaxpr, list[Any]]:
    """The open jaxpr of a closed or open one, and the values of its `constvars` (none for an open one)."""
    return getattr(closed, "jaxpr", closed), list(getattr(closed, "consts", ()))


def all_equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The equations of a jaxpr and of all bodies inside it."""
    yield from jaxpr.eqns
    for inner in _core.subjaxprs(jaxpr):
        yield from all_equations(inner)


def bodies_in(eqn: JaxprEqn) -> list[Jaxpr]:
    """The bodies that an equation holds directly."""
    return list(_core.jaxprs_in_params(eqn.params))


def close_jaxpr(jaxpr: Jaxpr) -> ClosedJaxpr:
    """Close a jaxpr that has no `constvars`."""
    return ClosedJaxpr(jaxpr, [])


_NO_NAMES = _core.DebugInfo("autopar", "flat program", None, None)


def make_jaxpr(invars: Sequence[Var], outvars: Sequence[Atom], eqns: Sequence[JaxprEqn]) -> Jaxpr:
    """A jaxpr of these equations, without constants, and with their effects."""
    effects = frozenset[Any]().union(*(eqn.effects for eqn in eqns if eqn.effects)) or _core.no_effects
    return Jaxpr([], list(invars), list(outvars), list(eqns), effects, debug_info=_NO_NAMES)


def trace(function: Callable[..., Any], *avals: Any) -> ClosedJaxpr:
    """The closed jaxpr of `function` at abstract arguments."""
    types = (aval if on_host(aval) else jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals)
    return jax.make_jaxpr(function)(*types)


def trace_function(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    static_argnums: Sequence[int] = (),
    static_argnames: Sequence[str] = (),
) -> tuple[ClosedJaxpr, list[Any], Any]:
    """Trace a function as `jax.jit` does.

    Returns:
        The closed jaxpr; the tracers of other traces that the function captured, which are its first invars; the structure
        of the function's result.
    """
    try:
        hash(function), weakref.ref(function)
    except TypeError:  # a callable object that holds arrays; jit needs something to key its cache by
        function = functools.partial(function)
    jitted = jax.jit(function, static_argnums=tuple(static_argnums), static_argnames=tuple(static_argnames))
    with with_automatic_axes():
        traced = jitted.trace(*args, **kwargs)
    return traced.jaxpr, list(getattr(traced, "_consts", ())), traced.out_tree


def trace_context() -> Any:
    """JAX's settings that a traced program depends on: 64 bits, the context mesh, the precision of products, ..."""
    return _config.trace_context()


def with_automatic_axes() -> AbstractContextManager[None]:
    """Context manager: the context mesh has no explicit axes, which would make shardings a part of types."""
    if all(kind == jax.sharding.AxisType.Auto for kind in jax.sharding.get_abstract_mesh().axis_types):
        return nullcontext()
    mesh = jax.sharding.get_mesh()
    return jax.set_mesh(jax.sharding.Mesh(mesh.devices, mesh.axis_names))


def without_mesh() -> AbstractContextManager[None]:
    """Context manager: no context mesh (`jax.set_mesh`), so that our programs can use their own."""
    if jax.sharding.get_abstract_mesh().empty:
        return nullcontext()
    return jax.set_mesh(None)


def eval_jaxpr(jaxpr: Jaxpr, consts: Sequence[Any], *args: Any) -> list[Any]:
    """Run a jaxpr, operation by operation (or trace it, under a transformation)."""
    return _eval_jaxpr(jaxpr, list(consts), *args)


def new_var(aval: Any) -> Var:
    """A fresh variable."""
    return Var(aval)


def new_eqn(
    primitive: Primitive,
    invars: Sequence[Atom],
    outvars: Sequence[Var],
    params: Mapping[str, Any],
    *,
    source_info: SourceInfo | None = None,
) -> JaxprEqn:
    """A new equation, without effects."""
    return _core.new_jaxpr_eqn(list(invars), list(outvars), primitive, dict(params), _core.no_effects, source_info)


def replace_eqn(
    eqn: JaxprEqn,
    *,
    invars: Sequence[Atom] | None = None,
    outvars: Sequence[Var] | None = None,
    params: Mapping[str, Any] | None = None,
    source_info: SourceInfo | None = None,
) -> JaxprEqn:
    """`eqn` with some fields replaced; its effects and context stay."""
    return JaxprEqn(
        eqn.invars if invars is None else list(invars),
        eqn.outvars if outvars is None else list(outvars),
        eqn.primitive,
        eqn.params if params is None else dict(params),
        eqn.effects,
        eqn.source_info if source_info is None else source_info,
        eqn.ctx,
    )


def without_context_mesh(eqn: JaxprEqn) -> JaxprEqn:
    """`eqn` without the mesh that it was traced under, which JAX would refuse in a program over another mesh.

    Neither in its context nor as the type of its result: constraints stay.
    """
    params = eqn.params
    typed = [name for name in ("sharding", "out_sharding") if params.get(name) is not None]
    if typed and eqn.primitive.name != "sharding_constraint":
        params = {**params, **dict.fromkeys(typed)}
    if params is eqn.params and eqn.ctx.cur_abstract_mesh.empty:
        return eqn
    context = eqn.ctx if eqn.ctx.cur_abstract_mesh.empty else _context_without_mesh(eqn.ctx)
    return JaxprEqn(eqn.invars, eqn.outvars, eqn.primitive, params, eqn.effects, eqn.source_info, context)


@functools.lru_cache(maxsize=64)
def _context_without_mesh(context: Any) -> Any:
    with context.manager, jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return _core.new_jaxpr_eqn([], [], optimization_barrier_p, {}, _core.no_effects).ctx


def eqn_context(eqn: JaxprEqn) -> Any:
    """Context manager: JAX's settings (threefry, compute type, ...) under which `eqn` was traced."""
    return eqn.ctx.manager


def bind_eqn(eqn: JaxprEqn, *operands: Any, params: Mapping[str, Any] | None = None) -> list[Any]:
    """Run one equation on values, one per invar; returns a list. `params`: instead of the equation's own."""
    bind_params = eqn.primitive.get_bind_params(eqn.params if params is None else dict(params))
    if isinstance(bind_params, tuple):  # older contract: functions to pass first
        functions, bind_params = bind_params
        operands = (*functions, *operands)
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*operands, **bind_params)
    return list(results) if eqn.primitive.multiple_results else [results]


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers of constants and carries among the operands of a `scan`; the rest is scanned over."""
    if "ft_in" in params:
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def scan_params(params: Mapping[str, Any], body: Jaxpr, num_consts: int, num_carry: int) -> dict[str, Any]:
    """Parameters of a `scan` with another body, whose invars are constants, carries, then scanned rows."""
    if "ft_in" in params:
        from jax._src import flattree  # type: ignore[attr-defined]  # not in 0.10

        num_xs, num_ys = len(body.invars) - num_consts - num_carry, len(body.outvars) - num_carry
        nones = flattree.nones
        counts = {
            "ft_in": flattree.pack((nones(num_consts), nones(num_carry), nones(num_xs))),
            "ft_out": flattree.pack((nones(num_carry), nones(num_ys))),
        }
    else:
        counts = {"num_consts": num_consts, "num_carry": num_carry}
    return {**params, "jaxpr": close_jaxpr(body), **counts}


def new_scan_params(length: int) -> dict[str, Any]:
    """Parameters of a new `scan`, first to last, without operands and results yet."""
    (eqn,) = jax.make_jaxpr(lambda: jax.lax.scan(lambda c, x: (c, x), 0, None, length=length))().eqns
    return scan_params(eqn.params, make_jaxpr([], [], []), 0, 0)


_DEFINED_AT = re.compile(r" at (.*):(\d+)$")


def function_file(jaxpr: Jaxpr) -> str | None:
    """The file of the function that `jaxpr` was traced from; None: JAX does not know it."""
    debug = jaxpr.debug_info
    match = _DEFINED_AT.search(debug.func_src_info) if debug and debug.func_src_info else None
    return match.group(1) if match else None


def function_name(jaxpr: Jaxpr) -> str:
    """The name of the function that `jaxpr` was traced from; "": JAX does not know it."""
    debug = jaxpr.debug_info
    return debug.func_src_info.split(" at ")[0] if debug and debug.func_src_info else ""


def raw_frames(traceback: Any) -> Iterable[tuple[Any, int]]:
    """(code object, instruction) of each Python frame, innermost first."""
    return zip(*traceback.raw_frames(), strict=True) if traceback is not None else ()


def line_of(code: Any, instruction: int) -> int:
    """The source line of a frame of `raw_frames`."""
    return _source_info_util.raw_frame_to_frame(code, instruction).start_line


def new_source_info(traceback: Any, name_stack: NameStack) -> SourceInfo:
    """The source of an equation: a traceback (or None) and a name stack."""
    return SourceInfo(traceback, name_stack)
