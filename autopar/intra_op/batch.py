"""Which dims carry the batch: followed through the program by the rules alone.

In:     a flat program and the dims of its inputs that are the batch.
Out:    `BatchDims`: for each value the dims that run over samples, for each equation the factors that do.
Method: forward propagation: a factor is of the batch if it leads an operand's dim that is; then so is every result dim
        that it leads. Loops are followed to a fixed point.

Apart from the split solver (`ir/split/`), for it answers what may be, and that what must be: the solver proves that a program
can be done in exact shards, each value split along one dim, and refuses one that cannot; here every program has an answer,
also one that no microbatch can be of (statistics over the batch, pairs of samples along two dims), for that is what a plan
made by hand means by the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from autopar._jax import Jaxpr, JaxprEqn, Literal, Var
from autopar.ir.dataflow import inputs_of, variables
from autopar.ir.region import is_region, region_of
from autopar.ir.rules import ShardingRule

Dims = frozenset[int]


@dataclass(eq=False, slots=True)
class BatchDims:
    """Attributes:
    of: Dims of each value that run over samples; absent: none.
    pure: Dims of each value that run over samples and nothing else: cut into two dims, both do.
    readers: Values that an equation with batch factors reads and that have no batch dim: what samples are
        multiplied with, that is parameters and what is made of them.
    lent: Dims of values without samples that meet samples' dims in whoever reads them: of random bits, of a mask.
    factors: Of equations, the factors that run over samples, once they are asked for (`factors_of`).
    parameters: `readers` and all that these are made of without samples, once they are asked for (`hand_plans.py`).
    """

    of: dict[Var, Dims] = field(default_factory=dict)
    pure: dict[Var, Dims] = field(default_factory=dict)
    readers: dict[Var, None] = field(default_factory=dict)
    lent: dict[Var, Dims] = field(default_factory=dict)
    factors: dict[JaxprEqn, tuple[str, ...]] = field(default_factory=dict)
    parameters: dict[Var, None] | None = None

    def dims(self, atom: object) -> Dims:
        """Batch dims of a value; none for a literal, or where there is no value."""
        return self.of.get(atom, frozenset()) if isinstance(atom, Var) else frozenset()

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
    if not any([atom in batch.of or atom in batch.pure for atom in eqn.invars if isinstance(atom, Var)]):
        return ()
    found: dict[str, None] = {}
    for atom, term in zip(eqn.invars, rule.operands, strict=True):
        for d in sorted(batch.dims(atom)):
            if term[d]:
                found[term[d][0]] = None
    return tuple(dict.fromkeys((*found, *_pure_factors(eqn, rule, batch))))


def factors_of(eqn: JaxprEqn, rule: ShardingRule, batch: BatchDims) -> tuple[str, ...]:
    """`batch_factors` of a program that has been followed to its end: found once."""
    found = batch.factors.get(eqn)
    if found is None:
        found = batch.factors[eqn] = batch_factors(eqn, rule, batch)
    return found


def _pure_factors(eqn: JaxprEqn, rule: ShardingRule, batch: BatchDims) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for atom, term in zip(eqn.invars, rule.operands, strict=True):
        for d in () if isinstance(atom, Literal) else sorted(batch.pure.get(atom, ())):
            found.update(dict.fromkeys(term[d]))
    return tuple(found)


def follow_batch(jaxpr: Jaxpr, rule_of: Mapping[JaxprEqn, ShardingRule], inputs: Mapping[int, Dims]) -> BatchDims:
    """Follow the batch from the inputs.

    `rule_of`: rule of each plain equation. `inputs`: batch dims of the inputs that have some, by position.
    """
    batch = BatchDims()
    for position, dims in inputs.items():
        batch.add(jaxpr.invars[position], dims)
        batch.pure[jaxpr.invars[position]] = dims
    _follow(jaxpr, rule_of, batch)
    _lend(jaxpr, rule_of, batch)
    return batch


def _lend(jaxpr: Jaxpr, rule_of: Mapping[JaxprEqn, ShardingRule], batch: BatchDims) -> None:
    """Follow the samples' factors backwards, to what is made for them; not around loops."""
    for eqn in reversed(jaxpr.eqns):
        if is_region(eqn):
            _lend_region(eqn, rule_of, batch)
            continue
        rule = rule_of[eqn]
        factors = factors_of(eqn, rule, batch) or batch.lent_factors(eqn, rule)
        for atom, term in zip(eqn.invars, rule.operands, strict=True) if factors else ():
            batch.lend(atom, (d for d, dim in enumerate(term) if dim and dim[0] in factors))


def _lend_region(eqn: JaxprEqn, rule_of: Mapping[JaxprEqn, ShardingRule], batch: BatchDims) -> None:
    region = region_of(eqn)
    for b in region.bindings:
        lent = batch.lent.get(b.result, frozenset()) if b.result is not None else frozenset()
        for atom in b.values or ([b.outer] if b.role == "through" else []):
            batch.lend(atom, {d - b.lead for d in lent if d >= b.lead})
    for body in region.bodies:
        _lend(body, rule_of, batch)
    for b in region.bindings:
        for var in b.variables:
            lent = batch.lent.get(var, frozenset())
            batch.lend(b.outer, {d + b.lead for d in lent})


def _follow(jaxpr: Jaxpr, rule_of: Mapping[JaxprEqn, ShardingRule], batch: BatchDims) -> None:
    for eqn in jaxpr.eqns:
        if is_region(eqn):
            _follow_region(eqn, rule_of, batch)
            continue
        rule = rule_of[eqn]
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


def _follow_region(eqn: JaxprEqn, rule_of: Mapping[JaxprEqn, ShardingRule], batch: BatchDims) -> None:
    """Through the bodies, to a fixed point: what is carried has the dims of any trip."""
    region = region_of(eqn)
    for b in region.bindings:
        dims = frozenset(d - b.lead for d in batch.dims(b.outer) if d >= b.lead)
        for var in b.variables:
            batch.add(var, dims)
    changed = True
    while changed:
        for body in region.bodies:
            _follow(body, rule_of, batch)
        changed = False
        for b in region.carries:
            for var in b.variables:
                changed |= batch.add(var, batch.dims(b.value))
    for b in region.bindings:
        if b.result is not None:
            inside = batch.dims(b.outer).union(*map(batch.dims, (*b.variables, *b.values)))
            batch.add(b.result, frozenset(d + b.lead for d in inside))


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
        marked = [a for a in inputs_of(eqn) if a in after or batch.dims(a)]
        if not marked:
            continue
        after.update(eqn.outvars)
        if is_region(eqn):
            region = region_of(eqn)
            anyway = region.kind == "while"
            for b in region.bindings:
                after.update(var for var in b.variables if anyway or any(b.outer is a for a in marked))
            for body in region.bodies:
                _mark_after(body, batch, after)


def _mark_before(jaxpr: Jaxpr, batch: BatchDims, before: set[Var]) -> None:
    for eqn in reversed(jaxpr.eqns):
        marked = {var: var in before or bool(batch.dims(var)) for var in eqn.outvars}
        if not any(marked.values()):
            continue
        before.update(inputs_of(eqn))
        if is_region(eqn):
            region = region_of(eqn)
            for b in region.bindings:
                before.update(variables(b.values) if marked.get(b.result, b.role == "test") else ())
            for body in region.bodies:
                _mark_before(body, batch, before)
