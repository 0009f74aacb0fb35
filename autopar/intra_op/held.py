"""Finds the values that are held in memory; the others are fused into, and recomputed by, each kernel that reads them.

In:     `Graph`.
Out:    the held values, with a factor on their bytes. Readers of other values read what these are computed from
        (`liveness.py`).
Method: compilers fuse elementwise operations, slices and the like into the kernels that read them; into several kernels if
        that moves fewer bytes: n kernels that read a value of S bytes, computed from A bytes, move A + S (n + 1), or n A if
        each recomputes it. XLA does not consider the memory that this would save. So a value is held if a product, a
        collective, a loop or the like reads or makes it, if it is slow to compute, or if holding it moves fewer bytes; the
        number of arrays that it is computed from does not matter, their size does.
        A scatter into zeros whose only reader adds it to a value is done in place in that value. bfloat16 values that are
        computed in float32 (a quotient, a hyperbolic tangent) are held in float32 if a reader takes them so: XLA may
        compute more exactly than told, and omits the rounding in between. 8-bit floats that are contracted along two dims
        are held twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp

from autopar._jax import Literal, Var, copies_to_or_from_host
from autopar.intra_op.graph import Graph, Node, Phase
from autopar.intra_op.sharded import Compute
from autopar.intra_op.traffic import is_fused, is_picking, is_view
from autopar.ir.dataflow import inputs_of
from autopar.ir.gradient import is_backward
from autopar.ir.work import num_bytes, num_elements_of
from autopar.tuning import TUNING

SLOW = frozenset(
    "acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma erf erf_inv erfc expm1 lgamma log log1p logistic pow sin"
    " sinh tan tanh".split()
)
"""Many instructions per element: results with several readers are held. Exponentials and roots are single instructions."""


_IN_FLOAT32 = SLOW | {"clamp", "div", "exp", "exp2", "rem", "rsqrt", "sqrt"}
"""Operations that GPUs do on bfloat16 in float32; they add, multiply and compare bfloat16 as it is."""


def held_values(graph: Graph) -> Mapping[Var, int]:
    """Held values, with the factor on the bytes of their type: 2 for bfloat16 held in float32, and for 8-bit floats held in
    two layouts, else 1; cached in the graph."""
    return graph.cached("held", lambda: _find_factors(graph))


def _find_factors(graph: Graph) -> Mapping[Var, int]:
    nodes = [node for node in graph.nodes if node.kind == "op"]
    held, wide = _find_held(graph, nodes), {*_wide_values(nodes), *_in_two_layouts(graph, nodes)}
    return {var: 1 + (var in wide) for var in held}


def _find_held(graph: Graph, nodes: Sequence[Node]) -> set[Var]:
    readers = Counter(var for node in nodes for var in dict.fromkeys(inputs_of(node.eqn)))
    held = {node.var for node in graph.nodes if node.kind == "port" and node.var is not None}
    held.update(edge.var for edge in graph.edges if graph.nodes[edge.target].kind == "port")
    made_by = {var: node for node in nodes for var in node.eqn.outvars}
    for node in nodes:
        if not _is_recomputable(node):
            held.update(node.eqn.outvars)
            held.update(_as_written(var, made_by) for var in read_from_memory(node))
    for scattered, total in _scatter_additions(nodes, readers):
        held.discard(scattered)
        held.add(total)
    made_of: dict[Var, dict[Var, int]] = {}
    for node in nodes:
        for var in node.eqn.outvars:
            if var in held:
                continue
            count, leaves = readers.get(var, 0), _leaves(node, made_of)
            once, size = sum(leaves.values()), num_bytes(var)
            is_less = once + (count + 1) * size < count * once
            if count > 1 and (is_less or _is_slow(node)):
                held.add(var)
            else:
                made_of[var] = leaves
    return held


def _wide_values(nodes: Sequence[Node]) -> Iterator[Var]:
    """bfloat16 values computed in float32 that a reader takes in float32, and none as an array of bfloat16; without those
    that the per-device program keeps narrow for the backward pass (`partition/ahead.py`)."""
    made = {node.eqn.outvars[0] for node in nodes if _is_in_float32(node)}
    taken = {var for node in nodes if _is_in_float32(node) or _widens(node) for var in inputs_of(node.eqn)}
    narrow = {var for node in nodes for var in read_from_memory(node)}
    forward = kept_narrow(nodes)
    narrow |= {var for node in nodes if is_backward(node.eqn) for var in inputs_of(node.eqn) if var in forward}
    yield from (var for var in made if var in taken and var not in narrow and var.aval.dtype == jnp.bfloat16)


def kept_narrow(operations: Sequence[Node | Compute]) -> set[Var]:
    """bfloat16 results that are slow to compute and lead to other heavy work of the forward pass.

    The backward pass reads them through a barrier, so that they wait for it as they are. (What leads to none is recomputed
    there, and is part of the kernels that read it.)
    """
    found: set[Var] = set()
    leads: set[Var] = set()
    for operation in reversed(operations):
        eqn = operation.eqn
        if not is_backward(eqn) and not (is_fused(operation) and leads.isdisjoint(eqn.outvars)):
            leads.update(inputs_of(eqn))
            if eqn.primitive.name in SLOW and eqn.outvars[0].aval.dtype == jnp.bfloat16:
                found.update(eqn.outvars)
    return found


def _in_two_layouts(graph: Graph, nodes: Sequence[Node]) -> Iterator[Var]:
    """8-bit floats that products of one phase contract along the last dim, and others along another one: their kernels need
    the contracted dim to be minor, so that there are two arrays."""
    ways: dict[tuple[Var, Phase], set[bool]] = {}
    for node in nodes:
        if node.eqn.primitive.name == "dot_general":
            for atom, summed in zip(node.eqn.invars, node.eqn.params["dimension_numbers"][0], strict=True):
                if isinstance(atom, Var) and atom.aval.dtype.name.startswith("float8"):
                    is_last = atom.aval.ndim - 1 in summed
                    ways.setdefault((atom, graph.phases.get(node.eqn, "f")), set()).add(is_last)
    yield from (var for (var, _), found in ways.items() if len(found) > 1)


def _is_in_float32(node: Node) -> bool:
    return node.eqn.primitive.name in _IN_FLOAT32


def _widens(node: Node) -> bool:
    return node.eqn.primitive.name == "convert_element_type" and node.eqn.params["new_dtype"] == jnp.float32


def _leaves(node: Node, made_of: Mapping[Var, Mapping[Var, int]]) -> dict[Var, int]:
    """The held values that an operation's result is computed from, and the bytes read of each; a slice reads what it
    returns."""
    found: dict[Var, int] = {}
    for var in inputs_of(node.eqn):
        for leaf, size in made_of.get(var, {var: num_bytes(var)}).items():
            found[leaf] = max(size, found.get(leaf, 0))
    if is_picking(node):
        most = sum(map(num_bytes, node.eqn.outvars))
        return {leaf: min(size, most) for leaf, size in found.items()}
    return found


def _is_recomputable(node: Node) -> bool:
    """Whether an operation can be fused into the kernels that read its results."""
    return is_fused(node) and not copies_to_or_from_host(node.eqn) and not node.rule.summed and not node.rule.reduced


def read_from_memory(operation: Node | Compute) -> list[Var]:
    """Operands that must be arrays in memory: not those of reductions, of scatters to what windows select (whose kernels
    compute them), the source of a slice, or the target of a scatter."""
    rule, eqn = operation.rule, operation.eqn
    if rule.selected is not None:
        return []
    if is_fused(operation) or len([o for o in rule.operands if o]) <= 1 and not copies_to_or_from_host(eqn):
        return []
    first = 1 if is_picking(operation) or _scatters(operation) else 0
    return [atom for atom in eqn.invars[first:] if not isinstance(atom, Literal)]


def _as_written(var: Var, made_by: Mapping[Var, Node]) -> Var:
    """The value that is in memory for a value made by views: elementwise work writes its result in the reader's layout; a
    product's result, or an input, is transposed by a kernel of its own, and is then itself in memory."""
    written, maker = var, made_by.get(var)
    while maker is not None and is_view(maker.eqn):
        (written,) = inputs_of(maker.eqn)
        maker = made_by.get(written)
    return written if maker is not None and _is_recomputable(maker) else var


def _scatters(node: Node | Compute) -> bool:
    return node.eqn.primitive.name.startswith("scatter")


def _scatter_additions(nodes: Sequence[Node], readers: Mapping[Var, int]) -> Iterator[tuple[Var, Var]]:
    """Results of scatters whose only reader is an addition, with the sum."""
    scattered = {node.eqn.outvars[0] for node in nodes if _scatters(node) and readers.get(node.eqn.outvars[0]) == 1}
    for node in nodes:
        if node.eqn.primitive.name in ("add", "add_any"):
            yield from ((var, node.eqn.outvars[0]) for var in inputs_of(node.eqn) if var in scattered)


def _is_slow(node: Node) -> bool:
    size = sum(num_elements_of(v) for v in node.eqn.outvars)
    return node.eqn.primitive.name in SLOW or node.rule.flops > TUNING.slow_flops * size
