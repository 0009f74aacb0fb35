"""The only door to `jax.extend` and `jax._src`: what JAX's releases may move, under names that stay.

In:     JAX 0.10 or 0.11.
Out:    the types of a jaxpr, and small functions for what differs between the two: a closed jaxpr is a class of its
        own in 0.10 and a jaxpr that carries constants in 0.11; `scan` tells its operands apart by counts in 0.10 and
        by a tree in 0.11.
Method: imports and adapters, no ideas of its own. No other file of autopar imports those modules.
"""

# ruff: noqa: F401
from __future__ import annotations

import dataclasses
import functools
import io
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import jax
import numpy as np
from jax._src import compiler as _compiler
from jax._src import config as _config
from jax._src import core as _core
from jax._src import custom_partitioning_sharding_rule as _sdy_rule
from jax._src import dtypes as _dtypes
from jax._src import source_info_util as _source_info_util
from jax._src.api_util import InternalFloatingPointError as _InternalFloatingPointError
from jax._src.array import ArrayImpl as _ArrayImpl
from jax._src.core import eval_jaxpr as _eval_jaxpr
from jax._src.cudnn import fused_attention_stablehlo as _cudnn_attention
from jax._src.interpreters import pxla as _pxla
from jax._src.lax.lax import optimization_barrier_p
from jax._src.random import prng as _prng
from jax._src.random.core import random_gamma_p
from jax._src.random.threefry2x32 import threefry2x32_p
from jax.experimental import serialize_executable as _serialize_executable
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var, jaxpr_as_fun, primitives
from jax.extend.source_info_util import NameStack, SourceInfo

DropVar = _core.DropVar
iota_2x32_shape_p = _prng.iota_2x32_shape_p
Atom: TypeAlias = Var | Literal
Aval: TypeAlias = _core.ShapedArray
"""The type of a value: its shape and dtype."""
Constant: TypeAlias = jax.Array | np.ndarray
"""An array that a program holds."""
Params: TypeAlias = Mapping[str, Any]
"""Parameters of an equation: what each is, its primitive says."""
Function: TypeAlias = Callable[..., Any]
"""A function of arrays, to be traced."""

JAX_VERSION: tuple[int, ...] = jax.__version_info__


# Jaxprs.


def open_jaxpr(closed: Any) -> tuple[Jaxpr, list[Any]]:
    """The jaxpr of a closed or open one, and the values of its `constvars` (none for an open one)."""
    return getattr(closed, "jaxpr", closed), list(getattr(closed, "consts", ()))


def all_equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The equations of a jaxpr and of the bodies inside it."""
    yield from jaxpr.eqns
    for inner in _core.subjaxprs(jaxpr):
        yield from all_equations(inner)


def bodies_in(eqn: JaxprEqn) -> list[Jaxpr]:
    """The bodies that an equation holds, not those inside them."""
    return list(_core.jaxprs_in_params(eqn.params))


def close_jaxpr(jaxpr: Jaxpr, consts: Sequence[Any] = ()) -> ClosedJaxpr:
    """The closed jaxpr of `jaxpr` whose `constvars` have the values `consts`."""
    return ClosedJaxpr(jaxpr, list(consts))


_NO_NAMES = _core.DebugInfo("autopar", "flat program", None, None)


def make_jaxpr(invars: Sequence[Var], outvars: Sequence[Atom], eqns: Sequence[JaxprEqn]) -> Jaxpr:
    """A jaxpr of these equations, without constants; its effects are theirs."""
    effects = frozenset[Any]().union(*(eqn.effects for eqn in eqns if eqn.effects)) or _core.no_effects
    return Jaxpr([], list(invars), list(outvars), list(eqns), effects, debug_info=_NO_NAMES)


def trace(function: Callable[..., Any], *avals: Any) -> ClosedJaxpr:
    """The closed jaxpr of `function` at abstract arguments."""
    return jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals))


def trace_function(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    static_argnums: Sequence[int] = (),
    static_argnames: Sequence[str] = (),
) -> tuple[ClosedJaxpr, list[Any], Any]:
    """Trace a function as `jax.jit` does.

    Returns:
        The closed jaxpr, the tracers of other traces that the function captured (they are the first invars then), and
        the structure of what the function returns.
    """
    try:
        hash(function), weakref.ref(function)
    except TypeError:  # a callable object that holds arrays; jit needs something to remember it by
        function = functools.partial(function)
    jitted = jax.jit(function, static_argnums=tuple(static_argnums), static_argnames=tuple(static_argnames))
    with with_automatic_axes():
        traced = jitted.trace(*args, **kwargs)
    return traced.jaxpr, list(getattr(traced, "_consts", ())), traced.out_tree


def trace_context() -> Any:
    """JAX's settings that a traced program depends on: 64 bits, the mesh in context, the precision of products, ..."""
    return _config.trace_context()


