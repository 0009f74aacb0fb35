"""The rule of cuDNN's attention, which `jax.nn.dot_product_attention(implementation="cudnn")` calls.

In:     its forward and backward primitives: query, key, value, bias, lengths, and in the backward pass the residuals.
Out:    `btnh,bsnh,bsnv->btnv`: batch b and heads n may be split; positions t and s and the dims of a head are whole.
Method: where each key head serves g query heads, the dim of query heads is `(n g)`. The gradient of an operand that lacks a
        factor (a bias for all samples, one key head for all queries) is a sum over it. With several sequences packed into a
        sample, the residuals are those of all sequences in a row, across samples: only heads may be split. Paged keys are a
        pool of p pages of s positions, whole on every device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autopar._jax import JaxprEqn
from autopar.ir.rules.linearity import may_be_partial
from autopar.ir.rules.registry import register_named, whole_kernel
from autopar.ir.rules.rule import Dim, Factor, ShardingRule, Term
from autopar.ir.rules.terms import drop_units

_FORWARD, _BACKWARD = ("dot_product_attention_fwd", "dot_product_attention_bwd")


@register_named(*(name + end for name in (_FORWARD, _BACKWARD) for end in ("", "_wrapper")))
def attention(eqn: JaxprEqn) -> ShardingRule:
    """Operands: q, k, v, bias, lengths of q and k, offsets of q and k, page tables; unused ones have no elements."""
    is_backward = eqn.primitive.name.startswith(_BACKWARD)
    shapes = [tuple(atom.aval.shape) for atom in eqn.invars]
    reason = _not_split(eqn)
    if reason is not None:
        return whole_kernel(eqn, f"the kernel `{eqn.primitive}`", reason)
    heads_first = eqn.params["layout"] == 1
    sizes = _sizes(shapes, heads_first)
    is_packed, is_paged = len(shapes[6]) > 1, len(shapes[8]) > 1
    pages = shapes[8][2] if is_paged else 1

    def array(first: Factor, position: Factor, head: Dim, width: Factor) -> Term:
        middle = (head, (position,)) if heads_first else ((position,), head)
        return ((first,), *middle, (width,))

    query_heads, pool = ("n", "g"), "p" if is_paged else "b"
    query, out = array("b", "t", query_heads, "h"), array("b", "t", query_heads, "v")
    key, value = array(pool, "s", ("n",), "h"), array(pool, "s", ("n",), "v")
    bias = _bias(shapes[3], query_heads) or _unused(shapes[3], 3, sizes)
    rest = [_of_samples(shape, k, sizes) for k, shape in enumerate(shapes[4:10], 4)]
    operands: list[Term] = [query, key, value, bias, *rest]
    statistics: Term = (("r" if is_packed else "b",), query_heads, ("t",))
    if is_packed:
        sizes["r"] = shapes[0][0] * (shapes[6][1] - 1)
    if is_backward:
        operands += [statistics, out, out]
        results = [query, key, value, bias][: len(eqn.outvars)]
    else:
        results = [out, statistics][: len(eqn.outvars)]
    terms, sizes = drop_units([*operands, *results], sizes)
    results = terms[len(operands) :]
    split = [f for f in (("n", "g") if is_packed else ("b", "n", "g")) if f in sizes]
    lost = [f for f in split if not all(any(f in dim for dim in term) for term in results)]
    partial = is_backward and all(may_be_partial(var.aval.dtype) for var in eqn.outvars)
    whole = [f for f in sizes if f not in split]
    return ShardingRule(
        tuple(terms[: len(operands)]),
        tuple(results),
        sizes,
        summed=tuple(lost) if partial else (),
        whole=tuple(whole if partial else [*whole, *lost]),
        flops=_flops(eqn, sizes, is_backward) * pages,
    )


def _not_split(eqn: JaxprEqn) -> str | None:
    """Why the kernel is not split; None: it is."""
    if eqn.params["dropout_rate"] > 0:
        return (
            "its dropout counts heads from the first of the whole batch, and the kernel takes no offset (its seed is a "
            "constant of the program): with `dropout_rate=0` and dropout by `jax.random` behind it, it is split"
        )
    if getattr(eqn.params["mask_type"], "name", "") == "ALIBI":
        return "its slopes count heads from the first of all"
    return None


def _sizes(shapes: Sequence[tuple[int, ...]], heads_first: bool) -> dict[Factor, int]:
    (batch, *query, width), (_, *key, _), value = shapes[0], shapes[1], shapes[2]
    (heads, positions), (key_heads, key_positions) = (each if heads_first else each[::-1] for each in (query, key))
    groups = heads // key_heads
    found = {"b": batch, "n": key_heads, "g": groups, "t": positions, "s": key_positions, "h": width, "v": value[-1]}
    return found | ({"p": shapes[1][0]} if len(shapes[8]) > 1 else {})


def _bias(shape: tuple[int, ...], heads: Dim) -> Term:
    """The term of the bias, which may be the same for all samples or all heads."""
    if len(shape) != 4:
        return ()
    return (("b",) if shape[0] > 1 else (), heads if shape[1] > 1 else (), ("t",), ("s",))


def _of_samples(shape: tuple[int, ...], number: int, sizes: dict[Factor, int]) -> Term:
    """The term of lengths, offsets or page tables: a batch dim, then dims of packed sequences or pages; or no elements."""
    if not shape[0]:
        return _unused(shape, number, sizes)
    rest = _unused(shape[1:], number, sizes)
    return (("b",), *rest)


def _unused(shape: tuple[int, ...], number: int, sizes: dict[Factor, int]) -> Term:
    names = [f"o{number}{dim}" for dim in range(len(shape))]
    sizes.update(zip(names, shape, strict=True))
    return tuple((name,) for name in names)


def _flops(eqn: JaxprEqn, sizes: Mapping[str, int], is_backward: bool) -> float:
    """Two products forward, five backward (scores are recomputed); a causal mask halves them, a window scales them."""
    size = {factor: sizes.get(factor, 1) for factor in "bngtshv"}
    each = 2.0 * math.prod(size[factor] for factor in "bngts")
    work = each * (3 * size["h"] + 2 * size["v"] if is_backward else size["h"] + size["v"])
    window = eqn.params.get("sliding_window_length")
    if window is not None:
        return work * min(1.0, window / size["s"])
    return work / 2 if "CAUSAL" in getattr(eqn.params["mask_type"], "name", "") else work
