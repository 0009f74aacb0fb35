"""Finds primitives by name, and the programs and rules that JAX has for some of them.

In:     names, equations.
Out:    the primitives; the programs that implement some equations; Shardy rules.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax._src import custom_partitioning_sharding_rule as _sdy_rule
from jax._src.cudnn import fused_attention_stablehlo as _cudnn_attention
from jax._src.interpreters import mlir as _mlir
from jax._src.lax import windowed_reductions as _windows
from jax._src.random import prng as _prng
from jax._src.random.core import random_gamma_p
from jax.extend.core import Primitive, primitives

from autopar._jax.program import trace
from autopar._jax.types import ClosedJaxpr, JaxprEqn
from autopar._jax.values import physical_aval


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
    """The primitives with these names; a name that this release of JAX does not have is left out.

    Primitives outside `jax.extend.core.primitives` are found in the modules of JAX that `import jax` loads.
    """
    return tuple(primitive for name in names for primitive in _primitives_of_name().get(name, ()))


def high_primitive_jaxpr(eqn: JaxprEqn) -> ClosedJaxpr:
    """The program that implements a high-level primitive of JAX (`call_hi_primitive`)."""
    return trace(lambda *operands: eqn.primitive.to_lojax(*operands, **eqn.params), *(x.aval for x in eqn.invars))


def lowered_program(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The program that JAX lowers a primitive to on every platform; None: its lowering is no JAX function.

    For primitives whose lowering is `jax.interpreters.mlir.lower_fun` of a function, as those of other libraries often are, and
    those of sparse arrays, unless JAX is set to use kernels for these.
    """
    entry = _mlir._lowerings.get(eqn.primitive)
    is_sparse = eqn.primitive.name.startswith(("bcoo_", "bcsr_")) and not jax.config.jax_bcoo_cusparse_lowering
    has_kernel = any(eqn.primitive in rules for rules in _mlir._platform_specific_lowerings.values())
    if entry is None or (has_kernel and not is_sparse):
        return None
    rule = getattr(entry.rule, "__wrapped__", entry.rule)
    if getattr(rule, "__qualname__", "") != "lower_fun.<locals>.f_lowered":
        return None
    of = inspect.getclosurevars(rule).nonlocals
    fun, several = of["fun"], of["multiple_results"]

    def program(*operands: Any) -> Any:
        results = fun(*operands, **eqn.params)
        return results if several else (results,)

    return trace(program, *(x.aval for x in eqn.invars))


def scatter_to_selected(
    eqn: JaxprEqn, source: jax.Array, operand: jax.Array, padding: Any, zero: jax.Array
) -> jax.Array:
    """What `select_and_scatter_add` does with other padding, beginning with `zero`, a scalar, in place of a constant."""
    windows = [eqn.params[name] for name in ("window_dimensions", "window_strides")]
    select = eqn.params["select_prim"].bind
    return _windows._select_and_scatter(operand, select, *windows, padding, source, zero, jax.lax.add)


def key_primitive_implementation(eqn: JaxprEqn) -> Callable[..., Any] | None:
    """A random primitive's function on the integers of keys, as in JAX's own lowering; None: it is no such primitive."""
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


@dataclasses.dataclass(frozen=True)
class TensorType:
    """An array's type, as functions that make a Shardy rule read it."""

    shape: tuple[int, ...]
    rank: int


def shardy_rule(eqn: JaxprEqn) -> Any:
    """The parsed `sharding_rule` of a `custom_partitioning`; None: it has none.

    Returns:
        An object with the fields of `jax.experimental.custom_partitioning.SdyShardingRule`.

    Raises:
        Exception: The error of JAX, or of the user's function, if the rule does not fit.
    """
    rule, notes = eqn.params.get("sharding_rule"), {}
    if callable(rule):
        types = [[TensorType(v.aval.shape, v.aval.ndim) for v in vs] for vs in (eqn.invars, eqn.outvars)]
        rule = rule(*eqn.params["static_args"], jax.sharding.get_abstract_mesh(), *types)
    if isinstance(rule, list | tuple) and len(rule) == 2:
        rule, notes = rule
    return _sdy_rule.str_to_sdy_sharding_rule(rule, **notes) if isinstance(rule, str) else rule


@contextmanager
def with_cudnn_of(capability: tuple[int, int] | None) -> Iterator[None]:
    """Context manager: JAX traces cuDNN's attention for a GPU of this compute capability that is not attached.

    While tracing it JAX asks for the version of cuDNN and the GPU; the answers leave no trace in the program. Without a
    capability, or in a process that has cuDNN, JAX asks the real ones.
    """
    module = _cudnn_attention
    names = ("check_cudnn_version", "check_compute_capability", "is_cuda_compute_capability_equal")
    if capability is None or not all(hasattr(module, name) for name in names) or _has_cudnn():
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


def _has_cudnn() -> bool:
    """Whether this process has cuDNN: JAX's plugin for GPUs may be without NVIDIA's libraries."""
    try:
        return bool(_cudnn_attention.check_cudnn_version())
    except RuntimeError:
        return False


_CUDNN_VERSION = 91100  # 9.11, the oldest with all that JAX 0.10 checks for