def with_automatic_axes() -> AbstractContextManager[None]:
    """Context manager: the mesh in JAX's context has no explicit axes, which would make shardings a part of types."""
    if all(kind == jax.sharding.AxisType.Auto for kind in jax.sharding.get_abstract_mesh().axis_types):
        return nullcontext()
    mesh = jax.sharding.get_mesh()
    return jax.set_mesh(jax.sharding.Mesh(mesh.devices, mesh.axis_names))


def without_mesh() -> AbstractContextManager[None]:
    """Context manager: no mesh in JAX's context (`jax.set_mesh`), so that programs of ours are over meshes of ours."""
    if jax.sharding.get_abstract_mesh().empty:
        return nullcontext()
    return jax.set_mesh(None)


def eval_jaxpr(jaxpr: Jaxpr, consts: Sequence[Any], *args: Any) -> list[Any]:
    """Run a jaxpr, one operation after the other (or trace it, under a transformation)."""
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
    effects: Iterable[Any] = (),
) -> JaxprEqn:
    """A new equation."""
    effects = frozenset(effects) or _core.no_effects
    return _core.new_jaxpr_eqn(list(invars), list(outvars), primitive, dict(params), effects, source_info)


def replace_eqn(
    eqn: JaxprEqn,
    *,
    invars: Sequence[Atom] | None = None,
    outvars: Sequence[Var] | None = None,
    params: Mapping[str, Any] | None = None,
    source_info: SourceInfo | None = None,
) -> JaxprEqn:
    """`eqn` with some parts exchanged; its effects and context stay."""
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
    """`eqn` as it is where no mesh is in JAX's context; bound in a program over another mesh it would be refused."""
    if eqn.ctx.cur_abstract_mesh.empty:
        return eqn
    context = _context_without_mesh(eqn.ctx)
    return JaxprEqn(eqn.invars, eqn.outvars, eqn.primitive, eqn.params, eqn.effects, eqn.source_info, context)


@functools.lru_cache(maxsize=64)
def _context_without_mesh(context: Any) -> Any:
    with context.manager, jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return _core.new_jaxpr_eqn([], [], optimization_barrier_p, {}, _core.no_effects).ctx


def eqn_context(eqn: JaxprEqn) -> Any:
    """Context manager: JAX's settings (threefry, compute type, ...) as they were where `eqn` was traced."""
    return eqn.ctx.manager


def bind_eqn(eqn: JaxprEqn, *operands: Any, params: Mapping[str, Any] | None = None) -> list[Any]:
    """Run one equation on values; always a list of results.

    Args:
        eqn: The equation.
        operands: One value per invar, literals included.
        params: Other parameters than the equation's.
    """
    bind_params = eqn.primitive.get_bind_params(eqn.params if params is None else dict(params))
    if isinstance(bind_params, tuple):  # older contract: functions to pass first
        functions, bind_params = bind_params
        operands = (*functions, *operands)
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*operands, **bind_params)
    return list(results) if eqn.primitive.multiple_results else [results]


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """(constants, carries) among the operands of a `scan` with these parameters; the rest is scanned over."""
    if "ft_in" in params:
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def scan_params(params: Mapping[str, Any], body: Jaxpr, num_consts: int, num_carry: int) -> dict[str, Any]:
    """Parameters of a `scan` with another body: operands are constants, carries, scanned, as the body's invars."""
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


