"""Recognizes calls of JAX's own kernels for grouped products (megablox) in a traced program.

In:     a call, and how its operands that depend on no input are computed.
Out:    `grouped_product`: parameters of `grouped_product_p`; None: the call is another function.
Method: by the dataflow graph: the result must be computed by the same operations from the operands as in what JAX traces for
        the product with the kernel's block sizes. So another function of that name, or another release's, is not taken for
        one, and its kernel is treated as the user's. When a loop is differentiated, JAX hoists what is loop-invariant: values
        in the call that depend on no input become operands, computed by a call of the same name before the loop. With those
        substituted, the graph is the same (`structure`).
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from autopar._jax import (
    Atom,
    Aval,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    make_jaxpr,
    new_var,
    open_jaxpr,
    replace_eqn,
)
from autopar.ir.region import closed_bodies, region_of
from autopar.ir.rules.grouped_product import COLUMNS_OF_GROUPS, GROUPS_OF_ROWS, MODULE, ROWS_OF_GROUPS, Tiles, multiply

_NAMES = ("gmm", "tgmm")
_CALLS = ("jit", "pjit", "closed_call", "eval_jaxpr")
Known = Mapping[Var, str]
"""Values that depend on no input -> a digest of how they are computed."""


def grouped_product(call: JaxprEqn, known: Known) -> tuple[dict[str, Any], list[int]] | None:
    """`grouped_product_p`'s parameters for a call, and the positions of its three operands; None: it is another function."""
    if not _may_be_one(call):
        return None
    given = [k for k, atom in enumerate(call.invars) if not isinstance(atom, Var) or atom not in known]
    body, _ = open_jaxpr(call.params["jaxpr"])
    kernels = [eqn for eqn in body.eqns if eqn.primitive.name == "pallas_call"]
    lengths = _tiles(kernels[0]) if len(kernels) == 1 and len(given) == 3 else None
    if lengths is None:
        return None
    avals = [call.invars[k].aval for k in given]
    for numbers in _numbers_of([aval.ndim for aval in (*avals, *(var.aval for var in call.outvars))]):
        params = {
            "ragged_dot_dimension_numbers": numbers,
            "preferred_element_type": call.outvars[0].aval.dtype,
            "tiles": Tiles(lengths, kernels[0].params["interpret"]),
        }
        if structure(call.params["jaxpr"], _operands(call, known)) == _structure_of(tuple(avals), **params):
            return {**params, "precision": None}, given
    return None


def known_results(call: JaxprEqn, known: Known) -> dict[Var, str]:
    """Digests of the results of a call that may be the hoisted part of such a product; empty: it cannot be."""
    if not _may_be_one(call) or not all(isinstance(atom, Literal) or atom in known for atom in call.invars):
        return {}
    return dict(zip(call.outvars, structure(call.params["jaxpr"], _operands(call, known)), strict=True))


def _may_be_one(call: JaxprEqn) -> bool:
    return sys.modules.get(MODULE) is not None and call.params.get("name") in _NAMES


def _operands(call: JaxprEqn, known: Known) -> tuple[str, ...]:
    """A digest of each operand; unknown ones are numbered."""
    count = iter(range(len(call.invars)))
    return tuple(
        _of_literal(atom) if isinstance(atom, Literal) else known.get(atom) or f"operand {next(count)}"
        for atom in call.invars
    )


def _numbers_of(ndims: Sequence[int]) -> Sequence[lax.RaggedDotDimensionNumbers]:
    """The dimension numbers that a call may have, by the numbers of dims of its three operands and its result."""
    if ndims[2:] not in ([1, 2], [1, 3]):
        return ()
    return {(2, 3): (ROWS_OF_GROUPS, COLUMNS_OF_GROUPS), (2, 2): (GROUPS_OF_ROWS,)}.get((ndims[0], ndims[1]), ())


def _tiles(kernel: JaxprEqn) -> tuple[int, int, int] | None:
    """The kernel's block sizes: both of the first operand, and the last of the result."""
    shapes = [each.block_shape for each in kernel.params["grid_mapping"].block_mappings]
    if len(shapes) != 3 or len(shapes[0]) != 2:
        return None
    sizes = [getattr(block, "block_size", block) for block in (*shapes[0], shapes[2][-1])]
    return (sizes[0], sizes[1], sizes[2]) if all(isinstance(size, int) for size in sizes) else None


@functools.lru_cache(maxsize=256)
def _structure_of(avals: Sequence[Aval], **params: Any) -> tuple[str, ...]:
    """`structure` of what JAX traces for such a product."""
    structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    try:
        traced = jax.make_jaxpr(functools.partial(multiply, **params))(*structs)
    except (TypeError, ValueError):  # a release of JAX with another signature
        return ()
    calls = [eqn for eqn in open_jaxpr(traced)[0].eqns if eqn.params.get("name") in _NAMES]
    return structure(calls[0].params["jaxpr"], _operands(calls[0], {})) if len(calls) == 1 else ()


@functools.lru_cache(maxsize=256)
def structure(program: Jaxpr | ClosedJaxpr, operands: Sequence[str]) -> tuple[str, ...]:
    """For each result of a program, a digest of its dataflow graph back to the operands, independent of equation order.

    Calls count as inlined, and loops as unrolled: JAX hoists loop-invariant values and unrolls short loops.

    `operands`: a digest of each operand.
    """
    body, consts = open_jaxpr(program)
    made = dict(zip(body.invars, operands, strict=True))
    made.update(zip(body.constvars, map(_of_constant, consts), strict=True))

    def of(atom: Atom) -> str:
        return _of_literal(atom) if isinstance(atom, Literal) else made[atom]

    for eqn in body.eqns:
        made.update(zip(eqn.outvars, _results(eqn, tuple(map(of, eqn.invars))), strict=True))
    return tuple(map(of, body.outvars))


def _results(eqn: JaxprEqn, operands: tuple[str, ...]) -> Sequence[str]:
    if eqn.primitive.name in _CALLS:
        return structure(next(eqn.params[name] for name in ("jaxpr", "call_jaxpr") if name in eqn.params), operands)
    if eqn.primitive.name == "scan" and not region_of(eqn).of_role("xs", "ys"):
        (turn,), consts = closed_bodies(eqn), len(region_of(eqn).consts)
        carries = operands[consts:]
        for _ in range(eqn.params["length"]):
            carries = structure(turn, operands[:consts] + carries)
        return carries
    whole = _digest(_alone(eqn), *operands)
    return [f"{whole} {k}" for k in range(len(eqn.outvars))]


def _alone(eqn: JaxprEqn) -> str:
    """The text of one operation, without the names of its operands."""
    invars, outvars = ([new_var(atom.aval) for atom in atoms] for atoms in (eqn.invars, eqn.outvars))
    return str(make_jaxpr(invars, outvars, [replace_eqn(eqn, invars=invars, outvars=outvars)]))


def _of_literal(literal: Literal) -> str:
    return f"{literal.aval.str_short()} {literal.val}"


def _of_constant(value: Any) -> str:
    array = np.asarray(value)
    return _digest(str(array.dtype), str(array.shape), array.tobytes().hex())


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
