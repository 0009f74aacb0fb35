"""The rule of `jax.experimental.custom_partitioning`, which its author wrote in Shardy's notation.

In:     a `custom_partitioning` whose `sharding_rule` is `"b s d, d f -> b s f"` or what JAX makes of it.
Out:    `ShardingRule` with the same factors. The per-device program is the function that `partition` returns.
Method: factors are whole where the author wants it, and where a result lacks them: for a sum over a factor `partition` would
        add collectives of its own, which the plan does not have. `partition` is called with a mesh of the axes that split
        the operation, of devices or of microbatches; the function that it returns becomes the body of an operation of the
        same kind, which can be split once more.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from autopar._jax import Atom, Aval, JaxprEqn, all_equations, bind_eqn, open_jaxpr, shardy_rule, trace
from autopar.errors import RuleError
from autopar.ir.rules.kernel_flops import body_flops
from autopar.ir.rules.registry import register_named, whole_kernel
from autopar.ir.rules.replicated import list_of
from autopar.ir.rules.rule import Dim, Shard, ShardingRule, Term, infer_sizes
from autopar.ir.rules.terms import drop_units, factors_of
from autopar.ir.source import source_line


@register_named("custom_partitioning")
def custom_partitioning(eqn: JaxprEqn) -> ShardingRule:
    """The author's rule; replicated, with a warning, if it cannot be read."""
    flops = body_flops(open_jaxpr(eqn.params["call"])[0])
    try:
        return _read(eqn, flops)
    except _CannotReadError as error:
        return whole_kernel(eqn, "the `custom_partitioning` function", str(error))


class _CannotReadError(Exception):
    """The reason why a rule cannot be read."""


def _read(eqn: JaxprEqn, flops: float) -> ShardingRule:
    if eqn.params.get("partition") is None or not eqn.params.get("decode_shardings", True):
        raise _CannotReadError("it has no `partition` function that takes named shardings")
    try:
        rule = shardy_rule(eqn)
    except Exception as error:  # the author's own function
        raise _CannotReadError(f"its `sharding_rule` cannot be read ({error})") from error
    if rule is None:
        raise _CannotReadError("it was given no `sharding_rule`")
    variables = (*eqn.invars, *eqn.outvars)
    mappings = (*rule.operand_mappings, *rule.result_mappings)
    if len(mappings) != len(variables):
        raise _CannotReadError(f"its `sharding_rule` is for {len(mappings)} arrays, and it has {len(variables)}")
    written = [_term(each, var.aval.ndim) for each, var in zip(mappings, variables, strict=True)]
    leading = {dim[0] for term in written for dim in term if dim}  # the arrays may hold only a shard of these
    known_sizes = {factor: size for factor, size in rule.factor_sizes.items() if factor not in leading}
    try:
        sizes = infer_sizes(written, [var.aval.shape for var in variables], "its `sharding_rule`", known_sizes)
    except ValueError as error:
        raise _CannotReadError(str(error).rstrip(".")) from error
    terms, sizes = drop_units(written, sizes)
    operands, results = tuple(terms[: len(eqn.invars)]), tuple(terms[len(eqn.invars) :])
    kept = set(factors_of(*operands)).intersection(*(factors_of(term) for term in results))
    kept -= {*rule.need_replication_factors, *rule.permutation_factors, *rule.reduction_factors}
    whole = tuple(factor for factor in sizes if factor not in kept)
    local = functools.partial(_on_part, operand_terms=operands, result_terms=results)
    return ShardingRule(operands, results, sizes, whole=whole, flops=flops, local=local)


def _term(mapping: Sequence[Any], ndim: int) -> Term:
    """The term of an array with `ndim` dims, from `"... (h d) s"` as JAX parses it; `...` is any number of leading dims."""
    dims: list[Dim] = []
    for each in mapping:
        if isinstance(each, str) and not each[0].isalpha():
            dims += [(f"batch{each[1:] or 0}_{k}",) for k in range(ndim - len(mapping) + 1)]
        else:
            dims.append((each,) if isinstance(each, str) else tuple(each))
    return tuple(dims)


def _on_part(
    eqn: JaxprEqn, shard: Shard, *operands: jax.Array, operand_terms: Sequence[Term], result_terms: Sequence[Term]
) -> Sequence[jax.Array]:
    """The per-device program: the function that `partition` returns for operands and results split by the rule."""
    params = eqn.params
    axes = {axis: shard.axis_sizes[axis] for used in shard.axes_of.values() for axis in used}
    if not axes:
        return bind_eqn(eqn, *operands)
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))

    def split(variables: Sequence[Atom], terms: Sequence[Term]) -> list[Aval]:
        return [
            jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype, sharding=NamedSharding(mesh, _spec(term, shard)))
            for var, term in zip(variables, terms, strict=True)
        ]

    arguments = params["in_tree"].unflatten(split(eqn.invars, operand_terms))
    results = params["out_tree"].unflatten(split(eqn.outvars, result_terms))
    _, function, got_results, got_arguments = params["partition"](*params["static_args"], mesh, arguments, results)
    for given, got in ((arguments, got_arguments), (results, got_results)):
        _check_same(eqn, given, got)

    def flat(*leaves: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(function(*params["in_tree"].unflatten(leaves)))

    part = trace(flat, *map(jax.typeof, operands))
    talking = [
        e.primitive.name for e in all_equations(open_jaxpr(part)[0]) if list_of(e.primitive.name) == "COLLECTIVE"
    ]
    if talking:
        raise _not_followed(eqn, f"what `partition` returns contains a `{talking[0]}`, which no plan accounts for.")
    return bind_eqn(eqn, *operands, params={**params, "call": part})


def _spec(term: Term, shard: Shard) -> PartitionSpec:
    return PartitionSpec(*(tuple(a for f in dim for a in shard.axes_of.get(f, ())) or None for dim in term))


def _check_same(eqn: JaxprEqn, given: Any, got: Any) -> None:
    """Check that `partition` keeps the shardings it was given: the plan has no others."""
    wanted = jax.tree.leaves(got, is_leaf=lambda leaf: isinstance(leaf, NamedSharding))
    for number, (array, sharding) in enumerate(zip(jax.tree.leaves(given), wanted, strict=True)):
        if not sharding.is_equivalent_to(array.sharding, len(array.shape)):
            raise _not_followed(eqn, f"for array {number}, {array.sharding.spec}, it asks for {sharding.spec}.")


def _not_followed(eqn: JaxprEqn, wrong: str) -> RuleError:
    return RuleError(
        "the `partition` function of a `custom_partitioning` does not follow its `sharding_rule`.",
        given=f"`custom_partitioning` at {source_line(eqn)}",
        wrong=wrong,
        do="name the factors that must not be split in `need_replication_factors`.",
        rule=str(eqn.params["sharding_rule"]),
        shapes=tuple(tuple(atom.aval.shape) for atom in eqn.invars),
    )
