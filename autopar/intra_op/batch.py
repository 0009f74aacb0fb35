"""Which dims carry the batch: followed through the program by the rules alone.

In:     a flat program and the dims of its inputs that are the batch.
Out:    `BatchDims`: for each value the dims that run over samples, for each equation the factors that do.
Method: forward propagation: a factor is of the batch if it leads an operand's dim that is; then so is every result dim
        that it leads. Loops are followed to a fixed point.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from autopar._jax import Jaxpr, JaxprEqn, Literal, Var
from autopar.ir.rules import ShardingRule
from autopar.ir.structure import body_jaxprs, is_structured, scan_parts, while_parts

Dims = frozenset[int]


@dataclass(eq=False, slots=True)
class BatchDims:
    """Attributes:
    of: Dims of each value that run over samples; absent: none.
    pure: Dims of each value that run over samples and nothing else: cut into two dims, both do.
    readers: Values that an equation with batch factors reads and that have no batch dim: what samples are
        multiplied with, that is parameters and what is made of them.
    lent: Dims of values without samples that meet samples' dims in whoever reads them: of random bits, of a mask.
    """

    of: dict[Var, Dims] = field(default_factory=dict)
    pure: dict[Var, Dims] = field(default_factory=dict)
    readers: dict[Var, None] = field(default_factory=dict)
    lent: dict[Var, Dims] = field(default_factory=dict)

    def dims(self, atom: object) -> Dims:
        """Batch dims of a value; none for a literal."""
        return frozenset() if isinstance(atom, Literal) else self.of.get(atom, frozenset())

    def add(self, var: Var, dims: Dims) -> bool:
        """Record further batch dims; whether that was news."""
        known = self.of.get(var, frozenset())
        if dims <= known:
            return False
        self.of[var] = known | dims
        return True

    def lent_factors(self, eqn: JaxprEqn, rule: ShardingRule) -> tuple[str, ...]:
        """Factors of an equation on no samples whose results are read in the samples' parts."""
        found: dict[str, None] = {}
        for var, term in zip(eqn.outvars, rule.results, strict=True):
            found.update(dict.fromkeys(term[d][0] for d in sorted(self.lent.get(var, ())) if term[d]))
        return tuple(found)

    def lend(self, atom: object, dims: Iterable[int]) -> None:
        """Record dims of a value without samples that its reader wants in the samples' parts."""
        if isinstance(atom, Var) and not self.dims(atom):
            self.lent[atom] = self.lent.get(atom, frozenset()) | frozenset(dims)


def batch_factors(eqn: JaxprEqn, rule: ShardingRule, batch: BatchDims) -> tuple[str, ...]:
    """Factors of an equation that run over samples."""
    found: dict[str, None] = {}
    for atom, term in zip(eqn.invars, rule.operands, strict=True):
        for d in sorted(batch.dims(atom)):
            if term[d]:
                found[term[d][0]] = None
    return tuple(dict.fromkeys((*found, *_pure_factors(eqn, rule, batch))))


def _pure_factors(eqn: JaxprEqn, rule: ShardingRule, batch: BatchDims) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for atom, term in zip(eqn.invars, rule.operands, strict=True):
        for d in () if isinstance(atom, Literal) else sorted(batch.pure.get(atom, ())):
            found.update(dict.fromkeys(term[d]))
    return tuple(found)


def follow_batch(jaxpr: Jaxpr, rule_of: Mapping[int, ShardingRule], inputs: Mapping[int, Dims]) -> BatchDims:
    """Follow the batch from the inputs.

    Args:
        jaxpr: Flat program.
        rule_of: Rule of each plain equation, by identity.
        inputs: Batch dims of the inputs that have some, by position.
    """
    batch = BatchDims()
    for position, dims in inputs.items():
        batch.add(jaxpr.invars[position], dims)
        batch.pure[jaxpr.invars[position]] = dims
    _follow(jaxpr, rule_of, batch)
    _lend(jaxpr, rule_of, batch)
    return batch


def _lend(jaxpr: Jaxpr, rule_of: Mapping[int, ShardingRule], batch: BatchDims) -> None:
    """Follow the samples' factors backwards, to what is made for them; not around loops."""
    for eqn in reversed(jaxpr.eqns):
        if is_structured(eqn):
            _lend_region(eqn, rule_of, batch)
            continue
        rule = rule_of[id(eqn)]
        factors = batch_factors(eqn, rule, batch) or batch.lent_factors(eqn, rule)
        for atom, term in zip(eqn.invars, rule.operands, strict=True) if factors else ():
            batch.lend(atom, (d for d, dim in enumerate(term) if dim and dim[0] in factors))


def _lend_region(eqn: JaxprEqn, rule_of: Mapping[int, ShardingRule], batch: BatchDims) -> None:
    if eqn.primitive.name == "scan":
        parts = scan_parts(eqn)
        for inside, result in parts.ys:
            batch.lend(inside, (d - 1 for d in batch.lent.get(result, ()) if d > 0))
        _lend(parts.body, rule_of, batch)
        for outer, var in parts.consts:
            batch.lend(outer, batch.lent.get(var, ()))
        for outer, var in parts.xs:
            batch.lend(outer, (d + 1 for d in batch.lent.get(var, ())))
        return
    for body in body_jaxprs(eqn):
        _lend(body, rule_of, batch)
        if eqn.primitive.name == "cond":
            for outer, var in zip(eqn.invars[1:], body.invars, strict=True):
                batch.lend(outer, batch.lent.get(var, ()))


