"""`autopar.sharding_rule`: makes a user's function (a Pallas kernel, an FFI call) one operation with a rule.

In:     `@sharding_rule("b s d, d f -> b s f {sum d}")` above a function of arrays.
Out:    a function that is one equation in the program, with the rule of that text. Each device calls the function
        itself on local arrays, so it must take its sizes from its arguments.
Method: names are separated by spaces; `(h d)` is a dim of two factors, major to minor, `1` a dim of length 1, and a
        scalar is an empty term. Braces after the results tell what the operation does with factors that some result
        lacks: `sum`, `max` or `min` (it reduces over them); others are not split, nor are those listed under `whole`.

Differentiation goes through the function as if the decorator were not there, since its derivative has another rule. A
kernel with a gradient of its own keeps both rules if the decorator stands on the two functions inside:

    @jax.custom_vjp
    def multiply(x, w): return forward(x, w)              # forward:  @sharding_rule("b d, d f -> b f {sum d}")
    multiply.defvjp(lambda x, w: (forward(x, w), (x, w)), backward)     # backward: @sharding_rule(...) as well
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from autopar._jax import Aval, Jaxpr, JaxprEqn, Primitive, all_equations, open_jaxpr
from autopar.errors import RuleError
from autopar.ir.rules.linearity import linear_groups, may_be_extreme
from autopar.ir.rules.registry import register
from autopar.ir.rules.replicated import SIDE_EFFECTS
from autopar.ir.rules.rule import Dim, Factor, Shard, ShardingRule, Term, infer_sizes
from autopar.ir.rules.terms import factors_of
from autopar.ir.split.placement import Reduction

Function = TypeVar("Function", bound=Callable[..., Any])


def sharding_rule(
    text: str, *, linear: Sequence[Sequence[int]] = (), flops: Callable[..., float] | None = None
) -> Callable[[Function], Function]:
    """Make a function one operation of the program, with the sharding rule `text`.

    Args:
        text: The rule: `"b s d, d f -> b s f {sum d}"`. One term per array among the positional arguments (a tuple or
            dict counts each of its leaves), one per array returned.
        linear: Groups of operands in which the function is linear, such as `[(0,), (1,)]` for a product: these
            may be partial sums, and then the results are.
        flops: FLOPs, from the shapes and dtypes of the whole operands; None: 2 for each combination of the factors.

    Returns:
        A decorator. Keyword arguments of the function must be hashable constants. It may not close over traced arrays.

    Raises:
        RuleError: The text cannot be parsed (at once), or does not fit the arguments (when the function is called).
    """
    parsed = parse_text(text)

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def opaque_function(*args: Any, **keywords: Any) -> Any:
            leaves, tree = jax.tree.flatten(args)
            operands = [jnp.asarray(leaf) for leaf in leaves]
            program, results = jax.make_jaxpr(
                lambda *leaves: function(*jax.tree.unflatten(tree, leaves), **keywords), return_shape=True
            )(*operands)
            groups, host_call = tuple(map(tuple, linear)), host_call_in(open_jaxpr(program)[0])
            call = OpaqueCall(function, tree, tuple(sorted(keywords.items())), text, groups, flops, host_call)
            _check_fit(call, parsed, operands, jax.tree.leaves(results))
            return jax.tree.unflatten(jax.tree.structure(results), opaque_p.bind(*operands, call=call))

        return cast(Function, opaque_function)

    return decorate


@dataclass(frozen=True, slots=True)
class OpaqueCall:
    """The function of one opaque equation, and its rule.

    Attributes:
        function: The user's function.
        tree: Structure of its positional arguments.
        keywords: Its keyword arguments.
        text: Its rule.
        linear: Groups of operands in which it is linear.
        flops: Its FLOPs, from the operands' abstract values.
        host_call: The first primitive in it that calls the host; None: there is none.
        batched: One entry per `vmap` around it, innermost first: which operands have the leading batch dim.
    """

    function: Callable[..., Any]
    tree: jax.tree_util.PyTreeDef
    keywords: tuple[tuple[str, object], ...]
    text: str
    linear: tuple[tuple[int, ...], ...] = ()
    flops: Callable[..., float] | None = None
    host_call: str | None = None
    batched: tuple[tuple[bool, ...], ...] = ()

    @property
    def name(self) -> str:
        """Name of the function; for a `functools.partial`, its text."""
        return getattr(self.function, "__qualname__", repr(self.function))

    def run(self, *operands: jax.Array) -> list[jax.Array]:
        """The function on flat operands, of global or local shapes; flat results."""

        def flat(*leaves: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(self.function(*jax.tree.unflatten(self.tree, leaves), **dict(self.keywords)))

        for batched in self.batched:
            flat = jax.vmap(flat, in_axes=tuple(0 if has_dim else None for has_dim in batched))
        return flat(*operands)

    def __repr__(self) -> str:
        return f"{self.function.__module__}.{self.name}: {self.text}"


def host_call_in(program: Jaxpr) -> str | None:
    """The first primitive in a program that calls the host; None: there is none."""
    return next((eqn.primitive.name for eqn in all_equations(program) if eqn.primitive.name in SIDE_EFFECTS), None)


def parse_text(text: str) -> tuple[tuple[Term, ...], tuple[Term, ...], dict[Factor, str]]:
    """Terms of operands, terms of results, and the notes in braces: factor -> kind.

    Raises `RuleError`: the text cannot be parsed.
    """

    def fail(wrong: str) -> RuleError:
        do = 'write it as "b s d, d f -> b s f {sum d}": a name per dim, with spaces; (h d) for a dim of two factors.'
        return RuleError(
            "this sharding rule cannot be read.", given=repr(text), wrong=wrong, do=do, rule=text, shapes=()
        )

    if not isinstance(text, str):
        raise fail(f"it is of type {type(text).__name__}, not text.")
    match = re.fullmatch(r"([^{}]*)->([^{}]*)(?:\{([^{}]*)\})?\s*", text)
    if match is None or text.count("->") != 1:
        raise fail("there must be one `->`, and notes in one pair of braces at the end.")
    body, results, notes = match.groups()
    sides = []
    for side in (body, results):
        terms = side.split(",") if side.strip() else []
        if any(not re.fullmatch(r"\s*(?:(?:1|[A-Za-z_]\w*|\([\w\s]*\))\s*)*", term) for term in terms):
            raise fail(f"in `{side.strip()}`, a dim is a name, `1`, or names in parentheses.")
        sides.append(tuple(tuple(map(_dim, re.findall(r"\([^)]*\)|\w+", term))) for term in terms))
    noted: dict[Factor, str] = {}
    for note in filter(str.strip, (notes or "").split(",")):
        kind, *factors = note.split()
        if kind not in ("sum", "max", "min", "whole") or not factors:
            raise fail(f"`{note.strip()}` is none of `sum`, `max`, `min`, `whole` with the factors behind it.")
        noted |= dict.fromkeys(factors, kind)
    unknown = [factor for factor in noted if factor not in factors_of(*sides[0], *sides[1])]
    if unknown:
        raise fail(f"`{unknown[0]}` is noted in braces, and stands in no operand.")
    for term in (*sides[0], *sides[1]):
        if len(factors_of(term)) < sum(map(len, term)):
            raise fail("a factor stands twice in one array.")
    return sides[0], sides[1], noted


def _dim(token: str) -> Dim:
    return () if token == "1" else tuple(token.strip("()").split())


def _check_fit(
    call: OpaqueCall, parsed: Any, operands: Sequence[jax.Array], results: Sequence[jax.ShapeDtypeStruct]
) -> None:
    shapes = [tuple(array.shape) for array in (*operands, *results)]
    names = f"{call.name}, {call.text!r}, on {shapes[: len(operands)]} gives {shapes[len(operands) :]}"
    wrong = ""
    for what, terms, arrays in (("operands", parsed[0], operands), ("results", parsed[1], results)):
        if len(terms) != len(arrays):
            wrong = wrong or f"the rule has {len(terms)} {what}, the function {len(arrays)}."
        for number, (term, array) in enumerate(zip(terms, arrays, strict=False)):
            if len(term) != array.ndim:
                wrong = wrong or f"{what[:-1]} {number} has {array.ndim} dims, and {len(term)} in the rule."
    if not wrong:
        try:
            infer_sizes([*parsed[0], *parsed[1]], shapes, "the rule")
        except ValueError as error:
            wrong = str(error)
    if wrong:
        raise RuleError(
            "a sharding rule does not fit its function.",
            given=names,
            wrong=wrong,
            do="write one term per array and one name per dim; a dim of length 1 that meets a longer one is written 1.",
            rule=call.text,
            shapes=tuple(shapes),
        )


opaque_p = Primitive("sharding_rule")
opaque_p.multiple_results = True


@functools.partial(jax.jit, static_argnums=0)
def _run(call: OpaqueCall, *operands: jax.Array) -> list[jax.Array]:
    return call.run(*operands)


def _abstract(*avals: Aval, call: OpaqueCall) -> list[Aval]:
    results = jax.eval_shape(call.run, *(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals))
    return [jax.core.ShapedArray(result.shape, result.dtype) for result in results]


def _differentiate(primals: Sequence[Any], tangents: Sequence[Any], *, call: OpaqueCall) -> tuple[Any, Any]:
    moving = [number for number, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

    def of_moving(*values: jax.Array) -> list[jax.Array]:
        operands = list(primals)
        for number, value in zip(moving, values, strict=True):
            operands[number] = value
        return call.run(*operands)

    return jax.jvp(of_moving, [primals[n] for n in moving], [tangents[n] for n in moving])


def _batch(operands: Sequence[Any], dims: Sequence[Any], *, call: OpaqueCall) -> tuple[Any, Any]:
    batched = tuple(dim is not None for dim in dims)
    moved = [
        jnp.moveaxis(array, dim, 0) if has_dim else array
        for array, dim, has_dim in zip(operands, dims, batched, strict=True)
    ]
    results = opaque_p.bind(*moved, call=replace(call, batched=(*call.batched, batched)))
    return results, [0] * len(results)


opaque_p.def_impl(lambda *operands, call: _run(call, *operands))
opaque_p.def_abstract_eval(_abstract)
ad.primitive_jvps[opaque_p] = _differentiate
batching.primitive_batchers[opaque_p] = _batch
mlir.register_lowering(opaque_p, mlir.lower_fun(lambda *operands, call: call.run(*operands), multiple_results=True))


@register(opaque_p)
def opaque(eqn: JaxprEqn) -> ShardingRule:
    """The rule of the user's text; a factor that some result lacks and no note mentions is whole."""
    call: OpaqueCall = eqn.params["call"]
    operands, results, noted = parse_text(call.text)
    for level, batched in enumerate(call.batched):
        batch = (f"vmap{level}",)
        operands = tuple((batch, *term) if has_dim else term for term, has_dim in zip(operands, batched, strict=True))
        results = tuple((batch, *term) for term in results)
    sizes = infer_sizes([*operands, *results], [var.aval.shape for var in (*eqn.invars, *eqn.outvars)])
    everywhere = [set(factors_of(term)) for term in results]
    gone = [f for f in factors_of(*operands) if f not in noted and not all(f in term for term in everywhere)]
    made = [f for f in factors_of(*results) if f not in noted and f not in factors_of(*operands)]
    if not all(may_be_extreme(var.aval.dtype) for var in eqn.outvars):
        gone += [factor for factor, kind in noted.items() if kind in ("max", "min")]
        noted = {factor: kind for factor, kind in noted.items() if kind not in ("max", "min")}
    flops = (2.0 if len(factors_of(*operands)) > len(factors_of(*results[:1])) else 1.0) * math.prod(sizes.values())
    return ShardingRule(
        operands,
        results,
        sizes,
        summed=tuple(f for f, kind in noted.items() if kind == "sum"),
        reduced={f: cast(Reduction, kind) for f, kind in noted.items() if kind in ("max", "min")},
        whole=tuple(dict.fromkeys([f for f, kind in noted.items() if kind == "whole"] + gone + made)),
        linear=linear_groups(eqn, *call.linear),
        flops=flops if call.flops is None else float(call.flops(*(var.aval for var in eqn.invars))),
        local=_local,
    )


def _local(eqn: JaxprEqn, shard: Shard, *operands: jax.Array) -> Sequence[jax.Array]:
    """The per-device program: the function on local arrays; its results must have the local shapes of the rule."""
    call: OpaqueCall = eqn.params["call"]
    # It stays one operation, so that a microbatch's part can be split further. But a call into the host must be an equation
    # of the program, where its exceptions are caught.
    results = call.run(*operands) if call.host_call else opaque_p.bind(*operands, call=call)
    rule = opaque(eqn)
    for number, (result, term) in enumerate(zip(results, rule.results, strict=True)):
        promised = tuple(map(shard.local_dim, term))
        if result.shape != promised:
            raise RuleError(
                "a function with a sharding rule does not follow it.",
                given=f"{call!r}, called on one device's part: {[array.shape for array in operands]}",
                wrong=f"result {number} has shape {result.shape} there, and {promised} by the rule.",
                do="take all sizes from the shapes of the arguments, or put the factors that must not be split "
                "behind `whole`.",
                rule=call.text,
                shapes=tuple(array.shape for array in operands),
            )
    return results
