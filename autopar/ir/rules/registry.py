"""The table of sharding rules: one entry per primitive, written at import only.

In:     equations of the flat program.
Out:    `rule_for(eqn)`.
Method: each family's file registers its rules here; `__init__.py` imports the families. A primitive has a rule in exactly
        one family, or is in one of the lists of `replicated.py`: computed whole on every device, or structured (`scan`,
        `while`, `cond`, ...).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

from autopar._jax import Atom, JaxprEqn, Primitive
from autopar.errors import UnsupportedPrimitiveError, warn
from autopar.ir.rules.replicated import list_of
from autopar.ir.rules.rule import ShardingRule, factor_names, infer_sizes
from autopar.ir.source import source_line

RuleFunction = Callable[[JaxprEqn], ShardingRule]
_Key = TypeVar("_Key")
_RULES: dict[Primitive, RuleFunction] = {}
_RULES_BY_NAME: dict[str, RuleFunction] = {}


def register(*primitives: Primitive) -> Callable[[RuleFunction], RuleFunction]:
    """Make the decorated function the sharding rule of `primitives`.

    Raises `ValueError`: one of them already has a rule.
    """
    return _registering(_RULES, primitives)


def register_named(*names: str) -> Callable[[RuleFunction], RuleFunction]:
    """As `register`, by name, for primitives in modules of JAX that `import jax` does not load: kernels.

    Raises `ValueError`: one of them already has a rule.
    """
    return _registering(_RULES_BY_NAME, names)


def _registering(table: dict[_Key, RuleFunction], keys: Sequence[_Key]) -> Callable[[RuleFunction], RuleFunction]:
    def add(rule: RuleFunction) -> RuleFunction:
        for key in keys:
            if key in table:
                raise ValueError(f"`{key}` already has a sharding rule: {table[key].__name__}.")
            table[key] = rule
        return rule

    return add


def _find(primitive: Primitive) -> RuleFunction | None:
    return _RULES.get(primitive) or _RULES_BY_NAME.get(primitive.name)


def has_rule(primitive: Primitive) -> bool:
    """Whether `primitive` is in the table."""
    return _find(primitive) is not None


def family_of(primitive: Primitive) -> str:
    """The family of a primitive, which is the name of its rule's file; "": it has no rule."""
    rule = _find(primitive)
    return "" if rule is None else rule.__module__.rpartition(".")[2]


def rule_for(eqn: JaxprEqn) -> ShardingRule:
    """The sharding rule of an equation.

    A primitive without a rule is computed whole on every device: silently if it is in a list of `replicated.py`, else with
    a warning that names it and the line.

    Raises `UnsupportedPrimitiveError`: the equation is a collective or mutates a reference.
    """
    rule = _find(eqn.primitive)
    kind = list_of(eqn.primitive.name) if rule is None else None
    if kind in ("COMPUTED_REPLICATED", "SIDE_EFFECTS"):
        return dataclasses.replace(replicated_rule(eqn), host_call=kind == "SIDE_EFFECTS")
    if kind in ("COLLECTIVE", "STATEFUL"):
        raise _out_of_place(eqn)
    if kind == "KERNELS":
        return whole_kernel(eqn, f"the kernel `{eqn.primitive}`", "it has no sharding rule")
    if rule is None:
        warn(
            f"no sharding rule for `{eqn.primitive}` at {source_line(eqn)}: it is computed whole on every device. "
            f"To split it, register a rule for it (docs/how-it-works.md, 'A new rule')."
        )
        return replicated_rule(eqn)
    return rule(eqn)


def whole_kernel(eqn: JaxprEqn, what: str, reason: str) -> ShardingRule:
    """The rule of a kernel that is not split; warns, and tells of the decorator that would split its leading dim."""
    batch = eqn.outvars[0].aval.shape[:1] if eqn.outvars else ()
    fresh = (name for name in factor_names() if name != "b")

    def term(var: Atom) -> str:
        shape = var.aval.shape
        is_batched = bool(batch) and shape[:1] == batch
        return " ".join("b" if is_batched and dim == 0 else next(fresh) for dim in range(len(shape)))

    operands, results = (", ".join(map(term, variables)) for variables in (eqn.invars, eqn.outvars))
    warn(
        f"{what} at {source_line(eqn)} is computed whole on every device: {reason}. To split it, put above the function that "
        f"calls it what is true of that function, with a term for each of its arrays, such as this if they are the kernel's "
        f"and `b` is a dim along which it computes each index by itself:\n"
        f'    @autopar.sharding_rule("{operands} -> {results}")'
    )
    return replicated_rule(eqn)


def _out_of_place(eqn: JaxprEqn) -> UnsupportedPrimitiveError:
    return UnsupportedPrimitiveError(
        f"`{eqn.primitive}` cannot be sharded.",
        given=f"{eqn.primitive} at {source_line(eqn)}",
        wrong="a step is a pure function, written for one device: it neither names mesh axes nor mutates references.",
        do="write it with plain arrays (autopar adds the collectives), or wrap the part in `autopar.sharding_rule`.",
        primitive=str(eqn.primitive),
        source=source_line(eqn),
    )


def replicated_rule(eqn: JaxprEqn) -> ShardingRule:
    """The rule of an operation that every device computes whole: every dim is a factor that may not be split."""
    fresh = factor_names()
    terms = [tuple((next(fresh),) for _ in var.aval.shape) for var in (*eqn.invars, *eqn.outvars)]
    sizes = infer_sizes(terms, [var.aval.shape for var in (*eqn.invars, *eqn.outvars)])
    num_operands = len(eqn.invars)
    return ShardingRule(tuple(terms[:num_operands]), tuple(terms[num_operands:]), sizes, whole=tuple(sizes))