def _follow(jaxpr: Jaxpr, rule_of: Mapping[int, ShardingRule], batch: BatchDims) -> None:
    for eqn in jaxpr.eqns:
        if is_structured(eqn):
            _follow_region(eqn, rule_of, batch)
            continue
        rule = rule_of[id(eqn)]
        factors = batch_factors(eqn, rule, batch)
        if not factors:
            continue
        for atom in eqn.invars:
            if not isinstance(atom, Literal) and not batch.dims(atom):
                batch.readers[atom] = None
        pure = _pure_factors(eqn, rule, batch)
        for var, term in zip(eqn.outvars, rule.results, strict=True):
            batch.add(var, frozenset(d for d, dim in enumerate(term) if dim and dim[0] in factors))
            if pure:
                batch.pure[var] = frozenset(d for d, dim in enumerate(term) if dim and all(f in pure for f in dim))


def _follow_region(eqn: JaxprEqn, rule_of: Mapping[int, ShardingRule], batch: BatchDims) -> None:
    match eqn.primitive.name:
        case "scan":
            parts = scan_parts(eqn)
            for outer, var in parts.consts:
                batch.add(var, batch.dims(outer))
            for outer, var in parts.xs:
                batch.add(var, frozenset(d - 1 for d in batch.dims(outer) if d > 0))
            loops = [(outer, (var,), inside, result) for outer, var, inside, result in parts.carries]
            _follow_carries(parts.body, loops, rule_of, batch)
            for inside, result in parts.ys:
                batch.add(result, frozenset(d + 1 for d in batch.dims(inside)))
        case "while":
            loop = while_parts(eqn)
            for outer, var in (*loop.cond_consts, *loop.body_consts):
                batch.add(var, batch.dims(outer))
            both = [(outer, (seen, var), inside, result) for outer, seen, var, inside, result in loop.carries]
            _follow_carries(loop.body, both, rule_of, batch)
            _follow(loop.cond_body, rule_of, batch)
        case "cond":
            for branch in body_jaxprs(eqn):
                for outer, var in zip(eqn.invars[1:], branch.invars, strict=True):
                    batch.add(var, batch.dims(outer))
                _follow(branch, rule_of, batch)
                for inside, result in zip(branch.outvars, eqn.outvars, strict=True):
                    batch.add(result, batch.dims(inside))
        case _:
            for outer, result in zip(eqn.invars, eqn.outvars, strict=True):
                batch.add(result, batch.dims(outer))


def _follow_carries(body: Jaxpr, loops: list, rule_of: Mapping[int, ShardingRule], batch: BatchDims) -> None:
    for outer, variables, _, _ in loops:
        for var in variables:
            batch.add(var, batch.dims(outer))
    changed = True
    while changed:
        _follow(body, rule_of, batch)
        changed = False
        for _, variables, inside, _ in loops:
            for var in variables:
                changed |= batch.add(var, batch.dims(inside))
    for _, variables, _, result in loops:
        batch.add(result, batch.dims(variables[-1]))


def between_samples(jaxpr: Jaxpr, batch: BatchDims) -> set[Var]:
    """Values without samples that are made of samples and on which further samples wait: statistics over the batch.

    What is communicated of these cannot wait to be sent with others; of parameters (made of no samples) and gradients
    (no sample waits for them) it can. Loops are followed coarsely: all results depend on all operands.
    """
    after: set[Var] = set()
    before: set[Var] = set()
    _mark_after(jaxpr, batch, after)
    _mark_before(jaxpr, batch, before)
    return {var for var in after & before if not batch.dims(var)}


def _mark_after(jaxpr: Jaxpr, batch: BatchDims, after: set[Var]) -> None:
    for eqn in jaxpr.eqns:
        marked = [not isinstance(a, Literal) and (a in after or bool(batch.dims(a))) for a in eqn.invars]
        if not any(marked):
            continue
        after.update(eqn.outvars)
        for body in body_jaxprs(eqn) if is_structured(eqn) else ():
            by_place = eqn.primitive.name in ("scan", "cond")
            pairs = zip(reversed(body.invars), reversed(marked), strict=False)
            after.update(var for var, mark in pairs if mark or not by_place)
            _mark_after(body, batch, after)


def _mark_before(jaxpr: Jaxpr, batch: BatchDims, before: set[Var]) -> None:
    for eqn in reversed(jaxpr.eqns):
        marked = [var in before or bool(batch.dims(var)) for var in eqn.outvars]
        if not any(marked):
            continue
        before.update(a for a in eqn.invars if not isinstance(a, Literal))
        for body in body_jaxprs(eqn) if is_structured(eqn) else ():
            pairs = zip(body.outvars, marked, strict=False)
            before.update(a for a, mark in pairs if mark and not isinstance(a, Literal))
            _mark_before(body, batch, before)