def new_scan_params(length: int, body: Jaxpr, num_consts: int, num_carry: int) -> dict[str, Any]:
    """Parameters of a `scan` of ours, first to last; operands are constants, carries, scanned, as the body's invars."""
    (eqn,) = jax.make_jaxpr(lambda: jax.lax.scan(lambda c, x: (c, x), 0, None, length=length))().eqns
    return scan_params(eqn.params, body, num_consts, num_carry)


# Types of values.


def shaped(value: Any) -> Any:
    """The abstract value of an array, a number (weakly typed), or a `jax.ShapeDtypeStruct`.

    Raises:
        TypeError: It is none of these.
    """
    return _core.shaped_abstractify(value)


def weakly_typed(array: Any) -> Any:
    """The same array, and the same memory, as weakly typed as a Python number."""
    return _ArrayImpl(
        array.aval.update(weak_type=True), array.sharding, array._arrays, committed=array.committed, _skip_checks=True
    )


def buffer_addresses(array: Any) -> list[int]:
    """Where the parts of an array lie that are on devices of this process."""
    return [part.unsafe_buffer_pointer() for part in array._arrays]


def is_key_dtype(dtype: Any) -> bool:
    """Whether `dtype` is that of typed random keys (`jax.random.key`)."""
    return type(dtype) is _prng.KeyTy


def is_key(aval: Any) -> bool:
    """Whether an abstract value is an array of typed random keys."""
    return type(getattr(aval, "dtype", None)) is _prng.KeyTy


def key_impl_name(aval: Any) -> str:
    """Name of the generator of a key array, as `jax.random.wrap_key_data(impl=...)` takes it."""
    return aval.dtype._impl.name


def physical_aval(aval: Any) -> Any:
    """The array of integers that a key array is made of (`key[s]` is `uint32[s, 2]`); other values unchanged."""
    return _core.physical_aval(aval)


def key_data(value: Any) -> Any:
    """The integers of a concrete key array, without copying."""
    return value._base_array if isinstance(value, _prng.PRNGKeyArray) else jax.random.key_data(value)


def as_key(value: Any, impl: str) -> jax.Array:
    """Integers as a key array of the generator of that name; a handle of ours is read."""
    return jax.random.wrap_key_data(value if isinstance(value, jax.Array) else np.asarray(value), impl=impl)


def high_primitive_jaxpr(eqn: JaxprEqn) -> ClosedJaxpr:
    """The program that a primitive of JAX's high-level kind (`call_hi_primitive`) stands for."""
    return trace(lambda *operands: eqn.primitive.to_lojax(*operands, **eqn.params), *(x.aval for x in eqn.invars))


def key_primitive_implementation(eqn: JaxprEqn) -> Callable[..., Any] | None:
    """What a random primitive computes, on the integers of its keys, as JAX's own lowering does; None if it is none."""
    params: Any = eqn.params
    aval: Any = eqn.invars[0].aval if eqn.invars else None
    match eqn.primitive.name:
        case "empty" | "create_empty":
            physical = physical_aval(eqn.outvars[0].aval)
            return lambda: jax.numpy.zeros(physical.shape, physical.dtype)
        case "random_seed":
            return _prng.iterated_vmap_unary(aval.ndim, params["impl"].seed)
        case "random_split":
            split = aval.dtype._impl.split
            return _prng.iterated_vmap_unary(aval.ndim, lambda key: split(key, params["shape"]))
        case "random_bits":
            bits = aval.dtype._impl.random_bits
            return _prng.iterated_vmap_unary(aval.ndim, lambda key: bits(key, params["bit_width"], params["shape"]))
        case "random_fold_in":
            data: Any = eqn.invars[1].aval
            return _fold_in(aval.shape, data.shape, aval.dtype._impl.fold_in)
        case "random_gamma":
            impl, sample = aval.dtype._impl.name, random_gamma_p.impl
            return lambda key, a: sample(jax.random.wrap_key_data(key, impl=impl), a, **params, use_vmap=True)
    return None


def _fold_in(keys_shape: tuple[int, ...], data_shape: tuple[int, ...], fold_in: Callable) -> Callable:
    if not keys_shape and not data_shape:
        return fold_in
    if not data_shape:
        return lambda keys, data: _prng.iterated_vmap_unary(len(keys_shape), lambda key: fold_in(key, data))(keys)
    if not keys_shape:
        return lambda key, data: _prng.iterated_vmap_unary(len(data_shape), lambda item: fold_in(key, item))(data)
    shape = np.broadcast_shapes(keys_shape, data_shape)
    function = fold_in
    for _ in shape:
        function = jax.vmap(function)
    return lambda keys, data: function(
        jax.numpy.broadcast_to(keys, (*shape, *keys.shape[len(keys_shape) :])), jax.numpy.broadcast_to(data, shape)
    )


# Primitives.


@functools.cache
def _primitives_of_name() -> dict[str, tuple[Primitive, ...]]:
    modules = [primitives, *(sys.modules[name] for name in sorted(sys.modules) if name.startswith("jax._src."))]
    found: dict[str, dict[int, Primitive]] = {}
    for module in modules:
        for value in list(vars(module).values()) if module is not None else ():
            if isinstance(value, Primitive):
                found.setdefault(value.name, {})[id(value)] = value
    return {name: tuple(same.values()) for name, same in found.items()}


def find_primitives(*names: str) -> tuple[Primitive, ...]:
    """The primitives that bear these names; a name that this JAX does not know is left out.

    Those outside `jax.extend.core.primitives` are found in JAX's modules as far as `import jax` has loaded them.
    """
    return tuple(primitive for name in names for primitive in _primitives_of_name().get(name, ()))


@contextmanager
def with_cudnn_of(capability: tuple[int, int] | None) -> Iterator[None]:
    """Context manager: JAX traces cuDNN's attention for a GPU that is not here.

    Tracing it JAX asks for the version of cuDNN, and which GPU there is; nothing of the answers is left in the program.

    Args:
        capability: Compute capability of the GPU; None, or where this process has CUDA: JAX finds out by itself.
    """
    module = _cudnn_attention
    names = ("check_cudnn_version", "check_compute_capability", "is_cuda_compute_capability_equal")
    if capability is None or not all(hasattr(module, name) for name in names) or module.cuda_versions is not None:
        yield
        return

    def as_numbers(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    answers = (
        lambda: _CUDNN_VERSION,
        lambda text: capability >= as_numbers(text),
        lambda text: capability == as_numbers(text),
    )
    kept = [getattr(module, name) for name in names]
    for name, answer in zip(names, answers, strict=True):
        setattr(module, name, answer)
    try:
        yield
    finally:
        for name, function in zip(names, kept, strict=True):
            setattr(module, name, function)


_CUDNN_VERSION = 91100  # 9.11, the oldest that does everything that JAX 0.10 asks of it


@dataclasses.dataclass(frozen=True)
class TensorType:
    """What a function that makes a Shardy rule may ask of the type of an array."""

    shape: tuple[int, ...]
    rank: int


def shardy_rule(eqn: JaxprEqn) -> Any:
    """The `sharding_rule` of a `custom_partitioning`, read; None where it has none.

    Returns:
        An object with the fields of `jax.experimental.custom_partitioning.SdyShardingRule`.

    Raises:
        Exception: What JAX or a function of the user's says of a rule that does not fit.
    """
    rule, notes = eqn.params.get("sharding_rule"), {}
    if callable(rule):
        types = [[TensorType(v.aval.shape, v.aval.ndim) for v in vs] for vs in (eqn.invars, eqn.outvars)]
        rule = rule(*eqn.params["static_args"], jax.sharding.get_abstract_mesh(), *types)
    if isinstance(rule, list | tuple) and len(rule) == 2:
        rule, notes = rule
    return _sdy_rule.str_to_sdy_sharding_rule(rule, **notes) if isinstance(rule, str) else rule


def nan_error(error: BaseException) -> FloatingPointError | None:
    """What `jax.jit` raises where a compiled program says that a result is a NaN (or infinite); None: it says not that."""
    if not isinstance(error, _InternalFloatingPointError):
        return None
    return FloatingPointError(f"invalid value ({error.ty}) encountered in {error.name}")


# Where an equation comes from.

_DEFINED_AT = re.compile(r" at (.*):(\d+)$")


def function_file(jaxpr: Jaxpr) -> str | None:
    """The file of the function that `jaxpr` was traced from; None where JAX does not know it."""
    debug = jaxpr.debug_info
    match = _DEFINED_AT.search(debug.func_src_info) if debug and debug.func_src_info else None
    return match.group(1) if match else None


def function_name(jaxpr: Jaxpr) -> str:
    """The name of the function that `jaxpr` was traced from; "" where JAX does not know it."""
    debug = jaxpr.debug_info
    return debug.func_src_info.split(" at ")[0] if debug and debug.func_src_info else ""


def raw_frames(traceback: Any) -> Iterable[tuple[Any, int]]:
    """(code object, instruction) of each Python frame, innermost first."""
    return zip(*traceback.raw_frames(), strict=True) if traceback is not None else ()


def line_of(code: Any, instruction: int) -> int:
    """The source line of a frame of `raw_frames`."""
    return _source_info_util.raw_frame_to_frame(code, instruction).start_line


def new_source_info(traceback: Any, name_stack: NameStack) -> SourceInfo:
    """Where an equation comes from: a traceback (or None) and its name stack."""
    return SourceInfo(traceback, name_stack)


def load_elsewhere(
    compiled: jax.stages.Compiled, old: Sequence[jax.Device], new: Sequence[jax.Device]
) -> jax.stages.Compiled:
    """A compiled program on other devices, without compiling it again.

    Args:
        compiled: The program.
        old: Its devices, in the order of its mesh.
        new: Those that take their places, of the same kind and in one process.

    Raises:
        Exception: What JAX or the platform says where it cannot be moved.
    """
    stored = io.BytesIO()
    _serialize_executable._JaxPjrtPickler(stored).dump(compiled._executable._unloaded_executable)
    stored.seek(0)
    assignment = np.array([[device.id for device in new]])
    options = _compiler.get_compile_options(1, len(new), device_assignment=assignment)

    class Unpickler(_serialize_executable._JaxPjrtUnpickler):
        def persistent_load(self, pid: Any) -> Any:
            if pid[0] == "exec":
                return self.backend.deserialize_executable(pid[1], self.execution_devices, options)
            return super().persistent_load(pid)

    unpickler = Unpickler(stored, new[0].client, list(new))
    unpickler.devices_by_id = {a.id: b for a, b in zip(old, new, strict=True)}
    loaded = unpickler.load().load()
    return jax.stages.Compiled(loaded, [], compiled.args_info, compiled.out_tree, no_kwargs=compiled._no_kwargs)


def host_callbacks(function: Callable[..., Any], operands: Sequence[Any]) -> list[Callable[..., Any]]:
    """What JAX would have called in this process by a function that calls the host: functions of arrays to tuples."""
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    lowered = jax.jit(function).trace(*types).lower(lowering_platforms=("cpu",))
    return list(lowered._lowering.compile_args["host_callbacks"])


# Arrays.


def put_shards(kind: jax.ShapeDtypeStruct, parts: Sequence[np.ndarray], devices: Sequence[jax.Device]) -> jax.Array:
    """An array of its parts in host memory: `jax.device_put` and `make_array_from_single_device_arrays`, in 5 us for 100.

    Args:
        kind: Its type, with its sharding.
        parts: Of each of this process's devices.
        devices: These.
    """
    aval = _core.ShapedArray(kind.shape, kind.dtype)
    return _pxla.batched_device_put(aval, kind.sharding, parts, devices)


# Pytrees.


def outermost_node(tree: Any) -> Any:
    """The structure that is the outermost node of `tree`, with a leaf for each child."""
    leaf = jax.tree.structure(0)
    return type(tree).from_node_data_and_children(
        jax.tree_util.default_registry, tree.node_data(), [leaf] * len(tree.children())
    )


# Types of ours among JAX's.


def reads_as_array(kind: type) -> None:
    """JAX's functions, jitted ones too, take values of this type for the arrays that `np.asarray` makes of them."""

    def on_devices(values: Sequence[Any], shardings: Any, layouts: Any, copy_semantics: Any) -> Any:
        return _pxla.shard_args(shardings, layouts, copy_semantics, [np.asarray(value) for value in values])

    _core.pytype_aval_mappings[kind] = lambda value: _core.ShapedArray(value.shape, value.dtype)
    _dtypes.register_canonicalize_value_handler(kind, None)
    _pxla.shard_arg_handlers[kind] = on_devices
